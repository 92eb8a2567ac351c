"""The record and the log of a run, which are untrusted input and checked before use."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import LabError
from ..core.manifest import refuse_damaged
from ..training.record_schema import is_number, no_number, read_checked, small
from ..training.run_folder import RECORD

_COLUMNS = ("lr", "lr_hidden", "beta1", "loss", "validation_loss", "validation_loss_ema", "grad_norm")


def open_run(folder: Path, reads: Callable[[str], bool]) -> dict[str, Any]:
    """The [`read_record`] of a run to use; a `LabError` if it, or a file that `reads` selects, is damaged."""
    refuse_damaged(folder, only=lambda name: name == RECORD or reads(name))
    return read_record(folder)


def read_record(folder: Path) -> dict[str, Any]:
    """`lrlab/run.json` of a run; raises a `LabError` if it is missing or invalid."""
    file = folder / "lrlab" / "run.json"
    if not file.is_file():
        raise LabError(f"{str(folder)!r} holds no record of a run (lrlab/run.json). Give the folder of a run.")
    return read_checked(file)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The rows of `lrlab/metrics.jsonl`, none without a log; raises a `LabError` for an invalid row."""
    file = folder / "lrlab" / "metrics.jsonl"
    if not file.is_file():
        return []
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            row = json.loads(line, parse_constant=no_number, parse_int=small)
            good = type(row["update"]) is int and all(is_number(row[name]) for name in _COLUMNS if name in row)
        except (ValueError, KeyError, TypeError, RecursionError):
            good = False
        if not good:
            raise LabError(f"Line {number} of {str(file)!r} is not a row of a log.")
        rows.append(row)
    return rows


def updates_done(folder: Path, record: dict[str, Any]) -> int:
    """Updates done by a run, from its record or its log."""
    done = record["train"].get("updates_done")
    if isinstance(done, int):
        return done
    if record["run"]["status"] == "finished":
        return record["train"]["num_updates"]
    return max((row["update"] + 1 for row in read_log(folder) if "loss" in row), default=0)
