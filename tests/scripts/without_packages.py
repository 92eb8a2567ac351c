"""Runs commands in a process that does not find some packages, as if they were not installed.

    python without_packages.py datasets,matplotlib < commands.json

Prints a list of [exit status, stderr] as JSON.
"""

import contextlib
import io
import json
import runpy
import shlex
import sys
from importlib.machinery import PathFinder
from pathlib import Path

find = PathFinder.find_spec
SCRIPTS = Path(__file__).parents[2] / "training_scripts"


def hide(packages):
    def find_others(name, path=None, target=None):
        return None if name.partition(".")[0] in packages else find(name, path, target)

    PathFinder.find_spec = staticmethod(find_others)


def run(command):
    """A command as a user types it: `lrlab ...`, `SCRIPT.py ...`, `-m MODULE ...` or `-c CODE`."""
    program, *arguments = shlex.split(command)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            if program == "lrlab":
                from diffusers_lrlab.cli.main import main

                return main(arguments), errors.getvalue()
            if program == "-c":
                exec(arguments[0], {})
                return 0, ""
            sys.argv = [program, *arguments] if program != "-m" else arguments
            if program == "-m":
                runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(SCRIPTS / program), run_name="__main__")
    except SystemExit as ended:
        return ended.code or 0, errors.getvalue()
    except (ImportError, ValueError) as error:
        return 1, f"error: {error}"
    return 0, errors.getvalue()


if __name__ == "__main__":
    hide(sys.argv[1].split(","))
    results = [run(command) for command in json.load(sys.stdin)]
    json.dump(results, sys.__stdout__)
