"""Checkpoints that a thread writes while training goes on, errors there, and snapshots of post-hoc averages."""

import filecmp
import json
import threading

import helpers
import numpy as np
import pytest
import torch
from continued_runs import load_state
from trainer_states import assert_same

from diffusers_lrlab.averaging.averages import EMA
from diffusers_lrlab.averaging.forms import EMAForm
from diffusers_lrlab.averaging.posthoc import read_snapshots
from diffusers_lrlab.core.errors import DiskFull, Diverged
from diffusers_lrlab.core.manifest import find_damage
from diffusers_lrlab.training import checkpoints
from diffusers_lrlab.training.checkpoints import CheckpointWriter
from diffusers_lrlab.training.resume import read_state
from diffusers_lrlab.training.run_folder import SNAPSHOTS, RunFolder

MODEL = {"dimension": 2, "hidden_size": 8, "num_layers": 1, "embedding_size": 4}
SMALL = {"dataset_name": "moons", "max_train_steps": 12, "train_batch_size": 32, "num_validation_images": 16}
SMALL |= {"logging_steps": 1, "validation_steps": 100, "log_timestep_bins": 2}
SMALL |= {"ddpm_num_steps": 4, "num_inference_steps": 2, "save_images_epochs": 10**6}


def make_trainer(folder, **options):
    return helpers.make_trainer(folder, {**SMALL, "checkpointing_steps": 3, **options}, MODEL)


def do_updates(trainer, number):
    """A run after so many updates; what is being written is so still."""
    updates = trainer.updates(show_progress=False)
    for _ in range(number):
        next(updates)
    return updates


def names(folder):
    return [path.name for path in RunFolder(folder).checkpoints()]


@pytest.fixture
def disk(monkeypatch):
    """Nothing is written before `disk.set()`, unless the test waits for five seconds in vain."""
    free, write = threading.Event(), CheckpointWriter._write

    def write_when_free(writer, *contents):
        free.wait(5)
        write(writer, *contents)

    monkeypatch.setattr(CheckpointWriter, "_write", write_when_free)
    return free


def test_what_is_written_is_the_run_as_it_was(tmp_path, disk):
    updates = do_updates(trainer := make_trainer(tmp_path / "late"), 5)
    assert trainer.run.update == 5
    assert names(tmp_path / "late") == []  # nothing of it is seen before it is whole
    disk.set()
    trainer.checkpoints.finish()
    assert names(tmp_path / "late") == ["checkpoint-3"]
    do_updates(at_once := make_trainer(tmp_path / "now", checkpointing_steps=100), 3)
    late, now = tmp_path / "late" / "checkpoint-3", at_once.save()
    files = sorted(path.relative_to(now) for path in now.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(late) for path in late.rglob("*") if path.is_file())
    for file in files:
        if file.name not in ("state.pt", "trainer.json", "manifest.json"):  # these have seconds and folders in them
            assert (late / file).read_bytes() == (now / file).read_bytes(), file
    assert_same(load_state(late), load_state(now), "state")
    assert [json.loads((folder / "trainer.json").read_text())["log_rows"] for folder in (late, now)] == [3, 3]
    assert find_damage(late) is None
    updates.close()


def test_one_is_written_at_a_time(tmp_path, disk):
    trainer = make_trainer(tmp_path)
    updates = do_updates(trainer, 5)
    threading.Timer(0.2, disk.set).start()
    next(updates)  # the next one is due, and the one before appears first
    assert disk.is_set()
    assert "checkpoint-3" in names(tmp_path)
    updates.close()
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-6"]  # whatever ends a run


@pytest.mark.parametrize("late", [False, True])
def test_an_error_there_ends_the_run(tmp_path, monkeypatch, disk, late):
    """At the next update, or when the next one is due."""
    threading.Timer(0.2 * late, disk.set).start()
    trainer = make_trainer(tmp_path, checkpointing_steps=2)
    updates = trainer.updates(show_progress=False)

    def write(*_):
        disk.wait()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_manifest", write)

    def go_on():
        for update in updates:
            assert update < 4
            while update == 2 and not late and not trainer.checkpoints._pending.done():
                pass

    with pytest.raises(DiskFull, match=r"No room to write .*checkpoint-2"):
        go_on()
    assert trainer.run.update == (4 if late else 3)
    assert not list(tmp_path.glob("*checkpoint*"))


