"""The paths in the folder of a run that belong to the run."""

from pathlib import Path

from ..core.errors import LabError
from ..core.files import TEMPORARY, check_kinds, is_plain_name, number_in
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


def check_kinds_of_own(path: Path, logging_dir: str) -> None:
    """Raises a `LabError` for a folder where a run writes a file, or the reverse."""
    lab = path / LAB
    folders = [path / name for name in ("scheduler", *components(), logging_dir)]
    files = [path / name for name in OWN if name != "scheduler"]
    files += [file for file in lab.glob("*.*") if not file.name.startswith(TEMPORARY)]
    check_kinds(files, [*folders, lab, lab / "samples", path / SNAPSHOTS], "--output_dir")


def check_names_of_checkpoints(path: Path) -> None:
    """Raises a `LabError` for a path in the folder of a run that has the name of a checkpoint but is not one."""
    for checkpoint in sorted(path.glob("checkpoint-*")):
        if number_in(checkpoint.name, "checkpoint-") is not None:
            check_own_checkpoint(checkpoint)


def check_own_checkpoint(path: Path) -> None:
    """Raises a `LabError` if a path where a checkpoint is to be written exists but is not a checkpoint of a run."""
    is_own = path.is_dir() and (is_checkpoint(path) or not any(path.iterdir()))
    if path.is_symlink() or (path.exists() and not is_own):
        what = "a link" if path.is_symlink() else "a folder" if path.is_dir() else "a file"
        raise LabError(
            f"{str(path)!r} is {what} and not a checkpoint of a run, but this run writes its checkpoints there. Hint: move "
            "it away, or give another --output_dir; nothing of yours is replaced."
        )


def is_checkpoint(path: Path) -> bool:
    return (path / "trainer.json").is_file() or (path / MANIFEST).is_file()
