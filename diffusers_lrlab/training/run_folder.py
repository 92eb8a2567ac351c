"""The folder of a run: the paths that belong to the run, its log, record, manifest and checkpoints."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..averaging.posthoc import snapshots_in
from ..core.errors import LabError, how_to_continue, warn
from ..core.files import (
    LOCK,
    TEMPORARY,
    append_line,
    atomic_folder,
    is_plain_name,
    number_in,
    remove,
    remove_leftovers,
    sync,
    write_text,
)
from ..core.manifest import MANIFEST, find_damage, open_manifest, sums_in, write_manifest
from ..core.words import counted
from .kinds import components
from .record_schema import read_checked, read_json

PROJECT = "diffusers_lrlab"  # the name in trackers
# Folders that trackers write into --logging_dir.
TRACKER_FOLDERS = (PROJECT, "wandb", ".aim")
FINDER_FILES = ("lr_finder.json", "lr_finder.png")  # in `lrlab/`
# Written by a run besides checkpoints and weights, so that --overwrite_output_dir may remove it.
OWN = ("model_index.json", "pipeline.py", "README.md", "scheduler", MANIFEST)
LAB = "lrlab"
SNAPSHOTS = "ema_snapshots"  # of post-hoc averages, a folder each; neither part of the result nor uploaded
RECORD = f"{LAB}/run.json"


class RunFolder:
    """Paths and files of a run in `path`, the --output_dir; one of the processes writes."""

    def __init__(self, path: Path, is_writer: bool = True):
        self.path, self.is_writer = path, is_writer
        self.lab = path / LAB  # metrics, record and plots
        self.metrics_file = self.lab / "metrics.jsonl"  # a row for each logged update and each validation
        self.timesteps_file = self.lab / "timesteps.parquet"  # losses by noise level; each checkpoint has a copy
        self._has_record = False  # whether this process has written the record

    # --- the log -----------------------------------------------------------------------------------------------------

    def append_metrics(self, row: dict[str, Any]) -> None:
        if self.is_writer:
            self.check_there()
            append_line(self.metrics_file, json.dumps(row, allow_nan=False))

    def check_there(self) -> None:
        """Raises a `LabError` if the record that this run has written was removed."""
        if self._has_record and not (self.path / RECORD).exists():
            raise LabError(
                f"{str(self.lab)!r} was removed while the run was writing there. Hint: leave the folder of a run alone "
                f"while it trains; {how_to_continue()}, which starts again if no checkpoint is left."
            )

    def read_metrics(self) -> list[dict[str, Any]]:
        """The readable rows of the log: a power cut can cut off the last one, which the resumed run writes again."""
        rows = []
        for line in self.metrics_file.read_bytes().splitlines() if self.metrics_file.exists() else ():
            with suppress(ValueError, RecursionError):
                rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict) and isinstance(row.get("update"), int)]

    def count_rows(self) -> int:
        """The number of rows so far, for a checkpoint; flushes the log to the disk."""
        if self.metrics_file.exists():
            sync(self.metrics_file)
            sync(self.lab)
        return len(self.read_metrics())

    def rewind(self, source: "RunFolder", update: int, num_rows: int) -> None:
        """
        Removes what is later than the checkpoint at `update`, which was written after `num_rows` of the log of its run:
        this one, or the `source` that this run starts from.
        """
        if not self.is_writer:
            return
        for later in (*self.checkpoints(), *snapshots_in(self.path / SNAPSHOTS)):
            if checkpoint_update(later) > update:
                remove(later)
        earlier = snapshots_in(source.path / SNAPSHOTS) if source.path != self.path else []
        for snapshot in (path for path in earlier if checkpoint_update(path) <= update):
            if damage := find_damage(snapshot):
                warn(f"The snapshot {snapshot.name} is damaged, and is not copied: {damage}.")
                continue
            with atomic_folder(self.path / SNAPSHOTS / snapshot.name) as temporary:
                shutil.copytree(snapshot, temporary, dirs_exist_ok=True)
        rows = source.read_metrics()  # and of these, those that were written before the checkpoint
        rows = [row for row in rows if row["update"] < update or (row["update"] == update and "validation_loss" in row)]
        if len(rows) != num_rows:
            warn(
                f"{str(source.metrics_file)!r} has {len(rows)} of {counted(num_rows, 'row')} before update {update}. "
                "Training resumes, since it needs no rows; plots of the log will lack the lost ones."
            )
        if rows or self.metrics_file.exists():
            write_text(self.metrics_file, "".join(json.dumps(row) + "\n" for row in rows))

    # --- record and manifest -----------------------------------------------------------------------------------------

    def write_record(self, record: dict[str, Any]) -> None:
        if self.is_writer:
            self.check_there()
            write_text(self.path / RECORD, json.dumps(record, indent=2, default=repr) + "\n")
            self._has_record = True

    def write_manifest(self) -> None:
        """Writes the manifest of a finished run, after its record."""
        if self.is_writer:
            names = dict.fromkeys((*OWN, *components(), *parts_of_pipeline(self.path), LAB))
            write_manifest(self.path, sums_in(self.path, [file for name in names for file in _files_in(self.path / name)]))

    def reopen(self) -> None:
        """Marks the manifest of a finished run as open, before anything else in its folder changes."""
        if self.is_writer and (self.path / MANIFEST).exists():
            open_manifest(self.path)

    def read_record(self) -> dict[str, Any]:
        """`run.json`, empty if there is none."""
        file = self.path / RECORD
        if not file.exists():
            return {}
        # A metric may be NaN, which other readers refuse.
        return read_checked(file, "remove it; a run can be resumed or overwritten without it", parse_constant=float)

    def holds_run(self) -> bool:
        """Whether it holds files of a run, complete or not."""
        files = (self.path / RECORD, self.metrics_file, self.path / "model_index.json")
        return any(file.exists() for file in files) or bool(self.checkpoints())

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[Path]:
        """Completely written checkpoints, oldest first; they may be damaged."""
        named = (path for path in self.path.glob("checkpoint-*") if number_in(path.name, "checkpoint-") is not None)
        return sorted(filter(is_checkpoint, named), key=checkpoint_update)

    def newest_checkpoint(self) -> Path | None:
        """The newest intact checkpoint; warns if newer ones are damaged, and raises a `LabError` if all are."""
        damaged: list[str] = []
        for checkpoint in reversed(self.checkpoints()):
            damage = find_damage(checkpoint)
            if damage is None:
                if damaged:
                    warn(f"{'; '.join(damaged)}. The newest intact checkpoint is {checkpoint.name}.")
                return checkpoint
            damaged.append(damage)
        if damaged:
            raise LabError(
                f"No checkpoint in {str(self.path)!r} is intact: {'; '.join(damaged)}. Hint: restore one from a copy, or "
                "start again with --overwrite_output_dir in place of --resume_from_checkpoint."
            )
        return None

    # --- removal -----------------------------------------------------------------------------------------------------

    def remove_leftovers(self) -> None:
        """Removes unfinished files of a killed run."""
        remove_leftovers(self.path, self.lab, self.lab / "samples", self.path / SNAPSHOTS)

    def clear(self) -> None:
        """Removes the files of a run and nothing else; results of the finder stay for later runs."""
        config = self.read_record().get("config", {})
        name = config.get("logging_dir")
        logs_of_tracker = self.path / (name if is_plain_name(name) else "logs")  # records are untrusted input
        snapshots = self.path / SNAPSHOTS
        self.remove_leftovers()
        remove_leftovers(logs_of_tracker)
        own = [path for pattern in (*OWN, *components()) for path in self.path.glob(pattern)]
        own = [path for path in own if path.is_dir() != bool(path.suffix)]  # a folder in the place of a file is the user's
        # The record last: after an interruption, it still shows that the rest belongs to a run.
        logs = sorted(self.lab.glob("*"), key=lambda path: path.name == "run.json")
        own += [path for path in logs if path.name not in FINDER_FILES]
        trackers = [path for path in map(logs_of_tracker.joinpath, TRACKER_FOLDERS) if path.exists()]
        for path in (*trackers, *self.checkpoints(), *snapshots_in(snapshots), *own):
            remove(path)
        for path in (self.lab, logs_of_tracker, snapshots):
            if path.is_dir() and path != self.path and not any(path.iterdir()):
                path.rmdir()


def checkpoint_update(path: Path) -> int:
    """The number of completed updates in `checkpoint-<update>`."""
    return int(path.name.partition("-")[2])


def is_checkpoint(path: Path) -> bool:
    return (path / "trainer.json").is_file() or (path / MANIFEST).is_file()


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
    return [file for file in found if not is_leftover(file, path.parent)]


def is_leftover(file: Path, folder: Path) -> bool:
    """Whether it is the lock of a folder, or an unfinished file of a killed run."""
    return file.name == LOCK or any(part.startswith(TEMPORARY) for part in file.relative_to(folder).parts)
