"""`lrlab` as a user starts it."""

import os
import subprocess
import sys

from diffusers_lrlab.cli.main import main

COMMAND = [sys.executable, "-W", "error", "-m", "diffusers_lrlab.cli.main"]


def lrlab(*arguments, status=0, encoding="utf-8", python=(), **env):
    """What `lrlab ...` prints; on an error, what it says about it."""
    command = [COMMAND[0], *python, *COMMAND[1:], *map(str, arguments)]
    env = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "80", **env}
    done = subprocess.run(command, capture_output=True, encoding=encoding, env=env)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    if status == 0 and not python:
        assert done.stderr == ""
    return done.stderr if status or python else done.stdout


def said(capsys, *arguments):
    """Its exit status in this process, and all that it prints."""
    status = main([str(argument) for argument in arguments])
    out, error = capsys.readouterr()
    assert "Traceback" not in error
    return status, out + error


def lrlab_here(capsys, *arguments):
    """The same, in this process."""
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out
