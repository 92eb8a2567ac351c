"""Nothing of a training is lost: what is damaged is noticed, what is done twice is refused, and no signal is swallowed."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import helpers
import numpy as np
import pytest
import runs
import torch.distributed as dist
from faults.cases import LATEST, OPTIONS, differences
from faults.injected import DAMAGE

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.core.environment import OTHERS_WAIT
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.files import atomic_file, atomic_folder
from diffusers_lrlab.core.manifest import find_damage
from diffusers_lrlab.core.program import InterruptGuard
from diffusers_lrlab.study.context import StudyInterrupted, stops_explained
from diffusers_lrlab.training.checkpoints import CheckpointWriter
from diffusers_lrlab.training.pipeline import load_previews, save_pipeline, save_preview
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.resume import find_checkpoint
from diffusers_lrlab.training.run_folder import RunFolder


def start(folder, *options, expect=0, **how):
    return runs.run(*arguments(folder), *options, expect=expect, **how)


def arguments(folder):
    return [*OPTIONS, "--denoiser=mlp:hidden_size=8,num_layers=1,embedding_size=4", f"--output_dir={folder}"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    start(folder := tmp_path_factory.mktemp("base") / "run")
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def damaged(file, how):
    change = DAMAGE[how]
    file.unlink() if change is None else file.write_bytes(change(file.read_bytes()))


def test_damaged_samples_are_left_out_of_the_plots(tmp_path, capsys):
    for update in (1, 2):
        save_preview(tmp_path, update, np.ones((3, 2)))
    damaged(tmp_path / "update-00000001.npy", next(how for how, change in DAMAGE.items() if change is not None))
    assert [*load_previews(tmp_path)] == [2]
    assert "update-00000001.npy' is damaged and not plotted" in capsys.readouterr().err


def test_every_file_of_a_checkpoint_damaged_in_every_way(copy, capsys):
    """Each is noticed by its name, and the checkpoint before is taken."""
    newest = copy / "checkpoint-8"
    for name in sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file()):
        content = (newest / name).read_bytes()
        for how in DAMAGE:
            damaged(newest / name, how)
            assert str(newest / name) in find_damage(newest), how
            assert RunFolder(copy).newest_checkpoint() == copy / "checkpoint-6"
            (warning,) = capsys.readouterr().err.splitlines()
            assert warning.startswith("warning: ")
            assert str(newest / name) in warning
            (newest / name).write_bytes(content)
    assert RunFolder(copy).newest_checkpoint() == newest


def see_an_older_one_in_the_second_process():
    """Called in each process, first: what lies on the disk of another machine."""
    if os.environ["RANK"] == "1":
        RunFolder.checkpoints = lambda folder, found=RunFolder.checkpoints: found(folder)[:-1]


@pytest.mark.slow
def test_processes_that_see_different_checkpoints_do_not_go_on(copy):
    error = start(copy, LATEST, processes=2, before=see_an_older_one_in_the_second_process, expect=2)
    assert f"The processes see different things in --output_dir '{copy}': checkpoint-8, checkpoint-6." in error
    assert "Traceback" not in error


@pytest.mark.parametrize("how", ["half", "gone"])
def test_a_log_that_lost_rows_is_told(copy, capsys, how):
    num_rows = json.loads((copy / "checkpoint-8" / "trainer.json").read_text())["log_rows"]
    damaged(copy / "lrlab" / "metrics.jsonl", how)
    folder = RunFolder(copy)
    folder.rewind(folder, 8, num_rows)
    assert re.search(rf"metrics.jsonl' has \d+ of {num_rows} rows before update 8", capsys.readouterr().err)
    assert all(set(row) >= {"update"} for row in folder.read_metrics())
    folder.append_metrics({"update": 8, "loss": 1.0})  # and training goes on


def test_latest_goes_on_from_the_newest_that_is_whole(finished, copy):
    """To the bit: with the diagnostics of that checkpoint, and without one that a killed run had not yet removed."""
    damaged(copy / "checkpoint-8" / "state.pt", "bit")
    damaged(copy / "lrlab" / "timesteps.parquet", "half")
    shutil.copytree(copy / "checkpoint-6", copy / "checkpoint-4")
    error = start(copy, LATEST)
    assert "state.pt' is damaged (its SHA-256 has changed). The newest intact checkpoint is checkpoint-6" in error
    assert error.count("warning:") == 1
    assert not differences(finished, copy)


@pytest.mark.slow
def test_the_second_start_is_refused(tmp_path):
    folder = tmp_path / "run"
    first = runs.start_and_wait_for((folder / "lrlab" / "run.json").exists, *arguments(folder))
    os.kill(first.pid, signal.SIGSTOP)
    error = start(folder, "--overwrite_output_dir", expect=2)
    assert "is being written by another process. Wait for it, stop it, or give another --output_dir" in error
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait() == 0
    assert len(runs.read_metrics(folder)[0]) == 8
    assert not list(folder.glob(".*"))


# --- folders of runs that were stopped early --------------------------------------------------------------------------


@pytest.mark.parametrize("option", [None, LATEST, "--overwrite_output_dir"])
def test_a_run_that_was_killed_at_once_blocks_nobody(tmp_path, capsys, option):
    for name in ("lrlab/.tmp-lrlab-1-run.json", ".lock", ".tmp-lrlab-1-checkpoint-2/trainer.json"):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("")
    options = {"resume_from_checkpoint": "latest"} if option == LATEST else {"overwrite_output_dir": option is not None}
    config = resolve_config(TrainingConfig(dataset_name="moons", output_dir=str(tmp_path / "run"), **options))
    assert find_checkpoint(config) is None
    assert ("there is no checkpoint to resume from" in capsys.readouterr().err) == (option == LATEST)
    RunFolder(tmp_path / "run").clear()
    assert {path.name for path in tmp_path.rglob("*")} <= {"run", ".lock"}


def test_clearing_a_folder_leaves_what_no_run_has_written(copy):
    shutil.rmtree(copy / "scheduler")
    (copy / "README.md").unlink()
    (copy / "checkpoint-16").mkdir()
    for mine in ("scheduler", "README.md/notes.txt", "checkpoint-16/notes.txt"):
        (copy / mine).parent.mkdir(exist_ok=True)
        (copy / mine).write_text("mine")
    RunFolder(copy).clear()
    left = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert left == {"scheduler", "README.md/notes.txt", "checkpoint-16/notes.txt"}


def test_files_and_folders_do_not_replace_each_other(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    in_the_way = r"/(folder|file)' is in its way \(.*\)\. Hint: move that away, then give the same command again\.$"
    for path in ("folder", "file/new"):
        with pytest.raises(LabError, match=in_the_way), atomic_file(tmp_path / path) as new:
            new.write_text("new")
    with pytest.raises(LabError, match="is not a folder, but a folder must be made there"), atomic_folder(tmp_path / "file"):
        pytest.fail("made for nothing")
    assert ((tmp_path / "folder").is_dir(), (tmp_path / "file").read_text()) == (True, "mine")


def test_a_folder_that_is_removed_while_the_run_writes_there_is_told(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.write_record({})
    shutil.rmtree(tmp_path / "run")
    for write in (lambda: folder.append_metrics({"update": 1}), lambda: folder.write_record({}), folder.check_there):
        with pytest.raises(LabError, match="lrlab' was removed while the run was writing there. Hint: leave the folder of"):
            write()
    assert not (tmp_path / "run").exists()


# --- signals and the pipeline -----------------------------------------------------------------------------------------


def signal_in_last_checkpoint():
    """Called in the process, first."""
    begin = CheckpointWriter.begin

    def and_signal(writer, run, *state):
        if run.update == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return begin(writer, run, *state)

    CheckpointWriter.begin = and_signal


@pytest.mark.slow
def test_a_signal_during_the_last_checkpoint_counts(finished, tmp_path):
    error = start(tmp_path / "run", expect=143, before=signal_in_last_checkpoint)
    assert "Stopped by SIGTERM" in error
    assert runs.read_record(tmp_path / "run")["run"]["status"] == "cancelled"
    start(tmp_path / "run", LATEST)
    assert not differences(finished, tmp_path / "run")


def test_a_signal_after_the_last_look_is_passed_on():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt), InterruptGuard():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_asking_waits_as_long_as_all_else_does(monkeypatch):
    """torch's default of half an hour would end the processes that wait while one samples or uploads."""
    made = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "new_group", lambda **how: made.append(how))
    InterruptGuard()
    assert made == [{"backend": "gloo", "timeout": OTHERS_WAIT}]


