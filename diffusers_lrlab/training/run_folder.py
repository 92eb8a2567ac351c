"""The folder of a run: what it holds, and the record of the run in it."""

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import LabError, warn
from ..core.files import (
    OLD,
    append_line,
    remove,
    remove_leftovers,
    sync,
    temporary_beside,
    write_text,
)
from ..core.manifest import MANIFEST, find_damage, open_manifest, sums_of_bytes, write_manifest
from ..core.words import counted
from .kinds.select import components
from .run_files import OWN, RECORD, is_checkpoint, sums_of_result

PROJECT = "diffusers_lrlab"  # as trackers know it
# What trackers write into --logging_dir.
TRACKER_FOLDERS = (PROJECT, "wandb", ".aim")
FINDER_FILES = ("lr_finder.json", "lr_finder.png")  # in `lrlab/`


@dataclass
class RunFolder:
    """Paths and records of one run."""

    path: Path  # --output_dir
    is_writer: bool = True  # of the processes, only one is
    _log_size: int | None = None  # bytes of the log as this process has written it
    _has_record: bool = False  # whether this run has written its record, which stays from then on

    @property
    def lab(self) -> Path:
        """Where metrics, record and plots are."""
        return self.path / "lrlab"

    @property
    def metrics_file(self) -> Path:
        """One row a logged update, and one a validation."""
        return self.lab / "metrics.jsonl"

    @property
    def timesteps_file(self) -> Path:
        """Losses by noise level; every checkpoint has a copy."""
        return self.lab / "timesteps.parquet"

    def append_metrics(self, row: dict[str, Any]) -> None:
        if self.is_writer:
            self.check_log()
            append_line(self.metrics_file, json.dumps(row, allow_nan=False))
            self._log_size = self.metrics_file.stat().st_size

    def check_there(self) -> None:
        """Raises a `LabError` if the folder was removed after this run wrote its record or its log there."""
        written = [self.metrics_file] if self._log_size is not None else []
        written += [self.lab / "run.json" if self.is_writer else self.path] if self._has_record else []
        for file in written:
            if not file.exists():
                raise _left_alone(f"{str(file)!r} was removed")

    def check_log(self) -> None:
        """Raises a `LabError` if the log is not as this process left it: somebody removed the folder, or writes there."""
        self.check_there()
        if self._log_size is not None and (size := self.metrics_file.stat().st_size) != self._log_size:
            raise _left_alone(f"{str(self.metrics_file)!r} has {counted(size, 'byte')} instead of {self._log_size}")

    def log_size(self) -> int:
        """Bytes of the log until now, for [`log_sums`]."""
        self.check_log()
        return self.metrics_file.stat().st_size if self.metrics_file.exists() else 0

    def log_sums(self, size: int) -> dict[str, Any]:
        """Size and hash of the log when it had so many bytes, for a checkpoint; they are on the disk then."""
        if not size:
            return {"size": 0}
        sync(self.metrics_file)
        sync(self.lab)
        with self.metrics_file.open("rb") as file:
            return {"size": size, "sha256": hashlib.sha256(file.read(size)).hexdigest()}

    def check_log_until(self, checkpoint: Path) -> None:
        """Raises a `LabError` if the log does not begin as it was when a checkpoint was written."""
        log = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))["log"]
        written = self.metrics_file.read_bytes() if self.metrics_file.exists() else b""
        if _beginning(written, log) is None:
            raise LabError(f"{str(self.metrics_file)!r} is not as it was when {checkpoint.name} was written")

    def read_metrics(self) -> list[dict[str, Any]]:
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8").splitlines()
        try:
            return [json.loads(line) for line in lines]
        except json.JSONDecodeError:
            # A power cut can tear the last line; it is written again by the resumed run.
            return [json.loads(line) for line in lines[:-1]]

    def rewind(self, update: int, log: dict[str, Any] | None) -> None:
        """
        Drops what was written after the checkpoint that was taken at `update`: later checkpoints, rows of the log.

        `log` is what [`log_sums`] was then; `None` goes by the rows alone.
        """
        if not self.is_writer:
            return
        for later in (path for path in self.checkpoints() if checkpoint_update(path) > update):
            remove(later)
        if not self.metrics_file.exists() and not (log and log["size"]):
            return
        written = self.metrics_file.read_bytes() if self.metrics_file.exists() else b""
        text = None if log is None else _beginning(written, log)
        if text is None:
            rows = [row for row in _rows(written) if row["update"] < update or _is_validation_at(row, update)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            if log is not None:
                warn(
                    f"{str(self.metrics_file)!r} has changed since update {update}, and rows may be lost: {len(rows)} are "
                    "left. Training goes on, which needs none of them; figures that are made of the log will lack them."
                )
        write_text(self.metrics_file, text)
        self._log_size = self.metrics_file.stat().st_size

    def write_record(self, record: dict[str, Any]) -> None:
        if self.is_writer:
            self.check_log()
            write_text(self.lab / "run.json", _as_text(record))
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
        """Says in the manifest of a finished run that it goes on, before anything else in its folder changes."""
        if self.is_writer and (self.path / MANIFEST).exists():
            open_manifest(self.path)

    def read_record(self) -> dict[str, Any]:
        """`run.json`, empty if there is none."""
        file = self.lab / "run.json"
        try:
            record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            if not isinstance(record, dict) or not all(isinstance(section, dict) for section in record.values()):
                raise ValueError("it is no mapping of sections")
        except (ValueError, RecursionError) as error:
            raise LabError(
                f"{str(file)!r} is damaged ({error}). Remove this file: a run can go on without it, and be overwritten."
            ) from None
        return record

    def is_finished(self) -> bool:
        """Whether the record says that the run has ended as it should."""
        try:
            return self.read_record().get("run", {}).get("status") == "finished"
        except LabError:
            return False

    def holds_run(self) -> bool:
        """Whether something of a run is there, whole or not."""
        files = (self.lab / "run.json", self.metrics_file, self.path / "model_index.json")
        return any(file.exists() for file in files) or bool(self.checkpoints())

    def checkpoints(self) -> list[Path]:
        """Those that were written to their end, oldest first; they may have been damaged since."""
        found = [
            path
            for path in self.path.glob("checkpoint-*")
            if re.fullmatch(r"checkpoint-\d+", path.name) and is_checkpoint(path)
        ]
        return sorted(found, key=checkpoint_update)

    def newest_checkpoint(self, among: list[Path] | None = None) -> Path | None:
        """
        The newest one (`among` these, oldest first, or of all) that is whole, with a warning if that is not the last; a
        `LabError` if all are damaged.
        """
        damaged: list[str] = []
        for checkpoint in reversed(self.checkpoints() if among is None else among):
            damage = find_damage(checkpoint)
            if damage is None:
                if damaged:
                    warn(f"{'; '.join(damaged)}. The newest checkpoint that is whole is {checkpoint.name}.")
                return checkpoint
            damaged.append(damage)
        if damaged:
            raise LabError(
                f"No checkpoint in {str(self.path)!r} is whole: {'; '.join(damaged)}. Restore one from a copy, or start "
                "again by --overwrite_output_dir in place of --resume_from_checkpoint."
            )
        return None

    def remove_leftovers(self) -> None:
        """Removes what a killed run left unfinished."""
        remove_leftovers(self.path, self.lab, self.lab / "samples")

    def clear(self) -> None:
        """Removes what a run wrote, and nothing else: what the finder found is for runs that come."""
        config = self.read_record().get("config", {})
        logs_of_tracker = self.path / _plain_name(config.get("logging_dir"))
        self.remove_leftovers()
        for name in TRACKER_FOLDERS:  # other things there may be somebody else's
            remove_leftovers(logs_of_tracker, pattern=temporary_beside(Path(name), OLD).name)
        own = [path for pattern in (*OWN, *components()) for path in self.path.glob(pattern)]
        own += [path for path in map(logs_of_tracker.joinpath, TRACKER_FOLDERS) if path.exists()]
        # The record last: it says that the rest is a run's, should this be interrupted.
        logs = sorted(self.lab.glob("*"), key=lambda path: path.name == "run.json")
        for path in [*own, *self.checkpoints(), *(path for path in logs if path.name not in FINDER_FILES)]:
            remove(path)
        for path in (self.lab, logs_of_tracker):
            if path.is_dir() and path != self.path and not any(path.iterdir()):
                path.rmdir()


def _left_alone(what: str) -> LabError:
    return LabError(
        f"{what} while the run was writing there. Leave the folder of a run alone; go on by --resume_from_checkpoint "
        "latest, which starts anew if no checkpoint is left."
    )


def _as_text(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=2) + "\n"


def _beginning(written: bytes, log: dict[str, Any]) -> str | None:
    """The log as it was when a checkpoint noted its sums; `None` if it does not begin like that any more."""
    head = written[: log["size"]]
    if len(head) == log["size"] and hashlib.sha256(head).hexdigest() == log.get("sha256", hashlib.sha256().hexdigest()):
        return head.decode()
    return None


def _rows(written: bytes) -> list[dict[str, Any]]:
    """The rows of a log that can be read."""
    rows = []
    for line in written.splitlines():
        with suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("update"), int)]


def _is_validation_at(row: dict[str, Any], update: int) -> bool:
    return row["update"] == update and "validation_loss" in row


def _plain_name(name: Any) -> str:
    """A name for something inside a folder; "logs" for whatever else a record, which may be somebody else's, has there."""
    return name if isinstance(name, str) and Path(name).name == name and name not in ("", ".", "..") else "logs"


def checkpoint_update(path: Path) -> int:
    """Updates done before `checkpoint-<update>` was written."""
    return int(path.name.partition("-")[2])
