"""The folder of a run: what it holds, who may write there, and the record of the run in it."""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import LabError
from ..core.files import append_line, write_text
from ..core.options import defaults_of, names_where
from .config import ResolvedConfig, TrainingConfig
from .kinds.select import components

# What a run writes into its folder besides checkpoints and weights, and so what --overwrite_output_dir may remove.
_OWN = ("model_index.json", "pipeline.py", "README.md", "lrlab", "scheduler", ".tmp-*")

PROJECT = "diffusers_lrlab"  # as trackers know it
# What trackers write into --logging_dir.
TRACKER_FOLDERS = (PROJECT, "wandb")
FINDER_FILES = ("lr_finder.json", "lr_finder.png")  # in `lrlab/`


@dataclass
class RunFolder:
    """Paths and records of one run."""

    path: Path  # --output_dir
    is_writer: bool = True  # of the processes, only one is

    @property
    def lab(self) -> Path:
        """Where metrics, record and plots are."""
        return self.path / "lrlab"

    @property
    def metrics_file(self) -> Path:
        """One row a logged update, and one a validation."""
        return self.lab / "metrics.jsonl"

    def append_metrics(self, row: dict[str, Any]) -> None:
        if self.is_writer:
            append_line(self.metrics_file, json.dumps(row, allow_nan=False))

    def read_metrics(self) -> list[dict[str, Any]]:
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8").splitlines()
        try:
            return [json.loads(line) for line in lines]
        except json.JSONDecodeError:
            # A power cut can tear the last line; it is written again by the resumed run.
            return [json.loads(line) for line in lines[:-1]]

    def rewind(self, update: int) -> None:
        """Drops what was written after the checkpoint that was taken at `update`: rows of the log, later checkpoints."""
        if not self.is_writer:
            return
        for later in (path for path in self.checkpoints() if checkpoint_update(path) > update):
            shutil.rmtree(later)
        if self.metrics_file.exists():
            rows = [
                row
                for row in self.read_metrics()
                if row["update"] < update or (row["update"] == update and "validation_loss" in row)
            ]
            write_text(self.metrics_file, "".join(json.dumps(row) + "\n" for row in rows))

    def write_record(self, record: dict[str, Any]) -> None:
        if self.is_writer:
            write_text(self.lab / "run.json", json.dumps(record, indent=2) + "\n")

    def read_record(self) -> dict[str, Any]:
        """`run.json`, empty if there is none."""
        file = self.lab / "run.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = [
            path
            for path in self.path.glob("checkpoint-*")
            if re.fullmatch(r"checkpoint-\d+", path.name) and (path / "trainer.json").is_file()
        ]
        return sorted(found, key=checkpoint_update)

    def clear(self) -> None:
        """Removes what a run wrote, and nothing else: what the finder found is for runs that come."""
        config = self.read_record().get("config", {})
        own = [path for pattern in (*_OWN, *components()) for path in self.path.glob(pattern) if path != self.lab]
        logs_of_tracker = self.path / _plain_name(config.get("logging_dir"))
        own += [path for path in map(logs_of_tracker.joinpath, TRACKER_FOLDERS) if path.exists()]
        logs = [path for path in self.lab.glob("*") if path.name not in FINDER_FILES]
        for path in [*self.checkpoints(), *own, *logs]:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for path in (self.lab, logs_of_tracker):
            if path.is_dir() and path != self.path and not any(path.iterdir()):
                path.rmdir()


def _plain_name(name: Any) -> str:
    """A name for something inside a folder; "logs" for whatever else a record, which may be somebody else's, has there."""
    return name if isinstance(name, str) and Path(name).name == name and name not in ("", ".", "..") else "logs"


def checkpoint_update(path: Path) -> int:
    """Updates done before `checkpoint-<update>` was written."""
    return int(path.name.partition("-")[2])


