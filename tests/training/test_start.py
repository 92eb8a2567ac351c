"""Which folders a command may start in."""

import json
import shutil
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from faults.cases import MODEL, OPTIONS
from faults.injected import DAMAGE

from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.training.arguments import parse_arguments
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.resume import choose_start

LATEST = "--resume_from_checkpoint=latest"


def call(*arguments):
    """The exit status of `lrlab` in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        return main([*arguments])
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the model's configuration, and a finished run called `then`."""
    home = tmp_path_factory.mktemp("home")
    (home / "config.json").write_text(json.dumps(MODEL))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert call("train", *SMALL, "--output_dir=then") == 0
    return home


SMALL = [*OPTIONS, "--model_config_name_or_path=config.json"]


def _status(folder, status):
    record = json.loads((folder / "lrlab/run.json").read_text())
    record["run"]["status"] = status
    (folder / "lrlab/run.json").write_text(json.dumps(record))


def _cancelled(folder):
    _status(folder, "cancelled")
    shutil.rmtree(folder / "checkpoint-8")
    (folder / "model_index.json").unlink()


def _killed_early(folder):
    _cancelled(folder)
    shutil.rmtree(folder / "checkpoint-6")


def _only_result(folder):
    for path in folder.iterdir():
        if path.name.startswith("checkpoint") or path.name == "lrlab":
            shutil.rmtree(path)


def _damaged(*names):
    def damage(folder):
        for name in names:
            path = folder / name
            path.write_bytes(DAMAGE["half"](path.read_bytes()))

    return damage


def _foreign(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")


def _a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("mine")


REPLACE, NEW = "replace the run with --overwrite_output_dir", "give a new folder"
OTHERS, RUN = "got one with other files and no run", "must be a new or empty folder, got one that holds a run"
LONGER, SETTINGS = "--max_train_steps=9", "was written with other settings"
NOT_WHOLE = _damaged("checkpoint-6/state.pt", "checkpoint-8/state.pt")
NAMED = "--resume_from_checkpoint=now/checkpoint-8"
# What is in the folder, the options, and what a refusal says; an empty text: the run starts.
STARTS = [
    (lambda folder: None, [], (RUN, "finished", REPLACE, NEW)),
    (lambda folder: None, [LATEST], ()),
    (lambda folder: None, [LATEST, LONGER], (SETTINGS, "--max_train_steps: 8 then, 9 now", "lrlab extend")),
    (lambda folder: None, ["--resume_from_checkpoint=then/checkpoint-8"], ("got one of the run in 'then'", "give latest")),
    (_cancelled, [], (RUN, "cancelled", REPLACE, "the command that started it continues it with")),
    (_cancelled, [NAMED], ("got no checkpoint", "give latest")),
    (_killed_early, [LATEST], ()),
    (_only_result, [LATEST], (RUN, "unknown", REPLACE)),
    (_damaged("checkpoint-8/state.pt"), [LATEST], ()),
    (_damaged("checkpoint-8/state.pt"), [NAMED], ("got a damaged one: ", "give latest")),
    (NOT_WHOLE, [LATEST], ("No checkpoint in 'now' is intact", "--overwrite_output_dir")),
    (_damaged("lrlab/run.json"), ["--overwrite_output_dir"], ("is damaged", "Hint: remove it")),
    (_foreign, ["--overwrite_output_dir"], (OTHERS, NEW)),
    (_a_file, [LATEST], (OTHERS, NEW)),
]


def refusal(arguments):
    """Why a training cannot start with these arguments, `None` if it can: all that is checked before data are read."""
    try:
        choose_start(resolve_config(parse_arguments(arguments, "")))
    except LabError as error:
        return str(error)
    return None


@pytest.mark.parametrize("number", range(len(STARTS)))
def test_which_folders_a_run_may_start_in(home, tmp_path, monkeypatch, number):
    change, options, parts = STARTS[number]
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    shutil.copytree("then", "now")
    change(Path("now"))
    message = refusal([*SMALL, "--output_dir=now", *options])
    assert (message is None) == (not parts), message
    assert all(part in message for part in parts), message
    if REPLACE in parts:
        assert refusal([*SMALL, "--output_dir=now", "--overwrite_output_dir"]) is None


@pytest.mark.slow
@pytest.mark.parametrize(("command", "change"), [(["plan"], lambda folder: None), (["train", "--dry_run"], _foreign)])
def test_what_trains_nothing_needs_no_empty_folder(home, tmp_path, monkeypatch, capsys, command, change):
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    change(Path("then"))
    before = {path: path.stat().st_mtime_ns for path in Path("then").rglob("*")}
    assert call(*command, *SMALL, "--output_dir=then") == 0
    told = capsys.readouterr()
    assert "8 updates" in told.out
    assert "warning: training there would be refused: --output_dir 'then'" in told.err
    assert {path: path.stat().st_mtime_ns for path in Path("then").rglob("*")} == before


@pytest.mark.slow
def test_the_finder_after_a_training_and_a_training_after_the_finder(home, tmp_path, monkeypatch, capsys):
    """The finder leaves a run as it is, says where its result is, and a run can be trained there."""
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in Path("then").rglob("*") if path.is_file()}
    finder = ["find-lr", *SMALL, "--num_updates=12", "--repeats=1", "--output_dir=then"]
    for _ in range(2):
        assert call(*finder) == 0
        told = capsys.readouterr()
        assert "'then' holds a run and is not changed" in told.err
        assert "Wrote then-find-lr/lrlab/lr_finder.json" in told.out
    assert {path: path.read_bytes() for path in Path("then").rglob("*") if path.is_file()} == before
    assert call("train", *SMALL, "--output_dir=then-find-lr") == 0
    assert Path("then-find-lr/model_index.json").exists()
    assert Path("then-find-lr/lrlab/lr_finder.json").exists()
    assert call(*finder) == 0
    assert Path("then-find-lr-find-lr/lrlab/lr_finder.json").exists()
