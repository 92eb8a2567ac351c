"""What a run knows of its noise levels: sums, rows, spikes, gradients, the file and the picture."""

import itertools
import json
import math
import random

import numpy as np
import pyarrow.parquet as pq
import pytest
import runs
import torch
from diffusers import DDPMScheduler
from PIL import Image
from safetensors.numpy import load_file

from diffusers_lrlab.core.plotting import new_figure
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.diagnostics.gradients import GradientProbes
from diffusers_lrlab.diagnostics.plot import _heat_map, _Rows, plot_timesteps
from diffusers_lrlab.diagnostics.timestep_log import (
    SpikeDetector,
    TimestepLog,
    TimestepLosses,
    bin_starts,
    expected_probabilities,
    read_timesteps,
    table_schema,
    write_timesteps,
)
from diffusers_lrlab.objective.ddpm import DDPM
from diffusers_lrlab.timesteps.sampling import get_timestep_sampler

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def rows_of(log):
    return log.table.to_pylist()


# --- bins ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_train_timesteps", [1, 2, 7, 10, 50, 333, 1000])
def test_bins_cover_every_timestep_once(num_train_timesteps):
    for num_bins in {1, 2, 3, 7, 10, 49, num_train_timesteps - 1, num_train_timesteps}:
        if 1 <= num_bins <= num_train_timesteps:
            starts = bin_starts(num_bins, num_train_timesteps)
            parts = [range(first, end) for first, end in itertools.pairwise(starts.tolist())]
            assert [*itertools.chain(*parts)] == [*range(num_train_timesteps)]
            sizes = {len(part) for part in parts}
            assert min(sizes) >= 1
            assert max(sizes) - min(sizes) <= 1


def test_bins_that_divide_the_timesteps_are_equal():
    assert bin_starts(4, 1000).tolist() == [0, 250, 500, 750, 1000]


# --- sums of losses --------------------------------------------------------------------------------------------------


def by_numpy(starts, timesteps, losses):
    """Number, mean and variance of the losses in each bin."""
    parts = [losses[(timesteps >= first) & (timesteps < end)] for first, end in itertools.pairwise(starts)]
    return [(len(part), part.mean() if len(part) else None, part.var() if len(part) else None) for part in parts]


def random_losses(count, seed=0, num_timesteps=1000):
    generator = np.random.default_rng(seed)
    return generator.integers(0, num_timesteps, count), generator.lognormal(size=count).astype(np.float32)


@pytest.mark.parametrize(("num_bins", "num_timesteps"), [(1, 1000), (10, 1000), (7, 50), (50, 50)])
def test_sums_and_rows_agree_with_numpy(num_bins, num_timesteps):
    log = TimestepLog(num_bins, num_timesteps)
    sums = TimestepLosses(log.starts, CPU)
    timesteps, losses = random_losses(300, num_timesteps=num_timesteps)
    for part in np.array_split(np.arange(300), 7):  # of unequal lengths
        sums.add(torch.from_numpy(timesteps[part]), torch.from_numpy(losses[part]))
    asked = np.random.default_rng(1).dirichlet(np.ones(num_timesteps))
    assert log.add_losses(41, sums.sums, asked) == []

    expected = by_numpy(log.starts, timesteps, losses.astype(np.float64))
    assert [row["num_samples"] for row in rows_of(log)] == [count for count, _, _ in expected]
    for key, place in (("loss_mean", 1), ("loss_variance", 2)):
        np.testing.assert_allclose(
            [row[key] for row in rows_of(log)], [each[place] for each in expected], rtol=1e-9, atol=1e-12
        )
    assert [row["share"] for row in rows_of(log)] == [count / 300 for count, _, _ in expected]
    for row in rows_of(log):
        inside = asked[row["first_timestep"] : row["last_timestep"] + 1]
        assert row["asked_share"] == pytest.approx(inside.sum(), rel=1e-12)
    assert [(row["update"], row["bin"], row["loss_spike"]) for row in rows_of(log)] == [
        (41, n, False) for n in range(num_bins)
    ]
    assert rows_of(log)[0]["first_timestep"] == 0
    assert rows_of(log)[-1]["last_timestep"] == num_timesteps - 1
    assert sum(row["share"] for row in rows_of(log)) == pytest.approx(1)
    assert sum(row["asked_share"] for row in rows_of(log)) == pytest.approx(1)


