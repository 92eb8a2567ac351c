"""The folder of a run: paths, log, record and checkpoints."""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..averaging.snapshots import snapshots_in
from ..core.errors import LabError, how_to_continue, warn
from ..core.files import (
    append_line,
    is_plain_name,
    number_in,
    remove,
    remove_leftovers,
    sync,
    write_text,
)
from ..core.manifest import MANIFEST, find_damage, open_manifest, sums_of_bytes, write_manifest
from .kinds.select import components
from .record_schema import read_checked
from .run_files import OWN, RECORD, SNAPSHOTS, is_checkpoint, sums_of_result

PROJECT = "diffusers_lrlab"  # the name in trackers
# Folders that trackers write into --logging_dir.
TRACKER_FOLDERS = (PROJECT, "wandb", ".aim")
FINDER_FILES = ("lr_finder.json", "lr_finder.png")  # in `lrlab/`


@dataclass
class RunFolder:
    """Paths and files of a run."""

    path: Path  # --output_dir
    is_writer: bool = True  # one of the processes
    _log_size: int | None = None  # bytes of the log after the last write of this process
    _has_record: bool = False  # whether this process has written the record

    @property
    def lab(self) -> Path:
        """The folder of metrics, record and plots."""
        return self.path / "lrlab"

    @property
    def metrics_file(self) -> Path:
        """A row for each logged update and each validation."""
        return self.lab / "metrics.jsonl"

    @property
    def timesteps_file(self) -> Path:
        """Losses by noise level; each checkpoint has a copy."""
        return self.lab / "timesteps.parquet"

    def append_metrics(self, row: dict[str, Any]) -> None:
        if self.is_writer:
            self.check_log()
            append_line(self.metrics_file, json.dumps(row, allow_nan=False))
            self._log_size = self._size()

    def check_there(self) -> None:
        """Raises a `LabError` if the record that this run has written was removed."""
        if self._has_record and not (self.path / RECORD).exists():
            raise self._disturbed()

    def check_log(self) -> None:
        """[`check_there`], and whether the log was removed or changed since the last write of this process."""
        self.check_there()
        if self._log_size is not None and self._size() != self._log_size:
            raise self._disturbed()

    def _disturbed(self) -> LabError:
        return LabError(
            f"{str(self.lab)!r} was changed or removed while the run was writing there. Hint: leave the folder of a run "
            f"alone while it trains; {how_to_continue()}, which starts again if no checkpoint is left."
        )

    def _log(self) -> bytes:
        return self.metrics_file.read_bytes() if self.metrics_file.exists() else b""

    def _size(self) -> int:
        return self.metrics_file.stat().st_size if self.metrics_file.exists() else 0

    def log_size(self) -> int:
        """Current size of the log in bytes, for [`log_sums`]."""
        self.check_log()
        return self._size()

    def log_sums(self, size: int) -> dict[str, Any]:
        """Size and hash of the first `size` bytes of the log, for a checkpoint; flushes them to disk."""
        if not size:
            return {"size": 0}
        sync(self.metrics_file)
        sync(self.lab)
        with self.metrics_file.open("rb") as file:
            return {"size": size, "sha256": hashlib.sha256(file.read(size)).hexdigest()}

    def check_log_until(self, checkpoint: Path) -> None:
        """Raises a `LabError` if the log does not start with the bytes that it had when a checkpoint was written."""
        log = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))["log"]
        if _log_prefix(self._log(), log) is None:
            raise LabError(f"{str(self.metrics_file)!r} has changed since {checkpoint.name} was written")

    def read_metrics(self) -> list[dict[str, Any]]:
        """The readable rows of the log: a power cut can cut off the last one, which the resumed run writes again."""
        return _rows(self._log())

    def rewind(self, update: int, log: dict[str, Any]) -> None:
        """Removes later checkpoints and rows of the log than those of the checkpoint at `update`, with its [`log_sums`]."""
        if not self.is_writer:
            return
        for later in (path for path in self.checkpoints() if checkpoint_update(path) > update):
            remove(later)
        if not self.metrics_file.exists() and not log["size"]:
            return
        text = _log_prefix(self._log(), log)
        if text is None:
            rows = [row for row in self.read_metrics() if row["update"] < update or _is_validation_at(row, update)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            warn(
                f"{str(self.metrics_file)!r} has changed since update {update}, and rows may be lost: {len(rows)} are left. "
                "Training resumes, since it needs no rows; plots of the log will lack the lost ones."
            )
        write_text(self.metrics_file, text)
        self._log_size = self._size()

    def write_record(self, record: dict[str, Any]) -> None:
        if self.is_writer:
            self.check_log()
            write_text(self.path / RECORD, _as_text(record))
            self._has_record = True

    def write_manifest(self, record: dict[str, Any]) -> None:
        """
        Writes the manifest of a finished run and marks it in `record`, which must be written next. Until then the run
        counts as unfinished, and the manifest is not checked.
        """
        if self.is_writer:
            record["run"]["manifest"] = MANIFEST
            text = _as_text(record).encode()
            write_manifest(self.path, sums_of_result(self.path) | {RECORD: sums_of_bytes(text)})

    def reopen(self) -> None:
        """Marks the manifest of a finished run as open, before anything else in its folder changes."""
        if self.is_writer and (self.path / MANIFEST).exists():
            open_manifest(self.path)

    def read_record(self) -> dict[str, Any]:
        """`run.json`, empty if there is none."""
        file = self.lab / "run.json"
        if not file.exists():
            return {}
        # A metric may be NaN, which other readers refuse.
        return read_checked(file, "remove it; a run can be resumed or overwritten without it", parse_constant=float)

    def is_finished(self) -> bool:
        """Whether the record says that the run has finished."""
        try:
            return self.read_record().get("run", {}).get("status") == "finished"
        except LabError:
            return False

    def holds_run(self) -> bool:
        """Whether it holds files of a run, complete or not."""
        files = (self.lab / "run.json", self.metrics_file, self.path / "model_index.json")
        return any(file.exists() for file in files) or bool(self.checkpoints())

    def checkpoints(self) -> list[Path]:
        """Completely written checkpoints, oldest first; they may be damaged."""
        found = [
            path
            for path in self.path.glob("checkpoint-*")
            if number_in(path.name, "checkpoint-") is not None and is_checkpoint(path)
        ]
        return sorted(found, key=checkpoint_update)

    def newest_checkpoint(self, among: list[Path] | None = None) -> Path | None:
        """
        The newest intact checkpoint, `among` these (oldest first) or of all. Warns if newer ones are damaged, and raises a
        `LabError` if all are.
        """
        damaged: list[str] = []
        for checkpoint in reversed(self.checkpoints() if among is None else among):
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


def _as_text(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=2) + "\n"


def _log_prefix(written: bytes, log: dict[str, Any]) -> str | None:
    """The log as a checkpoint recorded it; `None` if it no longer starts with those bytes."""
    head = written[: log["size"]]
    if len(head) == log["size"] and hashlib.sha256(head).hexdigest() == log.get("sha256", hashlib.sha256().hexdigest()):
        return head.decode()
    return None


def _rows(written: bytes) -> list[dict[str, Any]]:
    rows = []
    for line in written.splitlines():
        with suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("update"), int)]


def _is_validation_at(row: dict[str, Any], update: int) -> bool:
    return row["update"] == update and "validation_loss" in row


def checkpoint_update(path: Path) -> int:
    """The number of completed updates in `checkpoint-<update>`."""
    return int(path.name.partition("-")[2])
