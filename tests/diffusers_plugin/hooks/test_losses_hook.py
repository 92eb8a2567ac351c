"""Losses of single images in third-party scripts: weighted, followed by samplers, and logged by noise level."""

from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from diffusers import DDPMScheduler
from test_launch import launch
from test_timesteps_hook import SCRIPTS, run, timesteps

from diffusers_lrlab import get_loss_weighting, get_timestep_sampler
from diffusers_lrlab.core.streams import stream_generator
from diffusers_lrlab.diagnostics.timestep_log import TimestepLog
from diffusers_lrlab.diffusers_plugin.hooks.log import LogHook
from diffusers_lrlab.diffusers_plugin.hooks.losses import LossFeedback
from diffusers_lrlab.diffusers_plugin.host.run import HostRun


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_losses_of_ddpm_are_weighted(tmp_path, prediction_type):
    arguments = [f"--prediction_type={prediction_type}"]
    (done,), stderr = run(tmp_path / "run", "ddpm", *arguments, options=["--loss_weighting=min_snr", "--strict"])
    weighting = get_loss_weighting("min_snr", DDPMScheduler(prediction_type=prediction_type))
    for row in done["rows"]:
        weights = weighting.weights(torch.tensor(row["timesteps"])).numpy()
        np.testing.assert_allclose(row["loss"], np.mean(weights * row["errors"]), rtol=1e-5)
    assert "--loss_weighting min_snr: 6 losses weighted." in stderr


@pytest.mark.parametrize(("shift", "precondition"), [(1.0, 0), (3.0, 1)])
def test_losses_of_flow_matching_are_weighted(tmp_path, shift, precondition):
    """Min-SNR is on the error of the image: min(SNR, 5) of it, and SNR is ((1 - sigma) / sigma)^2."""
    arguments = [f"--shift={shift}", f"--precondition_outputs={precondition}"]
    options = ["--loss_weighting=min_snr", "--timestep_sampler=logit_normal:mean=1", "--strict"]
    (done,), _ = run(tmp_path / "run", "flow", *arguments, options=options)
    for row in done["rows"]:
        sigmas = np.array(row["sigmas"])
        weights = np.minimum(((1 - sigmas) / sigmas) ** 2, 5.0)
        weights = weights if precondition else weights * sigmas**2
        np.testing.assert_allclose(row["loss"], np.mean(weights * row["errors"]), rtol=1e-4)


def test_what_makes_up_for_a_density_weighs_losses(tmp_path):
    spec = "logit_normal:unbiased=true"
    (done,), _ = run(tmp_path / "run", "ddpm", options=[f"--timestep_sampler={spec}"])
    probabilities = get_timestep_sampler(spec, 1000).probabilities(0).numpy()
    for row in done["rows"]:
        weights = 1 / (1000 * probabilities[row["timesteps"]])
        np.testing.assert_allclose(row["loss"], np.mean(weights * row["errors"]), rtol=1e-5)


INFONOISE = "infonoise:num_bins=4,warmup_updates=2,refresh_every=1,min_count=1,uniform_share=0.1"
SECOND_MOMENT = "loss_second_moment:history=1,uniform_share=0.5"


def replayed(batches, sampler, weights=None):
    """The share of timesteps that are not those of a sampler that sees the errors that the script itself wrote down."""
    others = []
    for update, (drawn, errors) in enumerate(batches):
        expected = sampler.sample(len(drawn), update, stream_generator(0, "timesteps", update)).numpy()
        others.append((expected != drawn).mean())
        factors = 1.0 if weights is None else weights.table[torch.from_numpy(drawn)]
        sampler.observe(torch.from_numpy(drawn), torch.tensor(errors) * factors)
    return max(others)


def has_adapted(batches, spec):
    """The last timesteps are not those of a sampler that has seen no losses."""
    update, drawn = len(batches) - 1, batches[-1][0]
    sampler = get_timestep_sampler(spec, noise_scheduler=DDPMScheduler())
    first = sampler.sample(len(drawn), update, stream_generator(0, "timesteps", update))
    return (first.numpy() != drawn).mean() > 0.5


@pytest.mark.parametrize(
    ("arguments", "spec", "weighting"),
    [([], INFONOISE, "min_snr"), (["--max_train_steps=16"], SECOND_MOMENT, None)],
    ids=["infonoise", "second_moment"],
)
def test_a_sampler_follows_the_losses_of_single_images(tmp_path, arguments, spec, weighting):
    options = [f"--timestep_sampler={spec}", "--strict", *([f"--loss_weighting={weighting}"] if weighting else [])]
    (done,), stderr = run(tmp_path / "run", "ddpm", "--train_batch_size=512", *arguments, options=options)
    sampler, weights = get_timestep_sampler(spec, noise_scheduler=DDPMScheduler()), None
    if weighting:
        weights = get_loss_weighting(weighting, DDPMScheduler())
        sampler.losses_are("epsilon", lambda: weights.table)
    batches = [(drawn, row["errors"]) for drawn, row in zip(timesteps(done["rows"]), done["rows"], strict=True)]
    assert replayed(batches, sampler, weights) < 0.01
    assert has_adapted(batches, spec)
    for said in ("Its own density of the timesteps began at update 2.", "To keep its last density fixed in another run: "):
        assert (said in stderr) == (spec == INFONOISE)