def test_a_library_that_catches_every_exception_does_not_hide_a_stop(tmp_path):
    def import_as_diffusers_does():
        try:
            signal.raise_signal(signal.SIGINT)
        except Exception as error:
            raise RuntimeError("Failed to import") from error

    with pytest.raises(StudyInterrupted), stops_explained(tmp_path):
        import_as_diffusers_does()


def test_the_index_of_a_pipeline_is_there_only_while_it_is_whole(tmp_path, monkeypatch):
    """It is gone before anything is renamed when a pipeline is replaced, and comes last."""
    small = {"dataset_name": "moons", "max_train_steps": 2, "num_validation_images": 0}
    run = helpers.make_trainer(tmp_path / "trainer", small, {"dimension": 2, "hidden_size": 8, "embedding_size": 4}).run
    replace, folder, renamed = os.replace, tmp_path / "run", []
    index = folder / "model_index.json"
    folder.mkdir()
    save_pipeline(run, folder)
    before = {path.name for path in folder.iterdir()}

    def watched(old, new):
        assert not index.exists()
        replace(old, new)
        assert index.exists() == (Path(new) == index)
        renamed.append(Path(new).name)

    monkeypatch.setattr(os, "replace", watched)
    save_pipeline(run, folder)
    assert {path.name for path in folder.iterdir()} == before < {*renamed}
