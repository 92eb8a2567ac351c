"""What somebody put where a run or a study writes is named before any work, and never replaced."""

import functools
import json
import shutil

import pytest
import runs
import yaml
from faults.cases import LATEST, MODEL, OPTIONS, STUDY

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.files import atomic_file, atomic_folder
from diffusers_lrlab.run import train
from diffusers_lrlab.study.runs.results import StudyFolder
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import load_spec
from diffusers_lrlab.training.arguments import parse_arguments
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.resume import find_checkpoint

CHECKPOINT = "and not a checkpoint of a run"


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


def an_empty_folder(path):
    path.mkdir(parents=True)


def a_link(path):
    a_folder(path.parent.parent / "elsewhere")
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(path.parent.parent / "elsewhere")


def snapshot(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


IN_THE_WAY = {
    "checkpoint-16": (a_file, a_folder, a_link),
    "lrlab": (a_file,),
    "lrlab/run.json": (a_folder, an_empty_folder),
    "lrlab/loss.png": (a_folder, an_empty_folder),
    "lrlab/metrics.jsonl": (an_empty_folder,),
    "lrlab/samples": (a_file,),
    "denoiser": (a_file,),
    "scheduler": (a_file,),
    "model_index.json": (an_empty_folder,),
    "manifest.json": (a_folder,),
    "README.md": (a_folder,),
    "logs": (a_file,),
}
PLACES = [(name, make) for name, makers in IN_THE_WAY.items() for make in makers]


@pytest.mark.parametrize(("name", "make"), PLACES, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("in_a_run", [False, True])
def test_before_a_run(base, tmp_path, name, make, in_a_run):
    """Whether it begins, goes on, or replaces another one."""
    folder = tmp_path / "run"
    if in_a_run:
        shutil.copytree(base / "run", folder)
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        (folder / name).unlink(missing_ok=True)
    make(folder / name)
    before = snapshot(tmp_path)
    for options in ({}, {"overwrite_output_dir": True}, {"resume_from_checkpoint": "latest"}):
        config = resolve_config(TrainingConfig(dataset_name="moons", output_dir=str(folder), **options))
        with pytest.raises(LabError) as error:
            find_checkpoint(config)
        if options or not in_a_run:
            assert name.partition("/")[0] in str(error.value) or "holds other files and no run" in str(error.value)
        assert snapshot(tmp_path) == before


def test_an_empty_folder_with_the_name_of_a_checkpoint_is_no_obstacle(tmp_path):
    an_empty_folder(tmp_path / "run" / "checkpoint-2")
    config = resolve_config(TrainingConfig(dataset_name="moons", output_dir=str(tmp_path / "run")))
    assert find_checkpoint(config) is None


def put_there_at(update, path, make):
    """Called in the process, first."""
    from diffusers_lrlab.training.trainer import Trainer

    do_update = Trainer.do_update

    def and_put(trainer, images):
        if trainer.run.update == update and not path.exists():
            make(path)
        return do_update(trainer, images)

    Trainer.do_update = and_put


@pytest.mark.slow
@pytest.mark.parametrize("make", [a_file, a_folder, a_link])
def test_what_appears_in_the_place_of_a_checkpoint_stays(base, tmp_path, make):
    folder = tmp_path / "run"
    put = functools.partial(put_there_at, 4, folder / "checkpoint-6", make)
    error = runs.run(*arguments(base, folder), before=put, expect=2)
    assert "checkpoint-6" in error
    assert CHECKPOINT in error
    left = folder / "checkpoint-6"
    assert left.read_text() == "mine" if left.is_file() else (left / "notes.txt").read_text() == "mine"
    assert CHECKPOINT in runs.run(*arguments(base, folder, LATEST), expect=2)
    left.rename(tmp_path / "moved")
    runs.run(*arguments(base, folder, LATEST))


def remove_when_written(update, folder):
    """Called in the process, first: the folder goes while the checkpoint of that update is written."""
    from diffusers_lrlab.training import checkpoints

    write = checkpoints.Contents.write

    def and_remove(contents, into, of_run):
        if of_run.path == folder and contents.trainer["update"] == update:
            shutil.rmtree(folder)
        write(contents, into, of_run)

    checkpoints.Contents.write = and_remove


@pytest.mark.slow
@pytest.mark.parametrize(("update", "logging_steps"), [(2, 1), (2, 8), (8, 1), (8, 100)])
def test_a_folder_that_is_removed_while_a_checkpoint_is_written(base, tmp_path, update, logging_steps):
    """Also before there is a row of the log."""
    remove = functools.partial(remove_when_written, update, tmp_path / "run")
    options = arguments(base, tmp_path / "run", f"--logging_steps={logging_steps}", "--validation_steps=100")
    error = runs.run(*options, before=remove, expect=2)
    assert "was removed while the run was writing there. Hint: do not change the folder of a run while it trains" in error
    assert not (tmp_path / "run" / f"checkpoint-{update}").exists()


STUDY_PLACES = [
    *((name, a_file) for name in ("runs", "weights", "stacks", "local", "report")),
    *((name, an_empty_folder) for name in ("spec.yaml", "summary.json", "summary.parquet", "manifest.json")),
]


@pytest.mark.parametrize(("name", "make"), STUDY_PLACES, ids=lambda value: getattr(value, "__name__", value))
def test_before_a_study(base, tmp_path, name, make):
    (base / "study.yaml").write_text(yaml.safe_dump(STUDY))
    spec = load_spec(str(base / "study.yaml"))
    make(tmp_path / "study" / name)
    with pytest.raises(LabError, match=f"{name}' is .*move it away, or give another --out; nothing of yours is replaced"):
        StudyFolder(tmp_path / "study").check_is_study(spec.name, expand(spec))
    assert (tmp_path / "study" / name).exists()


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
    for name, said in (("file", "is not a folder"), ("link", "is a link, and links are not replaced")):
        with pytest.raises(LabError, match=said), atomic_folder(tmp_path / name):
            pytest.fail("made for nothing")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("more", [(), (LATEST,)], ids=["a new run", "without a checkpoint"])
def test_what_appears_while_data_are_read_stays(base, tmp_path, monkeypatch, more):
    out, prepare = tmp_path / "out", train.prepare_resolved

    def prepare_slowly(*args):
        a_file(out / "README.md")
        return prepare(*args)

    monkeypatch.setattr(train, "prepare_resolved", prepare_slowly)
    with pytest.raises(LabError, match="holds other files and no run"):
        train.run_training(parse_arguments(arguments(base, out, *more), ""))
    assert [path.name for path in out.iterdir()] == ["README.md"]
    assert (out / "README.md").read_text() == "mine"
