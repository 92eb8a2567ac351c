"""Parameters of registered entries: type, default, allowed values and help."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .annotations import REFUSED, described, reader
from .errors import must_be
from .ranges import Range
from .signatures import checked

_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


@checked
@dataclass(frozen=True)
class Parameter:
    """One keyword argument of a registered entry."""

    name: str
    kind: type  # int, float, bool, str or list; an int is accepted for a float, never the reverse
    default: Any  # None means "derived from the run", as `help` explains
    help: str  # with its unit
    range: str | None = None  # allowed values (of a list: of its items), such as "(0, 1]" or "[1, inf)"
    choices: tuple[Any, ...] | None = None
    items: type = float  # of a list
    same_as: str | None = None  # the common parameter that this is another name for
    only_with: tuple[str, Any] | None = None  # another parameter, and the value it must have for this one to have an effect
    is_added: bool = False  # left out of resolved parameters at its default, as in records that are older than it
    instead_of: str | None = None  # the parameter that it replaces, if it is given; else it is left out, too

    def __post_init__(self) -> None:
        _ = self.interval  # an error if `range` is not an interval

    @cached_property
    def interval(self) -> Range | None:
        """`range` as an interval of numbers."""
        return None if self.range is None else Range(self.range)

    @property
    def allowed(self) -> str:
        """The allowed values by their Python type, for tables."""
        if self.choices is not None:
            return "one of " + ", ".join(map(repr, self.choices))
        wanted = self.kind.__name__ if self.kind is not list else f"list of {self.items.__name__}"
        return f"{wanted} in {self.range}" if self.range else wanted

    @property
    def wanted(self) -> str:
        """The allowed values in words, for errors."""
        if self.choices is not None:
            return self.allowed
        words = f"a list of {_PLURALS[self.items]}" if self.kind is list else described(self.kind)
        return f"{words} in {self.range}" if self.range else words

    @property
    def shown_default(self) -> str:
        """The default, for tables."""
        if self.default is None:
            return "derived" if "derived" in self.help else "none"
        return repr(list(self.default) if isinstance(self.default, tuple) else self.default)

    def check(self, value: Any, owner: str) -> Any:
        """`value` as `kind`; a `LabError` that names `owner` and the range if it is not allowed."""
        if value is None and self.default is None:
            return None
        is_list = self.kind is list
        if is_list and not isinstance(value, (list, tuple)):
            read = [REFUSED]
        else:
            read = [self._read(item) for item in (value if is_list else [value])]
        if any(item is REFUSED for item in read):
            raise must_be(self.name, value, self.wanted, self.help, of=owner)
        return read if is_list else read[0]

    def _read(self, value: Any) -> Any:
        """A value, or an item of a list, as its type; `REFUSED` if it is not allowed."""
        wanted = self.items if self.kind is list else self.kind
        value = reader(wanted)(value)
        if value is REFUSED or (type(value) is int and abs(value) >= 2**53):  # no number of updates comes near it
            return REFUSED
        allowed = self.interval if self.choices is None else self.choices
        return wanted(value) if allowed is None or value in allowed else REFUSED
