"""The paths in the folder of a run that belong to the run."""

from pathlib import Path

from ..core.errors import LabError
from ..core.files import TEMPORARY, is_plain_name
from ..core.manifest import MANIFEST, Sums, sums_in
from .kinds.select import components
from .record_schema import read_json

# Written by a run besides checkpoints and weights, so that --overwrite_output_dir may remove it.
OWN = ("model_index.json", "pipeline.py", "README.md", "scheduler", MANIFEST)
LAB = "lrlab"
SNAPSHOTS = "ema_snapshots"  # of post-hoc averages, a folder each; neither part of the result nor uploaded
RECORD = f"{LAB}/run.json"


def sums_of_result(path: Path) -> dict[str, Sums]:
    """The sums of all files of a finished run except its record, which is written later."""
    names = dict.fromkeys((*OWN, *components(), *parts_of_pipeline(path), LAB))
    files = [file for name in names for file in _files_in(path / name)]
    return sums_in(path, [file for file in files if file != path / RECORD])


def parts_of_pipeline(path: Path) -> list[str]:
    """The folders of a pipeline by its index, such as that of the autoencoder of latents; none without an index."""
    index = path / "model_index.json"
    parts = read_json(index) if index.is_file() else {}
    if not isinstance(parts, dict):
        raise LabError(f"{str(index)!r} is not the index of a pipeline. Hint: restore it from a copy, or pull it again.")
    return [name for name, part in parts.items() if isinstance(part, list) and is_plain_name(name)]


def _files_in(path: Path) -> list[Path]:
    """A file, or the files of a folder, without unfinished ones."""
    found = [path] if path.is_file() else path.rglob("*")
    return [file for file in found if not any(part.startswith(TEMPORARY) for part in file.relative_to(path.parent).parts)]


def is_checkpoint(path: Path) -> bool:
    return (path / "trainer.json").is_file() or (path / MANIFEST).is_file()
