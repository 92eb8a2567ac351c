"""One registry for everything that is chosen by name: a decorated function is the only place to touch.

Choices of the command line, error texts, documentation tables and parametrised tests all derive from the entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import LabError, did_you_mean


@dataclass(frozen=True)
class Parameter:
    """One keyword argument of a registered entry.

    Args:
        name (`str`): The keyword.
        kind (`type`): `int`, `float` or `str`; an `int` is accepted where a `float` is asked for, never the reverse.
        default: The value used when it is not given; `None` means "derived from the run", as `help` explains.
        help (`str`): What it does, with its unit.
        range (`str`, *optional*): Allowed values in interval notation, such as `"(0, 1]"` or `"[1, inf)"`.
        choices (`tuple`, *optional*): Allowed values, when there are only some.
    """

    name: str
    kind: type
    default: Any
    help: str
    range: str | None = None
    choices: tuple[Any, ...] | None = None

    @property
    def allowed(self) -> str:
        """The allowed values in words, for error texts and tables."""
        if self.choices is not None:
            return "one of " + ", ".join(map(repr, self.choices))
        return f"{self.kind.__name__} in {self.range}" if self.range else self.kind.__name__

    def check(self, value: Any, owner: str) -> Any:
        """Returns `value` as `kind`, or raises a `LabError` that names the range."""
        if value is None and self.default is None:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = isinstance(value, str) if self.kind is str else is_number
        if self.kind is int and isinstance(value, float):
            fits = value.is_integer()
        elif self.kind is float and isinstance(value, int):
            fits = fits and abs(value) < 2**53
        if not fits or not self._contains(value):
            raise LabError(f"{owner} got {self.name}={value!r}; allowed: {self.allowed}. ({self.help})")
        return self.kind(value)

    def _contains(self, value: Any) -> bool:
        if self.choices is not None:
            return value in self.choices
        if self.range is None:
            return not (isinstance(value, float) and math.isnan(value))
        low, high = (float(bound) for bound in self.range[1:-1].split(","))
        above = value > low if self.range[0] == "(" else value >= low
        below = value < high if self.range[-1] == ")" else value <= high
        return above and below


@dataclass(frozen=True)
class Entry:
    """What the lab knows about one registered name.

    Args:
        name (`str`): The name users type.
        factory (`Callable` or `str`): What is registered; its form is the registry's business.
        description (`str`): One line.
        source (`str`): The paper, equation or class it comes from.
        parameters (`tuple` of [`Parameter`]): The keyword arguments it takes.
        traits (`frozenset` of `str`): Properties the lab acts on, such as `"feedback"` or `"no_warmup"`.
    """

    name: str
    factory: Any
    description: str
    source: str
    parameters: tuple[Parameter, ...] = ()
    traits: frozenset[str] = frozenset()

    def resolve(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All keyword arguments with their values, checked: unknown ones and values out of range are errors."""
        known = {parameter.name: parameter for parameter in self.parameters}
        for key in kwargs:
            if key not in known:
                takes = f"it takes {', '.join(known)}" if known else "it takes no arguments"
                raise LabError(f"{self.name!r} does not take {key!r}: {takes}.{did_you_mean(key, known)}")
        return {
            name: parameter.check(kwargs.get(name, parameter.default), repr(self.name)) for name, parameter in known.items()
        }


class Registry(Mapping[str, Entry]):
    """Names to entries, in the order of registration.

    Args:
        kind (`str`): What is registered, in the words of an error text: "learning-rate schedule".
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def register(
        self,
        name: str,
        *,
        description: str,
        source: str,
        parameters: tuple[Parameter, ...] = (),
        traits: tuple[str, ...] = (),
    ) -> Callable[[Any], Any]:
        """A decorator that registers a function under `name`; a name can be taken only once."""

        def decorator(factory: Any) -> Any:
            if name in self._entries:
                raise LabError(f"The {self.kind} {name!r} is already registered; choose another name.")
            self._entries[name] = Entry(name, factory, description, source, parameters, frozenset(traits))
            return factory

        return decorator

    def __getitem__(self, name: str) -> Entry:
        # Not a KeyError: its text is shown quoted and escaped, and these texts are for people.
        if name not in self._entries:
            raise LabError(f"Unknown {self.kind} {name!r}.{did_you_mean(str(name), self)} Known: {', '.join(sorted(self))}.")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def table(self) -> str:
        """The entries as a markdown table: name, description, arguments, source."""
        rows = ["| name | what it does | arguments (default; allowed) | source |", "|---|---|---|---|"]
        for entry in self.values():
            arguments = "<br>".join(
                f"`{p.name}` ({'derived' if p.default is None else repr(p.default)}; {p.allowed}): {p.help}"
                for p in entry.parameters
            )
            rows.append(f"| `{entry.name}` | {entry.description} | {arguments or '–'} | {entry.source} |")
        return "\n".join(rows)
