"""Losses of third-party scripts by noise level."""

from types import SimpleNamespace

import numpy as np
import pytest
from test_timesteps_hook import SCRIPTS, run, timesteps

from diffusers_lrlab.diagnostics.timestep_log import TimestepLog, read_timesteps
from diffusers_lrlab.diffusers_plugin.hooks.log import LogHook
from diffusers_lrlab.diffusers_plugin.script.source import HostScript


def read_log(folder):
    import pyarrow.parquet as pq

    return pq.read_table(folder / "lrlab" / "timesteps.parquet").to_pandas()


def losses_by_level(rows, loss="errors"):
    """The mean loss and the number of images of each tenth of the timesteps."""
    bins = np.concatenate(timesteps(rows)) // 100
    values = np.concatenate([row[loss] for row in rows])
    counts = np.bincount(bins, minlength=10)
    return counts, np.bincount(bins, values, minlength=10) / np.maximum(counts, 1)


@pytest.mark.parametrize(("updates", "rows"), [(6, 10), (3, 0)])
def test_the_log_of_a_script_that_fails_after_its_last_update(tmp_path, updates, rows):
    """The rows so far are written, and nothing is announced that is not there."""
    arguments = [f"--max_train_steps={updates}", "--fail_at_end"]
    _, stderr = run(tmp_path, "ddpm", *arguments, options=["--log_timesteps"], expect=1)
    paths = [tmp_path / "lrlab" / f"timesteps.{end}" for end in ("parquet", "png")]
    assert [path.exists() for path in paths] == [bool(rows)] * 2
    assert (str(paths[1]) in stderr) == bool(rows)
    if rows:
        table = read_timesteps(paths[0])
        assert (len(table), {*table["update"].to_pylist()}) == (rows, {5})
        assert "The script did not end: this is up to update 5." in stderr
    else:
        assert "no row was added, since the script did not end" in stderr


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
        counts, means = losses_by_level([row for row in logged["rows"] if row["update"] == update - 1])
        assert rows["num_samples"].tolist() == counts.tolist()
        np.testing.assert_allclose(rows["loss_mean"].dropna(), means[counts > 0], rtol=1e-5)
    assert "--log_timesteps: the loss is highest at timesteps" in stderr
    assert (tmp_path / "logged" / "lrlab" / "timesteps.png").exists()
    assert table["asked_share"].notna().all()


def test_processes_are_logged_together(tmp_path):
    both, _ = run(tmp_path, "ddpm", "--train_batch_size=32", options=["--log_timesteps"], processes=2)
    rows = read_log(tmp_path).query("update == 3")
    counts, means = losses_by_level([row for rank in both for row in rank["rows"] if row["update"] == 2])
    assert rows["num_samples"].tolist() == counts.tolist()
    np.testing.assert_allclose(rows["loss_mean"].dropna(), means[counts > 0], rtol=1e-5)


def test_a_log_without_new_rows_says_so():
    """As of a run that was at its end when it was resumed; and of one without a folder, which is said once."""
    script, said = HostScript(str(SCRIPTS["ddpm"])), []
    clock = SimpleNamespace(run=SimpleNamespace(arguments={}, refuse=lambda *what: said.append(what)))
    hook = LogHook(script, clock, SimpleNamespace(num_seen=0))
    hook._at_timesteps(0)
    hook._at_timesteps(1)
    assert len(said) == 1
    hook = LogHook(script, clock, SimpleNamespace(num_seen=0))
    hook.log = TimestepLog(10, 1000)
    hook.log.add_row(1, np.ones((3, 10)), None)
    hook.log.last_means = TimestepLog(10, 1000).last_means
    assert hook.report() == "--log_timesteps: no row was added, since no loss was seen."
