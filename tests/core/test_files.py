"""Folders that one process at a time writes into, whose damage is noticed, and which are never found half removed."""

import json
import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from started import Started

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.files import (
    atomic_file,
    atomic_folder,
    folder_beside,
    is_locked,
    locked,
    new_folder,
    number_in,
    remove,
    remove_leftovers,
    write_text,
)
from diffusers_lrlab.core.streams import random_states, restore_random_states


def test_the_second_is_refused(tmp_path):
    with locked(tmp_path, "--output_dir"):
        with pytest.raises(LabError, match="is being written by another process. Wait for it, .*--output_dir"):
            with locked(tmp_path, "--output_dir"):
                pytest.fail("both were let in")
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    with locked(tmp_path / "a" / "b", "--out"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not list(tmp_path.iterdir())  # a folder that stayed empty is not left


def test_a_folder_beside_the_current_one(tmp_path, monkeypatch):
    (tmp_path / "run" / "lrlab").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run")
    assert folder_beside(Path(), "-ema") == tmp_path / "run-ema"
    assert folder_beside(Path("lrlab/.."), "-ema") == tmp_path / "run-ema"
    assert folder_beside(Path("runs/one"), "-ema") == Path("runs/one-ema")


@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_a_new_folder_replaces_nothing_that_appears_meanwhile(tmp_path, what):
    out = tmp_path / "out"

    def make():
        with new_folder(out, "--out") as temporary:
            write_text(temporary / "result", "text")
            if what == "link":
                (tmp_path / "elsewhere").mkdir()
                out.symlink_to(tmp_path / "elsewhere")
            else:
                write_text(out / ("mine" if what == "file" else "of/mine"), "precious")

    with pytest.raises(LabError, match=r"--out '.*out' .* Hint: give a new one\."):
        make()
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if not path.is_dir() or path.is_symlink()}
    assert left == {{"file": "out/mine", "folder": "out/of/mine", "link": "out"}[what]}
    assert not list(tmp_path.glob(".*"))


def test_a_replaced_folder_keeps_files_of_others(tmp_path):
    report = tmp_path / "report"
    for name in ("plot.png", "tables/stale.tex", "tables/mine.txt", "notes/mine.png"):
        write_text(report / name, "old")
    with atomic_folder(report, own=("*.png", "tables/*.tex")) as temporary:
        write_text(temporary / "plot.png", "new")
    found = {path.relative_to(report).as_posix(): path.read_text() for path in report.rglob("*") if path.is_file()}
    assert found == {"plot.png": "new", "tables/mine.txt": "old", "notes/mine.png": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


@pytest.mark.parametrize("make", [new_folder, atomic_folder, atomic_file])
def test_a_failure_leaves_nothing(tmp_path, make):
    def fail():
        with make(tmp_path / "new" / "out") as temporary:
            write_text(temporary / "result" if temporary.is_dir() else temporary, "text")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(tmp_path.iterdir())


_HALF = """
import contextlib, sys, time
from pathlib import Path
from diffusers_lrlab.core.files import atomic_file, atomic_folder, locked, new_folder

with contextlib.ExitStack() as stack:
    stack.enter_context(locked(Path(sys.argv[1]), "--out"))
    for name, make in {"new": new_folder, "old": atomic_folder, "file.json": atomic_file}.items():
        temporary = stack.enter_context(make(Path(sys.argv[1]) / name))
        (temporary / "half" if temporary.is_dir() else temporary).write_text("half")
    Path(sys.argv[1], "there").touch()
    time.sleep(100)
"""


def test_a_killed_process(tmp_path):
    """Another one is refused while it lives; afterwards its lock is free, and its leftovers go."""
    write_text(tmp_path / "old" / "result", "old")
    process = Started("-c", _HALF, tmp_path, env=dict(os.environ))
    while not (tmp_path / "there").exists():
        assert process.poll() is None, process.error()
        time.sleep(0.01)
    with pytest.raises(LabError, match="being written by another process.*, or give another --out"):
        with new_folder(tmp_path / "new", "--out"):
            pytest.fail("it was let in")
    with pytest.raises(LabError, match="being written by another process"), locked(tmp_path, "--out"):
        pytest.fail("it was let in")
    process.kill()
    process.wait()
    with locked(tmp_path, "--out"), new_folder(tmp_path / "new") as new, atomic_folder(tmp_path / "old") as old:
        assert not [*new.iterdir(), *old.iterdir()]
        write_text(new / "result", "new")
        write_text(old / "result", "new")
    found = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"new/result": "new", "old/result": "new", "there": ""}


@pytest.mark.parametrize("action", ["remove", "replace"])
def test_a_folder_is_never_found_half_removed(tmp_path, monkeypatch, action):
    folder = tmp_path / "checkpoint-2"
    write_text(folder / "file", "old")

    def killed(*_, **__):
        raise KeyboardInterrupt

    def act():
        if action == "remove":
            remove(folder)
        else:
            with atomic_folder(folder) as temporary:
                write_text(temporary / "file", "new")
                monkeypatch.setattr(os, "unlink", killed)

    with monkeypatch.context() as patch:
        if action == "remove":
            patch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None if ignore_errors else killed())
        with pytest.raises(KeyboardInterrupt):
            act()
    monkeypatch.undo()
    assert not folder.exists() or (folder / "file").read_text() == "new"
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ([] if action == "remove" else ["checkpoint-2"])


def test_what_is_written_is_on_the_disk(tmp_path, monkeypatch):
    """Every file before it is renamed, then the folder that has the new name."""
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (done.append(os.readlink(f"/proc/self/fd/{number}")), fsync(number)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("rename"), replace(old, new)))
    with atomic_folder(tmp_path / "checkpoint") as temporary:
        (temporary / "part").mkdir()
        (temporary / "part" / "file").write_text("text")
    inside = [str(temporary / name) for name in ("part", "part/file", ".")]
    assert sorted(done[:3]) == sorted(path.removesuffix("/.") for path in inside)
    assert done[3:] == ["rename", str(tmp_path)]


def test_random_states_survive_json():
    def draws():
        return random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(3).tolist()

    random.gauss(), np.random.randn()  # the other half of a pair is part of the state
    states = json.loads(json.dumps(random_states()))
    expected = draws()
    draws()
    restore_random_states(states)
    assert draws() == expected


def test_only_plain_digits_are_a_number_in_a_name():
    names = ("checkpoint-20", "checkpoint-²", "checkpoint-٣", "checkpoint-2.png", "other-20")
    assert [number_in(name, "checkpoint-") for name in names] == [20, None, None, None, None]