def test_a_run_that_diverges_meanwhile_keeps_it_and_names_it(tmp_path, disk):
    trainer = make_trainer(tmp_path)
    updates = do_updates(trainer, 4)
    threading.Timer(0.1, disk.set).start()
    trainer.log.sums.fill_(torch.nan)
    with pytest.raises(Diverged, match=f"last checkpoint with finite weights is {tmp_path}/checkpoint-3"):
        next(updates)
    assert names(tmp_path) == ["checkpoint-3"]


# --- snapshots of post-hoc averages ------------------------------------------------------------------------------------

POSTHOC = "posthoc:sigma_rels=[0.1|0.2],snapshots=3"


def averaging(folder, **options):
    return make_trainer(folder, **{"ema": POSTHOC, "checkpointing_steps": 5, **options})


def stop_after(trainer, number):
    updates = do_updates(trainer, number)
    trainer.checkpoints.finish()
    updates.close()


def weights_of(average):
    return [value.clone() for value in average.shadow_params]


def test_snapshots_hold_the_averages_at_their_updates(tmp_path):
    trainer, expected = averaging(tmp_path), {}
    run = trainer.run
    beside = EMA(run.trained, EMAForm.of("power_function:sigma_rel=0.2"))  # one that is really run
    for update in trainer.updates(show_progress=False):
        beside.advance(update)
        expected[update] = [weights_of(run.average), weights_of(beside)]
    found = read_snapshots(tmp_path / SNAPSHOTS)
    assert [(one.update, one.end, one.sigma_rels) for one in found] == [(n, n, [0.1, 0.2]) for n in (4, 8, 12)]
    names = [name for name, _ in run.model.named_parameters()]
    for one in found:
        assert one.shapes() == {name: tuple(value.shape) for name, value in run.model.named_parameters()}
        for track in range(2):
            into = {name: torch.zeros_like(value) for name, value in run.model.named_parameters()}
            one.read(np.eye(2)[track], into)
            assert all(map(torch.equal, (into[name] for name in names), expected[one.update][track]))


def files_of(folder):
    return sorted(path.relative_to(folder) for path in (folder / SNAPSHOTS).rglob("*") if path.is_file())


def test_resumed_to_the_bit(tmp_path):
    """Stopped after a snapshot that no checkpoint has: it is taken again, and is the same."""
    options = {"ema": f"{POSTHOC},dtype=bf16"}
    whole, first = averaging(tmp_path / "whole", **options), averaging(tmp_path / "parts", **options)
    stop_after(whole, 12)
    stop_after(first, 9)
    assert len(files_of(tmp_path / "parts")) == 2 * 3
    second = averaging(tmp_path / "parts", **options)
    second.resume(tmp_path / "parts" / "checkpoint-5")
    assert len(files_of(tmp_path / "parts")) == 1 * 3  # that of update 8 comes later
    stop_after(second, 7)
    assert len(second.run.averages) == 2
    for one, other in zip(whole.run.averages, second.run.averages, strict=True):
        assert all(map(torch.equal, one.shadow_params, other.shadow_params))
    names = files_of(tmp_path / "whole")
    assert names == files_of(tmp_path / "parts")
    assert len(names) == 3 * 3
    assert filecmp.cmpfiles(tmp_path / "whole", tmp_path / "parts", names, shallow=False) == (names, [], [])
    folders = {path.name for path in (tmp_path / "parts" / "checkpoint-12").iterdir() if path.is_dir()}
    assert folders == {"denoiser", "denoiser_ema", "denoiser_ema_2"}


def test_options_without_a_bound_are_read_back(tmp_path):
    """Such as `--timestep_sampler snr_range:max_snr=Infinity`."""
    (tmp_path / "trainer.json").write_text(json.dumps({"config": {"timestep_sampler_kwargs": {"max_snr": float("inf")}}}))
    assert read_state(tmp_path)["config"]["timestep_sampler_kwargs"] == {"max_snr": float("inf")}


def test_a_new_run_removes_snapshots_of_the_old_one_and_nothing_else(tmp_path):
    stop_after(averaging(tmp_path), 12)
    (tmp_path / SNAPSHOTS / "mine.txt").write_text("mine")
    folder = RunFolder(tmp_path)
    folder.clear()
    assert [path.name for path in (tmp_path / SNAPSHOTS).iterdir()] == ["mine.txt"]
