"""The record and the log of a run, which are untrusted input and checked before use."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.errors import LabError

# Fields in use, and their types.
_SHAPE: dict[str, dict[str, type | tuple[type, ...]]] = {
    "run": {"status": str, "command": str},
    "train": {"num_updates": int, "global_batch": int},
    "config": {"output_dir": str, "lr_scheduler": str},
    "meta": {"versions": dict},
}
_DEEPEST = 50  # levels of nesting
_LONGEST_LINE, _MOST_LINES = 1 << 20, 1_000_000  # characters of a line of a log; lines
_COLUMNS = ("lr", "lr_hidden", "beta1", "loss", "validation_loss", "validation_loss_ema", "grad_norm")


def read_json(path: Path) -> Any:
    """The data of a JSON file; a `LabError` that names it if it is not valid JSON or has numbers like NaN."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number, parse_int=_small)
        if _is_nested(data, _DEEPEST + 1):
            raise ValueError(f"it is nested more than {_DEEPEST} levels deep")
        return data
    except (OSError, ValueError, RecursionError) as error:
        raise LabError(f"{str(path)!r} cannot be read as JSON ({error}).") from None


def _is_nested(value: Any, levels: int) -> bool:
    """Whether lists and mappings are nested so many levels deep."""
    level = [value]
    for _ in range(levels):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        level = [item for each in inner for item in each]
    return bool(level)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _small(text: str) -> int:
    if len(text) > 20:
        raise ValueError("it holds a number of more than 20 digits")
    return int(text)


def read_record(folder: Path) -> dict[str, Any]:
    """`lrlab/run.json` of a run; raises a `LabError` if it is missing or invalid."""
    file = folder / "lrlab" / "run.json"
    if not file.is_file():
        raise LabError(f"{str(folder)!r} holds no record of a run (lrlab/run.json). Give the folder of a run.")
    record = read_json(file)
    for section, fields in _SHAPE.items():
        part = record.get(section) if isinstance(record, dict) else None
        if not isinstance(part, dict):
            raise LabError(f"{str(file)!r} is not the record of a run: it has no section {section!r}.")
        for name, wanted in fields.items():
            if not isinstance(part.get(name), wanted):
                raise LabError(f"{str(file)!r} is not the record of a run: {section}.{name} is {part.get(name)!r}.")
    plugins = record["meta"].get("plugins", [])
    if not isinstance(plugins, list) or not all(_is_plugin(one) for one in plugins):
        raise LabError(f"{str(file)!r} is not the record of a run: meta.plugins is {plugins!r}.")
    names = record["run"].get("program_registrations", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise LabError(f"{str(file)!r} is not the record of a run: run.program_registrations is {names!r}.")
    if not isinstance(record["train"].get("results", {}), dict):
        raise LabError(f"{str(file)!r} is not the record of a run: its results are not a mapping.")
    return record


def _is_plugin(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("name", "sha256"))


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The rows of `lrlab/metrics.jsonl`, none without a log; raises a `LabError` for an invalid row."""
    file = folder / "lrlab" / "metrics.jsonl"
    if not file.is_file():
        return []
    rows = []
    for number, line in enumerate(lines_of(file), 1):
        try:
            row = json.loads(line, parse_constant=_no_number, parse_int=_small)
            good = isinstance(row["update"], int) and all(is_number(row[name]) for name in _COLUMNS if name in row)
        except (ValueError, KeyError, TypeError, RecursionError):
            good = False
        if not good:
            raise LabError(f"Line {number} of {str(file)!r} is not a row of a log.")
        rows.append(row)
    return rows


def lines_of(file: Path) -> Iterator[str]:
    """The lines of a log; raises a `LabError` for too many or too long lines."""
    with file.open(encoding="utf-8", errors="replace") as text:
        for number in itertools.count(1):
            if not (line := text.readline(_LONGEST_LINE + 1)):
                return
            if len(line) > _LONGEST_LINE or number > _MOST_LINES:
                most = f"{_MOST_LINES:,} lines of at most {_LONGEST_LINE:,} characters"
                raise LabError(f"{str(file)!r}, line {number}: the limit is {most}.")
            yield line


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def updates_done(folder: Path, record: dict[str, Any]) -> int:
    """Updates done by a run, from its record or its log."""
    done = record["train"].get("updates_done")
    if isinstance(done, int):
        return done
    if record["run"]["status"] == "finished":
        return record["train"]["num_updates"]
    return max((row["update"] + 1 for row in read_log(folder) if "loss" in row), default=0)
