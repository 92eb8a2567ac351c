"""The schema of `run.json`. A record is untrusted input, so everything that is read from one is checked here first."""

from __future__ import annotations

import functools
import json
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import LabError, shown
from ..core.signatures import REFUSED, described, reader
from .config import ResolvedConfig

_DEEPEST = 50  # levels of nesting
_AGAIN = "restore it from a copy, or pull it again"
_UNREADABLE = (OSError, ValueError, RecursionError)
_LARGEST = 10**15  # counts; exact as float, too


@dataclass(frozen=True)
class Value:
    """A kind of values: a description for errors, and a test."""

    text: str
    fits: Callable[[Any], bool]

    def __or__(self, other: Value) -> Value:
        return Value(f"{self.text} or {other.text}", lambda value: self.fits(value) or other.fits(value))


@dataclass(frozen=True)
class Fields:
    """
    A mapping with these fields, of which those with a "?" may be missing, and others, which have the schema `each`.
    """

    fields: dict[str, Any]
    each: Any = None


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


NONE = Value("null", lambda value: value is None)
TEXT = Value("a text", lambda value: isinstance(value, str) and "\0" not in value)
_COUNT = Value("a whole number from 0 on", lambda value: type(value) is int and 0 <= value < _LARGEST)
NUMBER = Value("a number", is_number)
_TEXTS = Value("a list of texts", lambda value: isinstance(value, list) and all(map(TEXT.fits, value)))
_ANY = Fields({})
_PARENT = Fields(
    {
        **{"folder": TEXT, "schedule": TEXT, "update": _COUNT, "num_updates": _COUNT},
        **{"git_commit?": TEXT | NONE, "version?": TEXT | NONE},
    }
)
_PLUGIN = Fields({"name": TEXT, "sha256": TEXT})
_RECORD = Fields(
    {
        "run": Fields(
            {
                **{"status": TEXT, "command": TEXT, "call?": TEXT | NONE, "program_registrations?": _TEXTS},
                **{"started?": TEXT, "starts?": _TEXTS, "seconds?": NUMBER, "ended?": TEXT | NONE, "error?": TEXT},
                **{"manifest?": TEXT, "trackers?": _ANY, "parent?": _PARENT},
            }
        ),
        "train": Fields(
            {
                **{"num_updates": _COUNT, "global_batch": _COUNT, "updates_done?": _COUNT, "warmup_updates?": _COUNT},
                **{"num_training_images?": _COUNT | NONE, "num_held_out_images?": _COUNT, "num_parameters?": _COUNT},
                **{"num_processes?": _COUNT, "class_names?": _TEXTS, "results?": _ANY, "warnings?": _ANY},
                "preflight?": _ANY,
                "started_from?": Fields({"name_or_path": TEXT, "commit?": TEXT | NONE, "sha256": TEXT}),
            }
        ),
        "config": Fields({"output_dir": TEXT, "lr_scheduler": TEXT}),
        "meta": Fields({"versions": Fields({}, each=TEXT), "git_commit?": TEXT | NONE, "plugins?": [_PLUGIN]}),
    }
)


def no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def read_json(path: Path) -> Any:
    """The data of a JSON file; a `LabError` that names it if it is not valid JSON or has numbers like NaN."""
    try:
        return _data_of(path)
    except _UNREADABLE as error:
        raise LabError(f"{str(path)!r} cannot be read as JSON ({error}).") from None


def _data_of(path: Path, parse_constant: Callable[[str], float] = no_number) -> Any:
    data = json.loads(path.read_text(encoding="utf-8"), parse_constant=parse_constant, parse_int=small)
    if _is_nested(data, _DEEPEST + 1):
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep")
    return data


def _is_nested(value: Any, levels: int) -> bool:
    """Whether lists and mappings are nested so many levels deep."""
    level = [value]
    for _ in range(levels):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        level = [item for each in inner for item in each]
    return bool(level)


def small(text: str) -> int:
    if len(text) > 20:
        raise ValueError("it holds a number of more than 20 digits")
    return int(text)


def read_checked(file: Path, remedy: str = _AGAIN, parse_constant: Callable[[str], float] = no_number) -> dict[str, Any]:
    """A record; a `LabError` that names the field if anything in it that is used has another type."""
    try:
        record = _data_of(file, parse_constant)
        problem = problem_in(record, _RECORD) or _problem_of_options(record["config"])
    except _UNREADABLE as error:
        problem = f"it cannot be read as JSON: {error}"
    if problem:
        raise LabError(f"{str(file)!r} is damaged ({problem}). Hint: {remedy}.")
    return typing.cast("dict[str, Any]", record)


def problem_in(value: Any, schema: Any, where: str = "") -> str:
    """The first difference of data from a schema, in words; an empty text if there is none."""
    if isinstance(schema, Value):
        return "" if schema.fits(value) else f"{where} must be {schema.text}, got {shown(value)}"
    if isinstance(schema, list):
        if not isinstance(value, list):
            return f"{where} must be a list, got {shown(value)}"
        return next(filter(None, (problem_in(each, schema[0], f"{where}[{n}]") for n, each in enumerate(value))), "")
    if not isinstance(value, dict):
        return f"{where or 'it'} must be a mapping, got {shown(value)}"
    inside = f"{where}." if where else ""
    for name, part in schema.fields.items():
        key = name.removesuffix("?")
        if key not in value and key == name:
            return f"it has no {f'section {key!r}' if not where else f'{inside}{key}'}"
        if key in value and (problem := problem_in(value[key], part, f"{inside}{key}")):
            return problem
    others = () if schema.each is None else value.keys() - schema.fields.keys()
    return next(filter(None, (problem_in(value[key], schema.each, f"{inside}{key}") for key in others)), "")


def _problem_of_options(config: dict[str, Any]) -> str:
    """The first option of another type than declared."""
    hints = _option_types()
    for name, value in config.items():
        if name in hints and value is not None and reader(hints[name])(value) is REFUSED:
            return f"config.{name} must be {described(hints[name])}, got {shown(value)}"
    return ""


@functools.cache
def _option_types() -> dict[str, Any]:
    return typing.get_type_hints(ResolvedConfig)
