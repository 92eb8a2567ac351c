"""Which folders a command may start in, and that every remedy which a refusal names is accepted."""

import json
import re
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


def _only_found(folder):
    shutil.rmtree(folder)
    (folder / "lrlab").mkdir(parents=True)
    (folder / "lrlab/lr_finder.json").write_text("{}")


def _foreign(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")


def _damaged_record_alone(folder):
    _killed_early(folder)
    _damaged("lrlab/run.json")(folder)


FOLDERS = {
    "finished": lambda folder: None,
    "cancelled": _cancelled,
    "killed before its first checkpoint": _killed_early,
    "a pipeline without its checkpoints": _only_result,
    "a damaged newest checkpoint": _damaged("checkpoint-8/optimizer.bin"),
    "no whole checkpoint": _damaged("checkpoint-6/optimizer.bin", "checkpoint-8/optimizer.bin"),
    "a damaged record": _damaged("lrlab/run.json"),
    "a damaged record alone": _damaged_record_alone,
    "what the finder found": _only_found,
    "other files": _foreign,
}
STARTS = {
    "as it was": [],
    "longer": ["--max_train_steps=9"],
    "another schedule": ["--lr_scheduler=constant"],
    "gone on with": [LATEST],
    "longer, gone on with": ["--max_train_steps=9", LATEST],
    "shorter, gone on with": ["--max_train_steps=7", LATEST],
    "another schedule, gone on with": ["--lr_scheduler=constant", LATEST],
    "from its last checkpoint": ["--resume_from_checkpoint=now/checkpoint-8"],
    "longer, from its last checkpoint": ["--resume_from_checkpoint=now/checkpoint-8", "--max_train_steps=9"],
    "from a checkpoint of another run": ["--resume_from_checkpoint=then/checkpoint-8"],
}


def refusal(arguments):
    """Why a training cannot start with these arguments, `None` if it can: all that is checked before data are read."""
    try:
        choose_start(resolve_config(parse_arguments(arguments, "")))
    except LabError as error:
        return str(error)
    return None


def remedies(message, arguments):
    """What a message tells people to type in place of `arguments`, one list for each alternative."""
    if removed := re.search(r"'(\S+run\.json)' is damaged .* Hint: remove it", message):
        Path(removed[1]).unlink()
        return [arguments if LATEST in arguments else [*arguments, "--overwrite_output_dir"]]
    drops = re.search(r"(in place of|without|leave) --resume_from_checkpoint", message)
    kept = [each for each in arguments if not (drops and each.startswith("--resume"))]
    found = []
    if "--overwrite_output_dir" in message:
        found.append([*kept, "--overwrite_output_dir"])
    if re.search(r"another (folder|--output_dir)|new or empty folder", message):
        found.append([*kept, "--output_dir=new"])
    if "give its settings and --resume_from_checkpoint latest" in message or "Resume with the arguments of" in message:
        found.append([*SMALL, "--output_dir=now", LATEST])
    elif "with --resume_from_checkpoint latest" in message:
        found.append([*kept, LATEST])
    if given := re.search(r"Give --output_dir (\S+)\.", message):
        found.append([*kept, f"--output_dir={given[1]}"])
    if listed := re.search(r"Give another one of '\S+' \((.*)\), or 'latest'", message):
        found += [[*kept, f"--resume_from_checkpoint={name}"] for name in (*listed[1].split(", "), "latest")]
    if "leave --resume_from_checkpoint out" in message:
        found.append(kept)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("state", FOLDERS)
def test_every_remedy_is_accepted(home, tmp_path, monkeypatch, state, start):
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    shutil.copytree("then", "now")
    FOLDERS[state](Path("now"))
    arguments = [*SMALL, "--output_dir=now", *STARTS[start]]
    message = refusal(arguments)
    if message is None:
        return
    alternatives = remedies(message, arguments)
    assert alternatives, message
    for alternative in alternatives:
        then = refusal(alternative)
        if then is not None and "Hint: remove it" in then and "Hint: remove it" not in message:  # another fault
            (alternative,) = remedies(then, alternative)
            then = refusal(alternative)
        assert then is None, f"{message}\n{alternative}\n{then}"


def test_a_finished_run_that_is_to_be_longer_is_told_once(home, monkeypatch):
    """Without and with --resume_from_checkpoint; neither sends people to the other."""
    monkeypatch.chdir(home)
    longer = [*SMALL, "--output_dir=then", "--max_train_steps=9"]
    fresh, resumed = refusal(longer), refusal([*longer, LATEST])
    assert "--resume_from_checkpoint" not in fresh
    assert "has finished" in resumed
    assert "--max_train_steps: 8 then, 9 now" in resumed
    assert "--overwrite_output_dir in place of --resume_from_checkpoint" in resumed


@pytest.mark.slow
@pytest.mark.parametrize("command", [["plan"], ["train", "--dry_run"]])
@pytest.mark.parametrize("state", ["finished", "other files"])
def test_what_trains_nothing_needs_no_empty_folder(home, tmp_path, monkeypatch, capsys, command, state):
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    FOLDERS[state](Path("then"))
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


def test_the_finder_beside_other_files(home, tmp_path, monkeypatch):
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    _foreign(Path("then"))
    assert call("find-lr", *SMALL, "--num_updates=12", "--repeats=1", "--output_dir=then") == 0
    assert Path("then/lrlab/lr_finder.json").exists()
    assert Path("then/notes.txt").read_text() == "mine"
