"""Resuming, rates by noise level and a curriculum, for runs whose timesteps, weights and noise are anything but plain."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import runs
import torch
from continued_runs import assert_same_end, load_state
from trainer_states import assert_same

from diffusers_lrlab.timesteps.bands import TimestepLR

pytestmark = pytest.mark.slow

NUM_UPDATES = 12


def start(base, name, *arguments, dropout=0.0, batch=32, logging=4):
    """A run into a folder of its own; returns the folder."""
    options = {"output_dir": base / name, "max_train_steps": NUM_UPDATES, "train_batch_size": batch}
    options |= {"logging_steps": logging, "validation_steps": 6}
    runs.run(*runs.tiny_arguments(base, dropout, **options), *arguments)
    return base / name


def timestep_rows(folder):
    return pq.read_table(folder / "lrlab" / "timesteps.parquet")


@pytest.fixture(scope="module")
def whole_and_resumed(tmp_path_factory):
    """A run, and a copy of it that went on from its checkpoint at update 5, between two rows of the log."""
    base = tmp_path_factory.mktemp("resumed")
    arguments = [*runs.FOLLOWING, "--timestep_grad_every=3", "--checkpointing_steps=5", "--checkpoints_total_limit=0"]
    arguments.append("--ema=power_function:update_every=2")
    whole = start(base, "whole", *arguments, dropout=0.2)
    shutil.copytree(whole, base / "copy")
    resumed = start(base, "copy", *arguments, f"--resume_from_checkpoint={base / 'copy' / 'checkpoint-5'}", dropout=0.2)
    record = runs.read_record(resumed)
    assert record["run"]["status"] == "finished"
    assert len(record["run"]["starts"]) == 2
    return whole, resumed


def test_a_run_that_follows_losses_resumes_to_the_same_bits(whole_and_resumed):
    whole, resumed = whole_and_resumed
    for update in (10, NUM_UPDATES):
        assert_same_end(whole, resumed, update)


def test_resuming_keeps_the_rows_of_noise_levels(whole_and_resumed):
    whole, resumed = map(timestep_rows, whole_and_resumed)
    assert whole.equals(resumed)
    expected = [(update, "loss_mean") for update in (3, 7, 11)]
    expected += [(update, "grad_norm") for update in (3, 6, 9, 12)] + [(update, "validation_loss") for update in (6, 12)]
    for update, key in expected:
        rows = [row for row in whole.to_pylist() if row["update"] == update and row[key] is not None]
        assert [row["bin"] for row in rows] == [0, 1, 2, 3]


def test_what_follows_the_losses_did_move(whole_and_resumed):
    """Otherwise its state would not have been tested above."""
    states = [load_state(whole_and_resumed[0] / f"checkpoint-{update}") for update in (5, 12)]
    objectives = [state["run"]["objective"] for state in states]
    assert objectives[0]["sampler.counts"].min() >= 1
    assert states[0]["observer"]["sums"].sum() > 0
    assert objectives[1]["weighting.adam_step"] == NUM_UPDATES
    for key in ("sampler.losses", "weighting.coefficients"):
        assert not torch.equal(objectives[0][key], objectives[1][key])
    asked = timestep_rows(whole_and_resumed[0]).to_pylist()
    shares = [row["asked_share"] for row in asked if row["update"] == 11 and row["asked_share"] is not None]
    assert max(shares) > 1.1 * min(shares)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return start(tmp_path_factory.mktemp("plain"), "run", "--checkpointing_steps=12", logging=1)


def lrs(folder):
    return [row["lr"] for row in runs.read_metrics(folder)[0]]


def test_each_update_is_done_at_the_rate_of_its_band(plain, tmp_path):
    """With accumulation. The band is read off the timesteps that were drawn, not off the formula for it."""
    arguments = ["--timestep_lr=banded:factors=[0.5|2]", "--log_timestep_bins=2", "--strict_lr_audit"]
    folder = start(tmp_path, "run", *arguments, "--gradient_accumulation_steps=2", batch=16, logging=1)
    drawn = {(row["update"], row["bin"]): row["share"] for row in timestep_rows(folder).to_pylist() if row["share"]}
    assert [update for update, _ in drawn] == [*range(NUM_UPDATES)]  # one band in each
    assert set(drawn.values()) == {1}
    bands = [band for _, band in drawn]
    assert {*bands} == {0, 1}
    factors = np.array([0.5, 2])[bands]
    assert factors.tolist() == TimestepLR("banded", [0.5, 2]).lr_factors(np.arange(NUM_UPDATES), 1000).tolist()
    np.testing.assert_allclose(lrs(folder), np.array(lrs(plain)) * factors, rtol=1e-12)
    assert runs.read_record(folder)["train"]["schedule_audit"]["largest_lr_deviation"] == 0


def test_a_curriculum_without_strength_is_plain_training(plain, tmp_path):
    folder = start(tmp_path, "run", "--timestep_sampler=clts:lambda_max=0", "--checkpointing_steps=12", logging=1)
    for part in ("checkpoint-12/unet", "unet"):
        assert_same(runs.read_weights(plain / part), runs.read_weights(folder / part), part)
    assert (plain / "lrlab/metrics.jsonl").read_text() == (folder / "lrlab/metrics.jsonl").read_text()
    config = json.loads((folder / "lrlab" / "run.json").read_text())["config"]
    assert (config["timestep_sampler"], config["timestep_sampler_kwargs"]["lambda_max"]) == ("clts", 0)