def test_two_processes_share_statistics_one_batch_and_the_log(tmp_path):
    arguments = ["--train_batch_size=16", "--gradient_accumulation_steps=2", "--max_train_steps=5"]
    options = [f"--timestep_sampler={INFONOISE}", "--strict", "--log_timesteps"]
    ranks, _ = run(tmp_path / "run", "ddpm", *arguments, options=options, processes=2)
    batches = []
    for update in range(5):
        micro = zip(*([row for row in rank["rows"] if row["update"] == update] for rank in ranks), strict=True)
        rows = [row for parts in micro for row in parts]
        drawn, errors = ([value for row in rows for value in row[key]] for key in ("timesteps", "errors"))
        batches.append((np.array(drawn), errors))
    assert replayed(batches, get_timestep_sampler(INFONOISE, noise_scheduler=DDPMScheduler())) < 0.01
    assert has_adapted(batches, INFONOISE)
    rows = [row for rank in ranks for row in rank["rows"] if row["update"] == 2]
    check_rows(read_log(tmp_path / "run").query("update == 3"), rows)


def test_a_density_that_does_not_begin_is_not_silent(tmp_path):
    arguments = [f"--output_dir={tmp_path}", "--train_batch_size=16", "--max_train_steps=4"]
    specs = [f"--timestep_sampler={INFONOISE.replace('min_count=1', f'min_count={count}')}" for count in (12, 99)]
    stderr = launch(SCRIPTS["ddpm"], *arguments, options=specs[:1])
    assert "its own density may never begin" in stderr
    assert "density of the timesteps has not begun: it waits for its warm-up" in stderr
    stderr = launch(SCRIPTS["ddpm"], *arguments, options=specs[1:], expect=2)
    assert "must be able to begin in 4 updates of 16 images, but it needs 4 parts with 99 losses each" in stderr


def test_losses_of_an_update_that_a_gradient_scaler_left_out_are_left_out():
    observed = []
    sampler = SimpleNamespace(observe=lambda timesteps, losses: observed.append((timesteps.tolist(), losses.tolist())))
    hook = SimpleNamespace(sampler=sampler, name="", before_update=[])
    feedback = LossFeedback(SimpleNamespace(timesteps=hook, run=None, on_losses=[]))
    feedback._seen, feedback._update = [torch.tensor([[1.0, 2.0], [0.5, 0.25]])], 3
    hook.before_update[0](3)  # drawn again
    assert observed == []
    feedback._seen, feedback._update = [torch.tensor([[1.0, 2.0], [0.5, 0.25]]), torch.tensor([[5.0], [2.0]])], 3
    hook.before_update[0](4)
    assert observed == [([1, 2, 5], [0.5, 0.25, 2.0])]


def read_log(folder):
    return pq.read_table(folder / "lrlab" / "timesteps.parquet").to_pandas()


def check_rows(rows, images):
    """The rows of a table have the mean loss and the number of images of each tenth of the timesteps."""
    bins = np.concatenate(timesteps(images)) // 100
    counts = np.bincount(bins, minlength=10)
    means = np.bincount(bins, np.concatenate([row["errors"] for row in images]), minlength=10)[counts > 0]
    assert rows["num_samples"].tolist() == counts.tolist()
    np.testing.assert_allclose(rows["loss_mean"].dropna(), means / counts[counts > 0], rtol=1e-5)


@pytest.mark.parametrize("options", [[], ["--timestep_sampler=logit_normal", "--loss_weighting=min_snr"]])
def test_logged_losses_are_those_of_the_images(tmp_path, options):
    """Before any weight; a run that is only logged is the script's own."""
    arguments = ["--train_batch_size=32", "--gradient_accumulation_steps=2"]
    (bare,), _ = run(tmp_path / "bare", "ddpm", *arguments, options=options)
    (logged,), stderr = run(tmp_path / "logged", "ddpm", *arguments, options=[*options, "--log_timesteps"])
    assert logged == bare
    table = read_log(tmp_path / "logged")
    assert table["update"].unique().tolist() == [1, 2, 3, 4, 5, 6]
    for update, rows in table.groupby("update"):
        check_rows(rows, [row for row in logged["rows"] if row["update"] == update - 1])
    assert "--log_timesteps: the loss is highest at timesteps" in stderr
    assert (tmp_path / "logged" / "lrlab" / "timesteps.png").exists()
    assert table["asked_share"].notna().all()


def test_the_log_of_a_script_that_fails_after_its_last_update(tmp_path):
    """The rows so far are written, and nothing is announced that is not there."""
    _, stderr = run(tmp_path, "ddpm", "--fail_at_end", options=["--log_timesteps"], expect=1)
    assert "The script did not end: this is up to update 5." in stderr
    assert (tmp_path / "lrlab" / "timesteps.png").exists()
    table = read_log(tmp_path)
    assert (len(table), {*table["update"]}) == (10, {5})
    _, stderr = run(tmp_path / "3", "ddpm", "--fail_at_end", "--max_train_steps=3", options=["--log_timesteps"], expect=1)
    assert "no row was added, since the script did not end" in stderr
    assert not (tmp_path / "3" / "lrlab" / "timesteps.png").exists()


def test_a_log_of_other_images_or_without_a_folder_is_refused_once():
    said, run = [], HostRun()
    run.refuse = lambda option, reason: said.append(f"{option}: {reason}")
    losses = SimpleNamespace(timesteps=SimpleNamespace(num_seen=0, on_timesteps=[]), on_losses=[])
    hook = LogHook(SimpleNamespace(run=run), losses)
    hook.install()
    for update in range(2):
        losses.timesteps.on_timesteps[0](update)
    assert said == ["--log_timesteps: it has no --output_dir for the log; give it one, or remove the option"]
    hook = LogHook(SimpleNamespace(run=run), losses)
    hook.log = TimestepLog(10, 1000)
    for _ in range(2):
        losses.on_losses[-1](torch.zeros(4), torch.zeros(2))
    assert said[1:] == ["--log_timesteps: it computes a loss of 2 images after drawing 4 timesteps"]
    assert hook.report() == "--log_timesteps: no row was added, since no loss was seen."