def test_losses_of_many_images_that_are_alike_have_no_variance_below_0():
    log = TimestepLog(1, 10)
    sums = TimestepLosses(log.starts, CPU)
    sums.add(torch.zeros(1000, dtype=torch.int64), torch.full((1000,), 0.1))
    log.add_losses(0, sums.sums, np.full(10, 0.1))
    assert 0 <= rows_of(log)[0]["loss_variance"] < 1e-12


def test_bins_without_images_have_no_loss():
    log = TimestepLog(4, 8)
    sums = TimestepLosses(log.starts, CPU)
    sums.add(torch.tensor([2, 3, 3]), torch.tensor([1.0, 2.0, 3.0]))
    assert log.add_losses(0, sums.sums, np.full(8, 1 / 8)) == []
    assert [row["num_samples"] for row in rows_of(log)] == [0, 3, 0, 0]
    assert [row["share"] for row in rows_of(log)] == [0, 1, 0, 0]
    assert [row["loss_mean"] for row in rows_of(log)] == [None, 2, None, None]
    assert [row["loss_variance"] for row in rows_of(log)] == [None, pytest.approx(2 / 3), None, None]


def test_validation_losses_are_means_over_bins():
    log = TimestepLog(4, 100)
    timesteps = np.array([0, 24, 25, 49, 75, 99])
    losses = {"validation_loss": np.array([1.0, 2, 3, 5, 7, 8]), "validation_loss_ema": np.arange(6.0)}
    log.add_validation(6, timesteps, losses)
    assert [row["validation_loss"] for row in rows_of(log)] == [1.5, 4, None, 7.5]
    assert [row["validation_loss_ema"] for row in rows_of(log)] == [0.5, 2.5, None, 4.5]
    assert {row["update"] for row in rows_of(log)} == {6}


# --- what was asked for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["uniform", "clts", "clts_reversed", "easy_to_hard", "banded"])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (3, 9), (0, 99)])
def test_the_density_asked_for_is_the_mean_over_updates(name, first, last):
    sampler = get_timestep_sampler(name, 50, 100)
    expected = torch.stack([sampler.probabilities(update) for update in range(first, last + 1)]).mean(dim=0)
    np.testing.assert_allclose(expected_probabilities(sampler, first, last), expected, rtol=1e-12, atol=1e-15)


def test_long_intervals_are_averaged_closely_enough():
    sampler = get_timestep_sampler("clts", 10, 5000)
    every = sampler.probabilities(np.arange(4000)).mean(dim=0)
    np.testing.assert_allclose(expected_probabilities(sampler, 0, 3999), every, rtol=1e-3)


