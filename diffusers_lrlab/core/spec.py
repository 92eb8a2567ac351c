"""Spec strings: `NAME`, `NAME:key=value,key=value` or `NAME:{JSON}`, wherever something is chosen by name."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import LabError, cut, must_be, shown
from .registry import Entry, Registry

_FORM = 'expected NAME, NAME:key=value,key=value or NAME:{"key": value}; a list is written [a|b]'


def _fail(text: str, position: int, problem: str) -> LabError:
    start = max(0, position - 100)
    part = text[start : position + 100]
    return LabError(f"Cannot read the spec string: {cut(problem)}; {_FORM}.\n  {part}\n  {' ' * (position - start)}^")


def _value(text: str) -> Any:
    """A JSON scalar or list where it is one (`5`, `0.1`, `true`, `[1, 2]`), `[a|b]` as a list, else the bare word."""
    try:
        return json.loads(text)
    except ValueError:
        if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text, re.IGNORECASE):
            return float(text)  # .5, 1. and +1, which JSON does not have
        if not text.startswith("["):
            return text
        return [_value(item.strip()) for _, item in _split(text[1:-1], 0, "|")]


def _split(text: str, start: int, separator: str) -> Iterator[tuple[int, str]]:
    """The parts between separators outside of brackets, each with its position."""
    begin = start
    opened: list[int] = []
    for position in range(start, len(text)):
        character = text[position]
        if character == "[":
            opened.append(position)
        elif character == "]":
            if not opened:
                raise _fail(text, position, "this bracket was never opened")
            opened.pop()
            after = ("", ",", "]", "|") if opened or separator == "|" else ("", ",", "]")
            if text[position + 1 : position + 2] not in after:
                raise _fail(text, position + 1, "a comma is missing after the bracket")
        elif character == separator and not opened:
            yield begin, text[begin:position]
            begin = position + 1
    if opened:
        raise _fail(text, opened[0], "this bracket is never closed")
    yield begin, text[begin:]


def parse_spec(text: str) -> tuple[str, dict[str, Any]]:
    """`"step:step_size=100,gamma=0.5"` -> `("step", {"step_size": 100, "gamma": 0.5})`.

    A list is written as JSON or as `[a|b]`, whose items may be spec strings:
    `"join:schedules=[constant|rex:d=0.9],boundaries=[0.5]"`.

    The error for a malformed string points at the character.
    """
    name, colon, rest = text.partition(":")
    if not re.fullmatch(r"\w+", name):
        end = re.match(r"\w*", name).end()  # type: ignore[union-attr]  # it always matches
        raise _fail(text, end, "the name ends at an unexpected character" if name else "there is no name")
    if not colon:
        return name, {}
    if rest.lstrip().startswith("{"):
        return name, parse_json_kwargs(rest, f"the arguments of {name!r}")
    kwargs: dict[str, Any] = {}
    for position, part in _split(text, len(name) + 1, ","):
        key, equals, value = part.partition("=")
        if not re.fullmatch(r"\w+", key) or not equals:
            raise _fail(text, position + len(key) * bool(key), "key=value is missing here")
        if not value:
            raise _fail(text, position + len(part), f"{key!r} has no value")
        if key in kwargs:
            raise _fail(text, position, f"{key!r} is given twice")
        try:
            kwargs[key] = _value(value)
        except RecursionError as error:  # here, since the text of an error needs some calls, too
            raise LabError(f"The value {shown(value)} cannot be read: {error}.") from None
    return name, kwargs


def format_spec(name: str, kwargs: Mapping[str, Any]) -> str:
    """The spec string that [`parse_spec`] reads back, without parameters that are `None`."""
    given = {key: value for key, value in kwargs.items() if value is not None}
    plain = (isinstance(value, (bool, int, float)) or _is_word(value) for value in given.values())
    if not all(plain):
        return f"{name}:{json.dumps(given)}"
    texts = (f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in given.items())
    return name + ":" * bool(given) + ",".join(texts)


def shown_spec(name: str, kwargs: Mapping[str, Any]) -> str:
    """The spec string for readers: empty lists, which are defaults, are left out, so that it rarely needs JSON."""
    return format_spec(name, {key: value for key, value in kwargs.items() if value != []})


def _is_word(value: Any) -> bool:
    """Whether [`parse_spec`] reads a bare word back as this text."""
    return isinstance(value, str) and re.fullmatch(r"[\w-]*[a-z_][\w-]*", value) is not None and _value(value) == value


def parse_json_kwargs(text: str, what: str) -> dict[str, Any]:
    """A JSON object as a dictionary; `what` names it in errors."""

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"{max(found, key=keys.count)!r} is given twice")
        return found

    try:
        kwargs = json.loads(text, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise LabError(
            f"{what} {shown(text)}: is not valid JSON ({error}). "
            """Hint: write an object in double quotes, such as '{"gamma": 0.5}'."""
        ) from None
    if not isinstance(kwargs, dict):
        raise must_be(what, text, "a JSON object", """such as '{"gamma": 0.5}'""")
    return kwargs


@dataclass(frozen=True)
class Choice:
    """An entry of a registry with parameters: those that were given, and all of them with their values."""

    entry: Entry
    given: dict[str, Any]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return self.entry.name


def choose(spec: str, kwargs: Mapping[str, Any] | None, registry: Registry) -> Choice:
    """The choice that a spec string and further parameters make, checked. A parameter in both is an error."""
    name, from_spec = parse_spec(spec)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise must_be("kwargs", kwargs, "a dictionary", "such as {'gamma': 0.5}", of=repr(name))
    given = dict(kwargs or {})
    for key in from_spec.keys() & given.keys():
        raise LabError(f"{key!r} is given twice: in the spec string {spec!r} and as {key}={given[key]!r}. Drop one.")
    given |= from_spec
    entry = registry[name]
    return Choice(entry, given, entry.resolve(given))
