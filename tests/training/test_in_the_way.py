"""What somebody put where a run or a study writes is named before any work, and never replaced."""

import functools
import json
import shutil

import pytest
import runs
from faults.cases import MODEL, OPTIONS

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.files import atomic_file, atomic_folder
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.resume import find_checkpoint
from diffusers_lrlab.training.run_folder import RunFolder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("base")
    (base / "config.json").write_text(json.dumps(MODEL))
    runs.run(*arguments(base, base / "run"))
    return base


def arguments(base, folder, *more):
    return [*OPTIONS, f"--model_config_name_or_path={base / 'config.json'}", f"--output_dir={folder}", *more]


def a_file(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")


def a_folder(path):
    a_file(path / "notes.txt")


def snapshot(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("name", ["notes.txt", "checkpoint-16", "README.md"])
def test_a_folder_with_other_files_is_refused(tmp_path, name):
    """Whether a run is to begin, to go on, or to replace another one."""
    (a_folder if name == "README.md" else a_file)(tmp_path / "run" / name)
    before = snapshot(tmp_path)
    for options in ({}, {"overwrite_output_dir": True}, {"resume_from_checkpoint": "latest"}):
        config = resolve_config(TrainingConfig(dataset_name="moons", output_dir=str(tmp_path / "run"), **options))
        with pytest.raises(LabError, match=r"run': must be a new or empty folder, got one with other files and no run\."):
            find_checkpoint(config)
    assert snapshot(tmp_path) == before


def test_what_is_cleared_leaves_what_no_run_has_written(base, tmp_path):
    folder = shutil.copytree(base / "run", tmp_path / "run")
    shutil.rmtree(folder / "scheduler")
    (folder / "README.md").unlink()
    a_file(folder / "scheduler")
    for name in ("README.md", "checkpoint-16"):
        a_folder(folder / name)
    RunFolder(folder).clear()
    left = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert left == {"scheduler", "README.md/notes.txt", "checkpoint-16/notes.txt"}


def remove_when_written(update, folder):
    """Called in the process, first: the folder goes while the checkpoint of that update is written."""
    from diffusers_lrlab.training.checkpoints import CheckpointWriter

    write = CheckpointWriter._write

    def and_remove(writer, path, *contents):
        if path == folder / f"checkpoint-{update}":
            shutil.rmtree(folder)
        write(writer, path, *contents)

    CheckpointWriter._write = and_remove


@pytest.mark.slow
def test_a_folder_that_is_removed_while_a_checkpoint_is_written(base, tmp_path):
    """Before there is a row of the log."""
    remove = functools.partial(remove_when_written, 2, tmp_path / "run")
    options = arguments(base, tmp_path / "run", "--logging_steps=8", "--validation_steps=100")
    error = runs.run(*options, before=remove, expect=2)
    assert "lrlab' was removed while the run was writing there. Hint: leave the folder of a run alone" in error
    assert not (tmp_path / "run" / "checkpoint-2").exists()


def test_files_and_folders_do_not_replace_each_other(tmp_path):
    a_file(tmp_path / "file")
    a_folder(tmp_path / "folder")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    before = snapshot(tmp_path)
    with (
        pytest.raises(LabError, match=r"'.*/folder' is in its way \(Is a directory\). Hint: move"),
        atomic_file(tmp_path / "folder") as path,
    ):
        path.write_text("new")
    for name in ("file/new", "file/a/b"):
        with pytest.raises(LabError, match="file' is in its way"), atomic_file(tmp_path / name) as path:
            path.write_text("new")
    for name in ("file", "link"):
        with (
            pytest.raises(LabError, match="is not a folder, but a folder must be made there"),
            atomic_folder(tmp_path / name),
        ):
            pytest.fail("made for nothing")
    assert snapshot(tmp_path) == before
