"""Functions and classes of a trainer, from its checkout: its own code, with mocks for modules not installed here."""

import ast
import contextlib
import logging
import os
from pathlib import Path
from unittest import mock

import pytest

VARIABLES = {
    "sd-scripts": "LRLAB_SD_SCRIPTS",
    "musubi-tuner": "LRLAB_MUSUBI_TUNER",
    "SimpleTuner": "LRLAB_SIMPLETUNER",
    "ai-toolkit": "LRLAB_AI_TOOLKIT",
    "OneTrainer": "LRLAB_ONETRAINER",
    "diffusion-pipe": "LRLAB_DIFFUSION_PIPE",
}


def checkout(trainer):
    """The folder of a trainer's checkout; skips the test if none is named."""
    if not (folder := os.environ.get(VARIABLES[trainer])):
        pytest.skip(f"{VARIABLES[trainer]} does not name a checkout of {trainer}")
    return Path(folder)


def names_of(path):
    """A module's functions and classes, by name. Its imports are done as far as they can be, and mocked otherwise."""
    text, module = path.read_text(encoding="utf-8"), {"__name__": "own_code", "logger": logging.getLogger("own_code")}
    for node in ast.parse(text).body:
        code = compile(ast.Module([node], []), str(path), "exec")
        if isinstance(node, ast.Import | ast.ImportFrom):
            try:
                exec(code, module)
            except Exception:
                names = [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
                module.update({name: mock.MagicMock(name=name) for name in names if name not in module})
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.ClassDef):
            with contextlib.suppress(Exception):  # of constants and classes that need what is not installed here
                exec(code, module)
    return module
