"""Standard streams of programs that are closed, full, or no longer read, and their garbage collection."""

import gc
import subprocess
import sys
import weakref

import pytest

from diffusers_lrlab.core.program import exit_status, freeze_imports

PROGRAM = """
import os, sys
import diffusers_lrlab
from diffusers_lrlab.core.program import exit_status

def program():
    with open(sys.argv[1], "w") as file:
        print("for people")
        os.system("echo from another process")
        file.write("own text")
    sys.stdout.write("x" * int(sys.argv[2]))
    sys.stderr.write("warning: seen\\n")

sys.exit(exit_status(program))
"""
FULL = "error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("redirected", "status", "error"),
    [("<&- >&- 2>&-", 0, ""), (">&-", 0, "warning: seen\n"), (">/dev/full", 2, FULL)],
)
def test_streams_that_are_closed_or_full(tmp_path, redirected, status, error):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "file"), "100000"]
    done = subprocess.run(["sh", "-c", f'exec "$@" {redirected}', "sh", *command], stderr=subprocess.PIPE, text=True)
    if "echo" in done.stderr:  # what the other process says of its own stdout
        done.stderr = "".join(line for line in done.stderr.splitlines(keepends=True) if "echo" not in line)
    assert (done.returncode, done.stderr) == (status, error)
    assert (tmp_path / "file").read_text() == "own text" or "full" in redirected


@pytest.mark.slow
def test_a_launched_script_runs_with_closed_streams(tmp_path):
    (tmp_path / "script.py").write_text("print('seen')\nopen('file', 'w').write('own text')\n")
    command = [sys.executable, "-m", "diffusers_lrlab.launch", "--lr_scheduler", "rex", "script.py"]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], cwd=tmp_path, check=False)
    assert (tmp_path / "file").read_text() == "own text"
    assert done.returncode == 2  # since the script made no scheduler


@pytest.mark.parametrize("size", ["0", "100000"])
def test_a_pipe_that_is_no_longer_read_ends_a_program_as_its_signal_would(tmp_path, size):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "file"), size]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        error = process.stderr.read()
    assert "error: " not in error
    assert "Traceback" not in error
    assert process.returncode == 141


def test_collections_are_rare_only_during_the_imports(monkeypatch):
    usual, seen = gc.get_threshold(), []

    def program():
        assert gc.get_threshold() > usual
        for _ in range(2):
            left, frozen = weakref.ref(type("Left", (), {})), gc.get_freeze_count()  # a class is a cycle
            freeze_imports()
            seen.append((gc.get_threshold(), gc.get_freeze_count() > frozen, gc.collect() and left() is None))

    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "torch", raising=False)
        try:
            assert exit_status(program) == 0
            assert seen == [(usual, True, False), (usual, False, True)]  # the runs of a study
        finally:
            gc.unfreeze()


def test_the_collector_of_a_notebook_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    usual, frozen, seen = gc.get_threshold(), gc.get_freeze_count(), []
    assert exit_status(lambda: (seen.append(gc.get_threshold()), freeze_imports()) and None) == 0
    assert (gc.get_freeze_count(), *seen, gc.get_threshold()) == (frozen, usual, usual)
