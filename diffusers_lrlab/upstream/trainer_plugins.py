"""Plug-ins of other trainers that import this package, so that its names work there."""

from pathlib import Path

from ..core.errors import LabError, must_be
from ..core.files import write_text

_AI_TOOLKIT = '''"""The schedules of diffusers_lrlab, as lr_scheduler of a job. Written by `lrlab plugin ai-toolkit`."""

import diffusers_lrlab  # registers its names  # noqa: F401

AI_TOOLKIT_EXTENSIONS = []
'''
FILES = {"ai-toolkit": ("extensions/diffusers_lrlab/__init__.py", _AI_TOOLKIT, "toolkit/scheduler.py")}
"""By trainer: the plug-in's file, its text, and a file by which the trainer's folder is known."""


def write_plugin(trainer: str, folder: Path) -> Path:
    """Writes the plug-in of a trainer into its folder, and returns its path. Writing it again changes nothing."""
    if trainer not in FILES:
        raise must_be("NAME", trainer, f"one of {', '.join(FILES)}", "other trainers: the page 'Other trainers'")
    name, text, known_by = FILES[trainer]
    if not (folder / known_by).is_file():
        raise must_be("DIR", str(folder), f"the folder of {trainer}", f"it contains {known_by}")
    path = folder / name
    if path.exists() and path.read_text() != text:
        raise LabError(f"{path} exists and is another file. Move it away, or keep it if it imports diffusers_lrlab.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return path