def test_the_density_of_a_sampler_that_follows_losses_is_that_of_now():
    sampler = get_timestep_sampler("loss_second_moment:history=1", 4)
    assert expected_probabilities(sampler, 0, 9).tolist() == [0.25] * 4
    sampler.observe(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    expected = 0.999 * np.array([0.1, 0.2, 0.3, 0.4]) + 0.001 / 4
    np.testing.assert_allclose(expected_probabilities(sampler, 0, 9), expected, rtol=1e-12)


# --- spikes ----------------------------------------------------------------------------------------------------------


def test_a_jump_is_a_spike_once_there_is_something_to_compare_with():
    losses = np.random.default_rng(0).lognormal(sigma=0.1, size=60)
    for length in (5, 19, 20, 21, 60):
        detector = SpikeDetector(2)
        # The other bin has images once only, and knows nothing of this one.
        assert not any(detector.flag(np.array([loss, np.nan])).any() for loss in losses[:length])
        assert detector.flag(np.array([5.0, 5.0])).tolist() == [length >= 20, False]


def test_falling_losses_and_noise_are_no_spikes():
    generator = np.random.default_rng(0)
    for _ in range(20):
        detector = SpikeDetector(1)
        noise = generator.lognormal(sigma=0.3, size=200)
        assert not any(detector.flag(np.array([loss])) for loss in noise * np.linspace(1, 0.1, 200))


def test_losses_that_do_not_move_at_all_are_no_spikes():
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


def test_a_spike_is_written_into_row_and_result():
    log, sums = TimestepLog(3, 30), TimestepLosses(bin_starts(3, 30), CPU)
    for update in range(31):
        sums.sums.zero_()
        sums.add(torch.tensor([5, 15, 25]), torch.tensor([1.0, 5.0 if update == 30 else 1.0, 1.0]) + 0.01 * (update % 3))
        assert log.add_losses(update, sums.sums, np.full(30, 1 / 30)) == ([1] if update == 30 else [])
    assert [(row["update"], row["bin"]) for row in rows_of(log) if row["loss_spike"]] == [(30, 1)]


# --- going back ------------------------------------------------------------------------------------------------------


def add_update(log, update):
    """What a run adds in one update: losses every second one, validation every third, gradients every fifth."""
    generator = np.random.default_rng(update)
    if update % 2 == 1:
        sums = TimestepLosses(log.starts, CPU)
        timesteps, losses = random_losses(5, seed=update, num_timesteps=20)  # so that bins stay empty
        losses = np.exp(0.1 * np.log(losses)) * (9 if update in (61, 71) else 1)
        sums.add(torch.from_numpy(timesteps), torch.from_numpy(losses))
        log.add_losses(update, sums.sums, np.full(20, 1 / 20))
    done = update + 1
    if done % 3 == 0:
        log.add_validation(done, np.arange(20), {"validation_loss": generator.random(20)})
    if done % 5 == 0:
        log.add_gradients(done, generator.random(4).tolist(), [1.0, math.nan, 2.0, 3.0])


@pytest.mark.parametrize("stopped", [30, 31, 33, 35, 62, 72, 80])
def test_a_log_that_was_restored_goes_on_as_if_it_had_not_been(tmp_path, stopped):
    whole, first, second = TimestepLog(4, 20), TimestepLog(4, 20), TimestepLog(4, 20)
    for update in range(100):
        add_update(whole, update)
    assert any(row.get("loss_spike") for row in rows_of(whole))
    # As far as a run went that was killed some time after its checkpoint.
    for update in range(stopped + 7):
        add_update(first, update)
    write_timesteps(first.table, tmp_path / "first")
    second.restore(read_timesteps(tmp_path / "first"), stopped)
    for update in range(stopped, 100):
        add_update(second, update)
    write_timesteps(whole.table, tmp_path / "whole")
    write_timesteps(second.table, tmp_path / "second")
    assert read_timesteps(tmp_path / "second") == read_timesteps(tmp_path / "whole")


def test_restoring_keeps_bins_without_validation_images(tmp_path):
    """Of a validation right at the checkpoint; with few images some bins have none."""
    log = TimestepLog(4, 20)
    log.add_losses(5, TimestepLosses(log.starts, CPU).sums + 1, np.full(20, 1 / 20))
    log.add_validation(6, np.array([2, 12]), {"validation_loss": np.array([1.0, 2.0])})
    write_timesteps(log.table, tmp_path / "rows")
    restored = TimestepLog(4, 20)
    restored.restore(read_timesteps(tmp_path / "rows"), 6)
    assert [(row["update"], row["bin"]) for row in rows_of(restored)] == [
        (row["update"], row["bin"]) for row in rows_of(log)
    ]


def test_restoring_forgets_losses_of_the_update_that_is_done_again():
    """A row of losses tells the last update in it, one of validation the number done: 6 is after the one, at the other."""
    log = TimestepLog(1, 10)
    for update in (5, 6):
        log.add_losses(update, torch.ones(3, 1, dtype=torch.float64), np.full(10, 0.1))
    log.add_validation(6, np.array([5]), {"validation_loss": np.array([1.0])})
    log.add_validation(7, np.array([5]), {"validation_loss": np.array([1.0])})
    log.restore(log.table, 6)
    kept = [(row["update"], row["loss_mean"] is not None) for row in rows_of(log)]
    assert kept == [(5, True), (6, False)]


# --- the file --------------------------------------------------------------------------------------------------------


def test_rows_survive_the_file(tmp_path):
    log = TimestepLog(4, 20)
    for update in range(10):
        add_update(log, update)
    path = tmp_path / "timesteps.parquet"
    write_timesteps(log.table, path)
    assert read_timesteps(path).equals(log.table)
    table = pq.read_table(path)
    assert table.schema.equals(table_schema())
    for name in table_schema().names:
        present = [row.get(name) is not None for row in rows_of(log)]
        assert table[name].is_valid().to_pylist() == present
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_file_that_is_not_there_has_no_rows(tmp_path):
    assert read_timesteps(tmp_path / "none").num_rows == 0
    write_timesteps(TimestepLog(2, 10).table, tmp_path / "empty")
    assert read_timesteps(tmp_path / "empty").num_rows == 0


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
        self.seen = []

    def forward(self, noisy_images, timesteps):
        self.seen.append((self.training, timesteps))
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


@pytest.mark.parametrize("num_bins", [1, 3, 10])
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


@pytest.mark.parametrize(("num_bins", "num_timesteps"), [(1, 100), (4, 100), (7, 100), (100, 100), (1, 5)])
def test_probes_are_spread_over_their_bin(num_bins, num_timesteps):
    starts = bin_starts(num_bins, num_timesteps)
    probes = GradientProbes(Batch(IMAGES), PROCESS, starts, CPU)
    for timesteps, first, end in zip(probes.timesteps, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        assert len(timesteps) == 32
        assert {*timesteps.tolist()} <= {*range(first, end)}
        counts = torch.bincount(timesteps - first, minlength=end - first)
        assert counts.max() - counts.min() <= 1
        # The groups stand for the same noise levels.
        means = timesteps.view(4, 8).double().mean(dim=1)
        assert means.max() - means.min() <= max(1, (end - first) / 8)


@pytest.mark.parametrize(("count", "known"), [(32, True), (31, False), (1, False)])
def test_groups_that_share_images_have_no_noise_scale(count, known):
    """They are not independent, and the noise would look smaller than it is."""
    probes = GradientProbes(Batch(torch.zeros(count, 1, 64, 64)), PROCESS, bin_starts(2, 100), CPU)
    norms, noise_scales = probes(Constant(torch.full((1, 64, 64), 0.5)))
    assert all(map(math.isfinite, norms))
    assert [math.isfinite(scale) for scale in noise_scales] == [known] * 2


class Constant(torch.nn.Module):
    """Predicts the same for every image, so that the gradient of each is `2 (w - noise) / pixels`."""

    def __init__(self, values):
        super().__init__()
        self.values = torch.nn.Parameter(values.clone())

    def forward(self, noisy_images, timesteps):
        return output(self.values.expand_as(noisy_images))


@pytest.mark.parametrize("size", [0.25, 0.5, 1.0])
def test_the_noise_scale_is_that_of_a_model_whose_gradient_is_known(size):
    """The covariance has the trace 4 / pixels and the squared norm is 4 w^2 / pixels: the noise scale is 1 / w^2."""
    probes = GradientProbes(Batch(torch.zeros(32, 1, 64, 64)), PROCESS, bin_starts(2, 100), CPU)
    norms, noise_scales = probes(Constant(torch.full((1, 64, 64), size)))
    assert noise_scales == pytest.approx([1 / size**2] * 2, rel=0.1)
    assert norms == pytest.approx([2 * math.sqrt(size**2 + 1 / 32) / 64] * 2, rel=0.05)


def test_a_gradient_of_nothing_but_noise_has_no_noise_scale():
    probes = GradientProbes(Batch(torch.zeros(32, 1, 8, 8)), PROCESS, bin_starts(1, 100), CPU)
    norms, noise_scales = probes(Constant(probes.noise.mean(dim=0)))
    assert norms[0] < 1e-6
    assert math.isnan(noise_scales[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad_enabled", [True, False])
def test_probes_leave_everything_as_it_is(training, grad_enabled):
    model = ProbedModel().train(training)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = None if number == 1 else torch.full_like(parameter, number) if parameter.requires_grad else None
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
    states = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    probes = GradientProbes(Batch(IMAGES), PROCESS, bin_starts(3, 100), CPU)
    with torch.set_grad_enabled(grad_enabled):
        first, second = probes(model), probes(model)
        assert torch.is_grad_enabled() == grad_enabled
    assert first == second
    assert model.training == training
    assert not any(was_training for was_training, _ in model.seen)
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    for parameter, value, gradient in zip(model.parameters(), parameters, gradients, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is None if gradient is None else torch.equal(parameter.grad, gradient)


# --- the picture -----------------------------------------------------------------------------------------------------


def some_rows(num_bins=4, num_updates=40, validation=True, gradients=True, validation_timesteps=range(100)):
    log = TimestepLog(num_bins, 100)
    generator = np.random.default_rng(0)
    for update in range(num_updates):
        sums = TimestepLosses(log.starts, CPU)
        timesteps, losses = random_losses(6, seed=update, num_timesteps=100)
        sums.add(torch.from_numpy(timesteps), torch.from_numpy(losses))
        log.add_losses(update, sums.sums, np.full(100, 1 / 100))
        if validation and (update + 1) % 5 in (0, num_updates % 5):
            timesteps = np.array(validation_timesteps)
            log.add_validation(update + 1, timesteps, {"validation_loss": generator.random(len(timesteps))})
        if gradients:
            log.add_gradients(update + 1, generator.random(num_bins).tolist(), [math.nan, *generator.random(num_bins - 1)])
    return log.table


@pytest.mark.parametrize("key", ["asked_share", "share"])
def test_a_uniform_density_is_one_in_bins_of_any_width(key):
    log = TimestepLog(3, 5)
    sums = TimestepLosses(log.starts, CPU)
    sums.add(torch.arange(5), torch.ones(5))
    log.add_losses(0, sums.sums, np.full(5, 1 / 5))
    axes = new_figure(4, 3, dpi=50).subplots()
    _heat_map(axes, _Rows(log.table), key, "", is_density=True)
    assert axes.collections[0].get_array().flatten().tolist() == pytest.approx([1, 1, 1])


PICTURES = {
    "everything": {},
    "no gradients": {"gradients": False},
    "one bin": {"num_bins": 1},
    "one update of losses alone": {"num_updates": 1, "validation": False, "gradients": False},
    "one row": {"num_updates": 1, "num_bins": 1, "validation": False, "gradients": False},
    "no validation": {"validation": False},
    "as many bins as timesteps": {"num_bins": 100},
    "few validation images": {"validation_timesteps": [3, 60]},
    "more updates than columns": {"num_updates": 300, "gradients": False},
}


FROM_FILE = ["few validation images"]


@pytest.mark.pictures
@pytest.mark.parametrize(("name", "from_file"), [(name, kind) for kind in (0, 1) for name in (PICTURES, FROM_FILE)[kind]])
def test_there_is_a_picture_of_any_rows(tmp_path, name, from_file):
    rows = some_rows(**PICTURES[name])
    if from_file:
        write_timesteps(rows, tmp_path / "rows")
        rows = read_timesteps(tmp_path / "rows")
    plot_timesteps(rows, tmp_path / "timesteps.png")
    with Image.open(tmp_path / "timesteps.png") as picture:
        assert picture.format == "PNG"
        pixels = np.asarray(picture.convert("RGB"))
    assert min(pixels.shape[:2]) > 300
    assert len(np.unique(pixels @ np.array([1, 256, 256**2]))) > 20
    panels = 2 + PICTURES[name].get("gradients", True)
    assert pixels.shape[0] / pixels.shape[1] == pytest.approx(2.2 * panels / 7.2, rel=0.1)


# --- real runs -------------------------------------------------------------------------------------------------------

OBSERVED = {
    "none": ["--log_timestep_bins=0"],
    "default": [],
    "gradients": ["--log_timestep_bins=4", "--timestep_grad_every=2"],
}
NUM_UPDATES, BATCH, LOGGING = 7, 24, 3


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """The same run, looked at not at all, as usual and closely. Dropout shows whatever draws random numbers."""
    base = tmp_path_factory.mktemp("observed")
    small = [argument for argument in runs.tiny_arguments(base, dropout=0.2) if not argument.startswith("--logging_steps")]
    for name, more in OBSERVED.items():
        runs.run(
            *small,
            f"--output_dir={base / name}",
            f"--max_train_steps={NUM_UPDATES}",
            f"--train_batch_size={BATCH}",
            f"--logging_steps={LOGGING}",
            "--validation_steps=4",
            "--checkpointing_steps=5",
            *more,
        )
    return {name: base / name for name in OBSERVED}


@pytest.mark.parametrize("name", ["default", "gradients"])
def test_looking_changes_nothing(observed, name):
    for part in ("checkpoint-5/unet", "checkpoint-5/unet_ema", f"checkpoint-{NUM_UPDATES}/unet", "unet"):
        file = f"{part}/diffusion_pytorch_model.safetensors"
        expected, found = load_file(observed["none"] / file), load_file(observed[name] / file)
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], value, err_msg=f"{part} {key}")
    texts = [(observed[each] / "lrlab" / "metrics.jsonl").read_text() for each in ("none", name)]
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) == 3 + 2  # of losses, and of validation


def test_the_folder_has_the_file_and_the_picture_unless_they_are_turned_off(observed):
    for name, folder in observed.items():
        for part in ("timesteps.parquet", "timesteps.png"):
            assert (folder / "lrlab" / part).exists() == (name != "none"), (name, part)
    assert runs.read_record(observed["default"])["config"]["log_timestep_bins"] == 10


@pytest.mark.parametrize(("name", "num_bins"), [("default", 10), ("gradients", 4)])
def test_the_rows_of_a_run(observed, name, num_bins):
    path = observed[name] / "lrlab" / "timesteps.parquet"
    assert pq.read_table(path).schema.names == [
        "update", "bin", "first_timestep", "last_timestep", "num_samples", "share", "asked_share", "loss_mean",
        "loss_variance", "loss_spike", "validation_loss", "validation_loss_ema", "grad_norm", "grad_noise_scale",
    ]  # fmt: skip
    rows = pq.read_table(path).to_pylist()
    width = 1000 // num_bins
    for row in rows:
        first = row["bin"] * width
        assert (row["first_timestep"], row["last_timestep"]) == (first, first + width - 1)
    metrics, validations = runs.read_metrics(observed[name])
    losses = {update: [] for update in (2, 5, 6)}
    for row in rows:
        if row["loss_mean"] is not None or row["num_samples"] is not None:
            losses[row["update"]].append(row)
    assert [row["update"] for row in metrics] == [*losses]
    for metric, (update, part) in zip(metrics, losses.items(), strict=True):
        assert [row["bin"] for row in part] == [*range(num_bins)]
        total = BATCH * (1 if update == 6 else LOGGING)
        assert sum(row["num_samples"] for row in part) == total
        assert [row["share"] for row in part] == [row["num_samples"] / total for row in part]
        np.testing.assert_allclose([row["asked_share"] for row in part], 1 / num_bins, rtol=1e-12)
        weighted = sum(row["num_samples"] * (row["loss_mean"] or 0) for row in part) / total
        assert weighted == pytest.approx(metric["loss"], rel=1e-5)
        assert not any(row["loss_spike"] for row in part)
    for key in ("validation_loss", "validation_loss_ema"):
        for validation in validations:
            part = [row[key] for row in rows if row["update"] == validation["update"] and row["num_samples"] is None]
            values = [value for value in part if value is not None]
            assert len(values) == num_bins
            if num_bins == 4:  # of 16 images, 4 in each
                assert np.mean(values) == pytest.approx(validation[key], rel=1e-6)
    measured = [row for row in rows if row["grad_norm"] is not None]
    assert [(row["update"], row["bin"]) for row in measured] == [
        (update, index) for update in ((2, 4, 6) if name == "gradients" else ()) for index in range(4)
    ]
    assert all(row["grad_norm"] > 0 for row in measured)
    assert all(math.isfinite(value) for row in rows for value in row.values() if value is not None)


def test_the_log_of_a_run_is_plain_json(observed):
    for line in (observed["gradients"] / "lrlab" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
