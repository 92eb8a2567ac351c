"""The schema of `run.json`. A record is untrusted input, so everything that is read from one is checked here first."""

import json
import math
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import LabError, shown
from ..core.values import REFUSED, in_words, read_as
from .config import ResolvedConfig

_AGAIN = "restore it from a copy, or pull it again"
_UNREADABLE = (OSError, ValueError, RecursionError)

# The types of the fields that are read, by path; those with a "?" may be missing.
_RECORD: dict[str, Any] = {
    **dict.fromkeys(("run.status", "run.command"), str),
    **dict.fromkeys(("run.started?", "run.error?"), str),
    **dict.fromkeys(("run.call?", "run.ended?"), str | None),
    **{"run.starts?": list[str], "run.seconds?": float, "run.parent?": dict},
    **dict.fromkeys(("run.parent?.folder", "run.parent?.schedule"), str),
    **dict.fromkeys(("run.parent?.update", "run.parent?.num_updates"), int),
    **dict.fromkeys(("run.parent?.git_commit?", "run.parent?.version?"), str | None),
    **dict.fromkeys(("train.num_updates", "train.global_batch", "train.updates_done?", "train.warmup_updates?"), int),
    **dict.fromkeys(("train.num_held_out_images?", "train.num_parameters?", "train.num_processes?"), int),
    "train.num_training_images?": int | None,
    **{"train.class_names?": list[str], "train.results?": dict, "train.warnings?": dict, "train.preflight?": dict},
    **dict.fromkeys(("train.started_from?.name_or_path", "train.started_from?.sha256"), str),
    "train.started_from?.commit?": str | None,
    **dict.fromkeys(("config.output_dir", "config.lr_scheduler"), str),
    **{"meta.versions": dict[str, str], "meta.git_commit?": str | None, "meta.plugins?": list[dict[str, str]]},
}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def read_json(path: Path, remedy: str = _AGAIN, parse_constant: Callable[[str], float] = no_number) -> Any:
    """The data of a JSON file; a `LabError` that names it if it is not valid JSON or has numbers like NaN."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=parse_constant, parse_int=small)
    except _UNREADABLE as error:
        raise LabError(f"{str(path)!r} is damaged (it cannot be read as JSON: {error}). Hint: {remedy}.") from None


def small(text: str) -> int:
    if len(text) > 20:
        raise ValueError("it holds a number of more than 20 digits")
    return int(text)


def read_checked(file: Path, remedy: str = _AGAIN, parse_constant: Callable[[str], float] = no_number) -> dict[str, Any]:
    """A record; a `LabError` that names the field if anything in it that is used has another type."""
    record = read_json(file, remedy, parse_constant)
    options = {f"config.{name}?": hint | None for name, hint in typing.get_type_hints(ResolvedConfig).items()}
    if problem := problem_in(record, {**_RECORD, **options}):
        raise LabError(f"{str(file)!r} is damaged ({problem}). Hint: {remedy}.")
    return typing.cast("dict[str, Any]", record)


def problem_in(data: Any, fields: Mapping[str, Any]) -> str:
    """The first difference of data from the types of its fields, in words; an empty text if there is none."""
    for path, hint in fields.items():
        value, seen = data, "it"
        for name in path.split("."):
            if not isinstance(value, dict):
                return f"{seen} must be a mapping, got {shown(value)}"
            key = name.removesuffix("?")
            if key not in value:
                if name != key:
                    break
                return f"{seen} has no {key!r}"
            value, seen = value[key], key if seen == "it" else f"{seen}.{key}"
        else:
            is_fit = is_number(value) if hint is float else read_as(value, hint) is not REFUSED
            if not is_fit or (isinstance(value, str) and "\0" in value):
                return f"{seen} must be {in_words(hint)}, got {shown(value)}"
    return ""