def find_checkpoint(config: ResolvedConfig) -> Path | None:
    """The checkpoint to resume from, `None` for a fresh start; a `LabError` if the folder suits neither."""
    folder = RunFolder(Path(config.output_dir))
    if config.resume_from_checkpoint is None:
        check_fresh(folder, config.overwrite_output_dir)
        return None
    checkpoints = folder.checkpoints()
    if config.resume_from_checkpoint == "latest":
        if not checkpoints:
            raise LabError(
                f"There is no checkpoint to resume from in {str(folder.path)!r}. Leave --resume_from_checkpoint out to "
                "start a new run, or give the --output_dir of the run to go on with."
            )
        return checkpoints[-1]
    asked = Path(config.resume_from_checkpoint)
    path = asked if asked.is_dir() else folder.path / asked.name
    if not (path / "trainer.json").is_file():
        known = f"Checkpoints there: {', '.join(c.name for c in checkpoints)}." if checkpoints else "There is none there."
        raise LabError(
            f"{config.resume_from_checkpoint!r} is not a checkpoint of this script. Give a folder checkpoint-N of "
            f"{str(folder.path)!r}, or 'latest'. {known}"
        )
    if path.resolve().parent != folder.path.resolve():
        raise LabError(
            f"The checkpoint {str(path)!r} belongs to the run in {str(path.parent)!r}, not to --output_dir "
            f"{str(folder.path)!r}. Give --output_dir {path.parent}."
        )
    return path


def check_fresh(folder: RunFolder, overwrite: bool) -> None:
    """Raises a `LabError` if a new run cannot be put into a folder, or would replace something unasked."""
    path = folder.path
    if path.is_file():
        raise LabError(f"--output_dir {str(path)!r} is a file. Give the name of a folder.")
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise LabError(f"--output_dir {str(path)!r} cannot be written: {str(existing)!r} is no folder you may write to.")
    if not path.is_dir() or next(path.iterdir(), None) is None:
        return
    if all(entry.parent == folder.lab and entry.name in FINDER_FILES for entry in path.rglob("*") if entry != folder.lab):
        return  # what the learning-rate finder found for the run that begins
    holds_run = bool(folder.read_record()) or bool(folder.checkpoints()) or (path / "model_index.json").exists()
    if not holds_run:
        raise LabError(
            f"--output_dir {str(path)!r} holds other files and no run. Give a new or empty folder; nothing is ever "
            "overwritten unasked."
        )
    if not overwrite:
        status = folder.read_record().get("run", {}).get("status", "unknown")
        raise LabError(
            f"--output_dir {str(path)!r} already holds a run (status: {status}). Go on with it by "
            "--resume_from_checkpoint latest, replace it by --overwrite_output_dir, or choose another folder."
        )


def read_state(checkpoint: Path) -> dict[str, Any]:
    """`trainer.json` of a checkpoint."""
    try:
        return json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise LabError(f"{str(checkpoint / 'trainer.json')!r} is damaged ({error}). Resume from another one.") from None


def check_same_config(config: ResolvedConfig, checkpoint: Path) -> None:
    """Refuses, before data are read, to go on with a run under another configuration, and says what differs."""
    # Checkpoints of earlier versions lack what was added since, and were trained without it.
    saved = {**defaults_of(TrainingConfig), **read_state(checkpoint)["config"]}
    # What may change is compared in other ways where it matters: the batch as a whole, the model by its configuration.
    fixed = names_where(TrainingConfig, may_change_on_resume=False)
    current = {f"--{name}": value for name, value in config.to_dict().items() if name in fixed}
    check_same_run({f"--{name}": value for name, value in saved.items()}, current, checkpoint)


def check_same_run(saved: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> None:
    """Raises a `LabError` that lists what is not the same now as it was in the run that wrote the checkpoint."""
    now = json.loads(json.dumps(now))
    differing = [
        f"{name}: {saved.get(name)!r} then, {value!r} now" for name, value in now.items() if saved.get(name) != value
    ]
    if differing:
        raise LabError(
            f"{str(checkpoint)!r} belongs to another run; these differ:\n  "
            + "\n  ".join(differing)
            + "\nResume with the arguments of that run, or start a new one in another --output_dir."
        )
