"""Diagnostics of a run by noise level: its log of losses, spikes, gradients, the file and the plot."""

import itertools
import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import runs
import torch
from diffusers import DDPMScheduler
from PIL import Image
from safetensors.numpy import load_file
from tables import cases

from diffusers_lrlab.core.plotting import new_figure
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.diagnostics.gradient_probes import GradientProbes
from diffusers_lrlab.diagnostics.plot import _heat_map, _Rows, plot_timesteps
from diffusers_lrlab.diagnostics.timestep_log import (
    SpikeDetector,
    TimestepLog,
    bin_starts,
    expected_probabilities,
    read_timesteps,
    table_schema,
    write_timesteps,
)
from diffusers_lrlab.objective.processes import DDPM
from diffusers_lrlab.timesteps.sampling import get_timestep_sampler

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def column(log, name):
    return log.table[name].to_pylist()


def add_row(log, update, timesteps, losses, expected=None):
    log.add(torch.as_tensor(timesteps), torch.as_tensor(losses))
    num = log.starts[-1]
    return log.add_row(update, np.full(num, 1 / num) if expected is None else expected)


def random_losses(count, seed=0, num_timesteps=1000):
    generator = np.random.default_rng(seed)
    return generator.integers(0, num_timesteps, count), generator.lognormal(size=count).astype(np.float32)


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_bins", "num_timesteps"), [(1, 1000), (10, 333), (7, 50), (50, 50)])
def test_rows_agree_with_numpy(num_bins, num_timesteps):
    log, asked = TimestepLog(num_bins, num_timesteps), np.random.default_rng(1).dirichlet(np.ones(num_timesteps))
    sizes = np.diff(log.starts)  # every timestep is in one bin, and bins are nearly equal
    assert (sizes.sum(), sizes.min()) == (num_timesteps, num_timesteps // num_bins)
    assert sizes.max() - sizes.min() <= 1
    timesteps, losses = random_losses(300, num_timesteps=num_timesteps)
    for part in np.array_split(np.arange(290), 7):  # of unequal lengths
        log.add(torch.from_numpy(timesteps[part]), torch.from_numpy(losses[part]))
    assert add_row(log, 41, timesteps[290:], losses[290:], asked) == []
    bounds = [*itertools.pairwise(log.starts.tolist())]
    parts = [losses[(timesteps >= first) & (timesteps < end)].astype(np.float64) for first, end in bounds]
    assert column(log, "num_samples") == [len(part) for part in parts]
    assert column(log, "share") == [len(part) / 300 for part in parts]
    for name, function in (("loss_mean", np.mean), ("loss_variance", np.var)):
        expected = [function(part) if len(part) else None for part in parts]
        np.testing.assert_allclose(column(log, name), expected, rtol=1e-9, atol=1e-12)
    assert column(log, "asked_share") == pytest.approx([asked[first:end].sum() for first, end in bounds], rel=1e-12)
    assert [*zip(column(log, "first_timestep"), column(log, "last_timestep"), strict=True)] == [
        (first, end - 1) for first, end in bounds
    ]
    assert (column(log, "update"), column(log, "bin")) == ([41] * num_bins, [*range(num_bins)])
    assert not log.sums.any()


def test_bins_without_images_have_no_loss_and_equal_losses_no_variance_below_0():
    log = TimestepLog(4, 8)
    assert add_row(log, 0, [2, 3, 3], [1.0, 2.0, 3.0]) == []
    assert column(log, "num_samples") == [0, 3, 0, 0]
    assert column(log, "loss_mean") == [None, 2, None, None]
    assert column(log, "loss_variance") == [None, pytest.approx(2 / 3), None, None]
    log = TimestepLog(1, 10)
    add_row(log, 0, torch.zeros(1000, dtype=torch.int64), torch.full((1000,), 0.1))
    assert 0 <= column(log, "loss_variance")[0] < 1e-12


def test_validation_losses_are_means_over_bins():
    log = TimestepLog(4, 100)
    losses = {"validation_loss": np.array([1.0, 2, 3, 5, 7, 8]), "validation_loss_ema": np.arange(6.0)}
    log.add_validation(6, np.array([0, 24, 25, 49, 75, 99]), losses)
    assert column(log, "validation_loss") == [1.5, 4, None, 7.5]
    assert column(log, "validation_loss_ema") == [0.5, 2.5, None, 4.5]
    assert column(log, "update") == [6] * 4


@cases(("name", "first", "last"), [("uniform", 0, 99), ("clts", 3, 3), ("easy_to_hard", 0, 99), ("banded", 0, 99)])
def test_the_expected_density_is_the_mean_over_updates(name, first, last):
    sampler = get_timestep_sampler(name, 50, 100)
    expected = torch.stack([sampler.probabilities(update) for update in range(first, last + 1)]).mean(dim=0)
    np.testing.assert_allclose(expected_probabilities(sampler, first, last), expected, rtol=1e-12, atol=1e-15)


def test_the_expected_density_of_long_intervals_and_of_samplers_that_follow_losses():
    sampler = get_timestep_sampler("clts", 10, 5000)
    every = sampler.probabilities(np.arange(4000)).mean(dim=0)
    np.testing.assert_allclose(expected_probabilities(sampler, 0, 3999), every, rtol=1e-3)
    sampler = get_timestep_sampler("loss_second_moment:history=1", 4)
    assert expected_probabilities(sampler, 0, 9).tolist() == [0.25] * 4
    sampler.observe(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    expected = 0.999 * np.array([0.1, 0.2, 0.3, 0.4]) + 0.001 / 4
    np.testing.assert_allclose(expected_probabilities(sampler, 0, 9), expected, rtol=1e-12)


# --- spikes ----------------------------------------------------------------------------------------------------------


def test_falling_and_constant_losses_are_no_spikes():
    noise, detector = np.random.default_rng(0).lognormal(sigma=0.3, size=(20, 200)), SpikeDetector(20)
    assert not any(detector.flag(losses).any() for losses in (noise * np.linspace(1, 0.1, 200)).T)
    detector = SpikeDetector(1)
    assert not any(detector.flag(np.array([0.5])) for _ in range(50))
    assert not detector.flag(np.array([0.52]))
    assert detector.flag(np.array([0.6]))


def test_the_window_of_each_bin_is_that_of_a_plain_list():
    """The last 50 losses of a bin, from 20 on, in the words of the definition."""
    generator, detector, logs = np.random.default_rng(1), SpikeDetector(3), [[], [], []]
    for _ in range(200):
        losses = np.where(generator.uniform(size=3) < (1, 0.8, 0.1), generator.lognormal(sigma=2, size=3), np.nan)
        expected = []
        for log, loss in zip(logs, losses, strict=True):
            before = np.array(log[-50:])
            is_spike = False
            if len(before) >= 20 and not np.isnan(loss):
                deviation = max(1.4826 * np.median(np.abs(before - np.median(before))), 0.01)
                is_spike = np.log(loss) > np.median(before) + 8 * deviation
            expected.append(bool(is_spike))
            log += [] if np.isnan(loss) else [np.log(loss)]
        assert detector.flag(losses).tolist() == expected


# --- resumed ---------------------------------------------------------------------------------------------------------


def add_update(log, update):
    """The rows of one update: losses at every second one, validation at every third, gradients at every fifth."""
    generator = np.random.default_rng(update)
    if update % 2 == 1:
        timesteps, losses = random_losses(5, seed=update, num_timesteps=20)  # so that bins stay empty
        add_row(log, update, timesteps, np.exp(0.1 * np.log(losses)) * (9 if update in (61, 71) else 1))
    done = update + 1
    if done % 3 == 0:
        log.add_validation(done, np.arange(20), {"validation_loss": generator.random(20)})
    if done % 5 == 0:
        log.add_gradients(done, generator.random(4).tolist(), [1.0, math.nan, 2.0, 3.0])


@pytest.mark.parametrize("stopped", [30, 33, 62])
def test_a_restored_log_goes_on_as_if_it_had_not_been_stopped(tmp_path, stopped):
    whole, first, second = TimestepLog(4, 20), TimestepLog(4, 20), TimestepLog(4, 20)
    for update in range(100):
        add_update(whole, update)
    assert any(column(whole, "loss_spike"))
    for update in range(stopped + 7):  # of a run that was killed some time after its checkpoint
        add_update(first, update)
    write_timesteps(first.table, tmp_path / "first")
    second.restore(read_timesteps(tmp_path / "first"), stopped)
    for update in range(stopped, 100):
        add_update(second, update)
    assert second.table == whole.table
    assert pq.read_table(tmp_path / "first").schema.equals(table_schema())
    assert read_timesteps(tmp_path / "none").num_rows == 0


# --- gradients -------------------------------------------------------------------------------------------------------


def output(sample):
    return type("Output", (), {"sample": sample})


class ProbedModel(torch.nn.Module):
    """A convolution with dropout, which must be off, and parameters that are frozen or take no part."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.kernel = torch.nn.Parameter(torch.randn(2, 2, 3, 3, generator=generator) / 4)
        self.scale = torch.nn.Parameter(torch.ones(10))
        self.dropout = torch.nn.Dropout(0.5)
        self.frozen = torch.nn.Parameter(torch.ones(2, 1, 1), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, noisy_images, timesteps):
        hidden = torch.nn.functional.conv2d(self.dropout(noisy_images), self.kernel, padding=1) * self.frozen
        return output(hidden.tanh() * self.scale[timesteps // 10].view(-1, 1, 1, 1))


SCHEDULER = DDPMScheduler(num_train_timesteps=100)
PROCESS = DDPM(SCHEDULER)
IMAGES = torch.rand(40, 2, 6, 5, generator=torch.Generator().manual_seed(3)) * 2 - 1


def mean_gradient(model, probes, timesteps, part=slice(None)):
    """By ordinary means: the gradient of the mean loss in one forward and backward pass, as one vector."""
    model.zero_grad()
    alpha = SCHEDULER.alphas_cumprod[timesteps[part]].view(-1, 1, 1, 1)
    images, noise = IMAGES[:32][part], probes.noise[part]
    prediction = model.eval()(alpha.sqrt() * images + (1 - alpha).sqrt() * noise, timesteps[part]).sample
    (prediction - noise).square().mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in (model.kernel, model.scale)]).double()


@pytest.mark.parametrize("num_bins", [1, 10])
def test_gradients_agree_with_ordinary_ones(num_bins):
    model = ProbedModel()
    probes = GradientProbes(Batch(IMAGES), PROCESS, bin_starts(num_bins, 100), CPU)
    norms, noise_scales = probes(model)
    assert len(norms) == len(noise_scales) == num_bins
    for timesteps, norm, noise_scale in zip(probes.timesteps, norms, noise_scales, strict=True):
        assert norm == pytest.approx(mean_gradient(model, probes, timesteps).norm().item(), rel=1e-5)
        groups = [mean_gradient(model, probes, timesteps, slice(start, start + 8)) for start in range(0, 32, 8)]
        # E |mean of n|^2 = |G|^2 + tr / n, known for n = 8 and n = 32: two equations.
        small, large = np.mean([group.square().sum().item() for group in groups]), norm**2
        squared_norm, trace = np.linalg.solve([[1, 1 / 8], [1, 1 / 32]], [small, large])
        assert squared_norm > 0
        assert noise_scale == pytest.approx(trace / squared_norm, rel=1e-3)


@pytest.mark.parametrize(("num_bins", "num_timesteps"), [(7, 100), (100, 100), (1, 5)])
def test_probes_are_spread_over_their_bin(num_bins, num_timesteps):
    starts = bin_starts(num_bins, num_timesteps)
    probes = GradientProbes(Batch(IMAGES), PROCESS, starts, CPU)
    for timesteps, first, end in zip(probes.timesteps, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        counts = torch.bincount(timesteps - first, minlength=end - first)
        assert counts.sum() == 32
        assert len(counts) == end - first
        assert counts.max() - counts.min() <= 1
        means = timesteps.view(4, 8).double().mean(dim=1)  # the groups stand for the same noise levels
        assert means.max() - means.min() <= max(1, (end - first) / 8)


class Constant(torch.nn.Module):
    """Predicts the same for every image, so that the gradient of each is `2 (w - noise) / pixels`."""

    def __init__(self, values):
        super().__init__()
        self.values = torch.nn.Parameter(values.clone())

    def forward(self, noisy_images, timesteps):
        return output(self.values.expand_as(noisy_images))


def test_groups_that_share_images_and_gradients_of_nothing_but_noise_have_no_noise_scale():
    shared = GradientProbes(Batch(IMAGES[:31]), PROCESS, bin_starts(1, 100), CPU)
    assert math.isnan(shared(ProbedModel())[1][0])
    nothing = GradientProbes(Batch(torch.zeros(32, 1, 8, 8)), PROCESS, bin_starts(1, 100), CPU)
    norms, noise_scales = nothing(Constant(nothing.noise.mean(dim=0)))
    assert norms[0] < 1e-6
    assert math.isnan(noise_scales[0])


# --- the plot --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["asked_share", "share"])
def test_a_uniform_density_is_one_in_bins_of_any_width(key):
    log = TimestepLog(3, 5)
    add_row(log, 0, torch.arange(5), torch.ones(5))
    axes = new_figure(4, 3, dpi=50).subplots()
    _heat_map(axes, _Rows(log.table), key, "", is_density=True)
    assert axes.collections[0].get_array().flatten().tolist() == pytest.approx([1, 1, 1])


@pytest.mark.pictures
@pytest.mark.parametrize(("num_bins", "num_updates", "panels"), [(1, 1, 2), (4, 150, 3)])
def test_there_is_a_plot_of_any_rows(tmp_path, num_bins, num_updates, panels):
    log = TimestepLog(num_bins, 100)
    for update in range(num_updates):
        add_row(log, update, *random_losses(6, seed=update, num_timesteps=100))
        if panels == 3:  # those of gradients are not in every log, nor are validation losses
            log.add_validation(update + 1, np.arange(100), {"validation_loss": np.linspace(0, 1, 100)})
            log.add_gradients(update + 1, [1.0, 2.0, 3.0, 4.0], [math.nan, 1.0, 2.0, 3.0])
    plot_timesteps(log.table, tmp_path / "timesteps.png")
    with Image.open(tmp_path / "timesteps.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    assert len(np.unique(pixels @ np.array([1, 256, 256**2]))) > 20
    assert pixels.shape[0] / pixels.shape[1] == pytest.approx(2.2 * panels / 7.2, rel=0.1)


# --- real runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """The same run without and with diagnostics. Dropout shows any draw of random numbers."""
    base = tmp_path_factory.mktemp("observed")
    small = [argument for argument in runs.tiny_arguments(base, dropout=0.2) if not argument.startswith("--logging_steps")]
    small += ["--max_train_steps=7", "--train_batch_size=24", "--logging_steps=3", "--validation_steps=4"]
    small += ["--checkpointing_steps=5"]
    runs.run(*small, f"--output_dir={base / 'without'}", "--log_timestep_bins=0")
    runs.run(*small, f"--output_dir={base / 'with'}", "--log_timestep_bins=4", "--timestep_grad_every=2")
    return base / "without", base / "with"


def test_diagnostics_change_nothing(observed):
    for part in ("checkpoint-5/unet", "checkpoint-5/unet_ema", "checkpoint-7/unet", "unet"):
        expected, found = (load_file(folder / part / "diffusion_pytorch_model.safetensors") for folder in observed)
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], value, err_msg=f"{part} {key}")
    expected, found = ((folder / "lrlab" / "metrics.jsonl").read_text() for folder in observed)
    assert expected == found
    lines = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in found.splitlines()]
    assert len(lines) == 3 + 2  # of losses, and of validation
    for folder, is_written in zip(observed, (False, True), strict=True):
        for name in ("timesteps.parquet", "timesteps.png"):
            assert (folder / "lrlab" / name).exists() == is_written


def test_the_rows_of_a_run(observed):
    path = observed[1] / "lrlab" / "timesteps.parquet"
    assert pq.read_table(path).schema.names == [
        "update", "bin", "first_timestep", "last_timestep", "num_samples", "share", "asked_share", "loss_mean",
        "loss_variance", "loss_spike", "validation_loss", "validation_loss_ema", "grad_norm", "grad_noise_scale",
    ]  # fmt: skip
    rows = pq.read_table(path).to_pandas()
    metrics, validations = runs.read_metrics(observed[1])
    of_losses = rows[rows["num_samples"].notna()]
    assert of_losses["update"].tolist() == [update for update in (2, 5, 6) for _ in range(4)]
    for metric, (update, part) in zip(metrics, of_losses.groupby("update"), strict=True):
        total = 24 * (1 if update == 6 else 3)
        assert metric["update"] == update
        assert part["num_samples"].sum() == total
        assert (part["num_samples"] * part["loss_mean"].fillna(0)).sum() / total == pytest.approx(metric["loss"], rel=1e-5)
        assert part["asked_share"].tolist() == pytest.approx([1 / 4] * 4, rel=1e-12)
        assert not part["loss_spike"].any()
    for key in ("validation_loss", "validation_loss_ema"):
        of_validation = rows[rows[key].notna()].groupby("update")[key].mean()  # of 16 images, 4 in each bin
        expected = {validation["update"]: validation[key] for validation in validations}
        assert of_validation.to_dict() == pytest.approx(expected, rel=1e-6)
    measured = rows[rows["grad_norm"].notna()]
    assert measured["update"].tolist() == [update for update in (2, 4, 6) for _ in range(4)]
    assert (measured["grad_norm"] > 0).all()
