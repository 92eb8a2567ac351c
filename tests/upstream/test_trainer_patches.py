"""Patches for other trainers: on a made-up repository, and on checkouts, of which LRLAB_TRAINERS names the folder."""

import ast
import os
import subprocess
from pathlib import Path

import pytest

from diffusers_lrlab import LabError
from diffusers_lrlab.cli.__main__ import main as lrlab
from diffusers_lrlab.upstream import trainer_patches
from diffusers_lrlab.upstream.checkout import Project
from diffusers_lrlab.upstream.trainer_changes import CHANGES, Edit, TrainerChange
from diffusers_lrlab.upstream.trainer_patches import changed_files, checksum

OLD = "def length(epochs, warmup):\n    if warmup:\n        return epochs + warmup\n    return epochs\n"
NEW = OLD.replace("epochs + warmup", "max(epochs, 1)")
EDIT = Edit("schedule.py", "if warmup:", "if warmup:\n    return max(epochs, 1)\n", 2, checksum(OLD.splitlines(True)[1:3]))
CHANGE = TrainerChange(
    Project("trainer", "https://example.org/trainer", "schedule.py"),
    "abc1234",
    "Count the warm-up once",
    "It was counted twice.",
    (EDIT,),
    ("tests/test_length.py", "def test_length(): ...\n"),
)


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """A repository in which the change applies."""
    monkeypatch.setitem(trainer_patches.CHANGES, "made-up", CHANGE)
    folder = tmp_path / "trainer"
    folder.mkdir()
    (folder / "schedule.py").write_text(OLD)
    git(folder, "init", "-q")
    git(folder, "config", "user.name", "A")
    git(folder, "config", "user.email", "a@example.org")
    commit(folder)
    return folder


def git(folder, *arguments):
    return subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True).stdout


def commit(folder):
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "made")


def test_a_branch_has_the_change_and_its_test(trainer):
    assert lrlab(["upstream-patch", "made-up", "--checkout", str(trainer)]) in (0, None)
    assert git(trainer, "show", "fix-made-up:schedule.py") == NEW
    assert git(trainer, "show", "fix-made-up:tests/test_length.py") == CHANGE.test[1]
    assert git(trainer, "log", "-1", "--format=%B", "fix-made-up").startswith(
        "Count the warm-up once\n\nIt was counted twice."
    )
    assert git(trainer, "status", "--porcelain") == ""


def test_a_patch_file_applies(trainer, tmp_path):
    out = tmp_path / "made-up.patch"
    assert trainer_patches.trainer_patch("made-up", trainer, out=out) == out
    assert "fix-made-up" not in git(trainer, "branch")
    git(trainer, "apply", str(out))
    assert (trainer / "schedule.py").read_text() == NEW


@pytest.mark.parametrize(
    "text",
    [OLD.replace("epochs + warmup", "warmup + epochs"), OLD.replace("if warmup:", "if warmup > 0:"), OLD + OLD],
    ids=["another line of the block", "another first line", "twice"],
)
def test_other_lines_are_refused(trainer, text):
    (trainer / "schedule.py").write_text(text)
    commit(trainer)
    with pytest.raises(LabError, match="not as made-up needs it, at the line 'if warmup:': must be as in commit abc1234"):
        trainer_patches.trainer_patch("made-up", trainer)


def test_a_change_that_is_there_is_refused(trainer):
    trainer_patches.trainer_patch("made-up", trainer)
    git(trainer, "switch", "-q", "fix-made-up")
    with pytest.raises(LabError, match=r"tests/test_length.py of this checkout exists.*applied already"):
        trainer_patches.trainer_patch("made-up", trainer)


def test_a_checkout_of_something_else_is_refused(trainer):
    with pytest.raises(LabError, match=r"not the root of a git checkout of sd-scripts: HEAD has no library/train_util.py"):
        trainer_patches.trainer_patch("sd-scripts-warmup", trainer)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_well_formed(name):
    path, text = CHANGES[name].test
    assert path.endswith(".py")
    assert any(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in ast.walk(ast.parse(text)))
    for edit in CHANGES[name].edits:
        assert edit.new.endswith("\n")
        assert bool(edit.checksum) == (edit.num_lines > 1)


@pytest.mark.skipif("LRLAB_TRAINERS" not in os.environ, reason="LRLAB_TRAINERS names no folder with checkouts of trainers")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_applies_to_its_commit(name):
    change = CHANGES[name]
    folder = Path(os.environ["LRLAB_TRAINERS"]) / change.project.name

    def read(path):
        return (folder / path).read_text(encoding="utf-8") if (folder / path).is_file() else None

    for path, text in changed_files(name, change, read).items():
        ast.parse(text)
        assert text != read(path)
