"""Allowed values: intervals, in one notation for checks, help and errors, and parameters of registered entries."""

import re
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any

from .errors import must_be
from .signatures import REFUSED, checked, described, reader

_NUMBER = r"\s*(-?(?:inf|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))\s*"
_NOTATION = re.compile(rf"[\[(]{_NUMBER},{_NUMBER}[\])]")


@dataclass(frozen=True)
class Range:
    """
    An interval: a square bracket includes its bound, a round one does not.

    ```python
    >>> [value in Range("(0, 1]") for value in (0, 0.5, 1, float("nan"), "1")]
    [False, True, True, False, False]
    >>> print(Range("[1, inf)", whole=True))
    a whole number in [1, inf)

    ```

    Args:
        text (`str`): The interval as it is shown, such as `"(0, 1]"` or `"[1, inf)"`.
        whole (`bool`, *optional*, defaults to `False`): Whether it contains whole numbers only.
    """

    text: str
    whole: bool = False

    def __post_init__(self) -> None:
        if not _NOTATION.fullmatch(self.text) or self.bounds[0] > self.bounds[1]:
            raise must_be("range", self.text, "an interval", "write '(0, 1]' or '[1, inf)'")

    @cached_property
    def bounds(self) -> list[int | float]:
        """The lower and the upper bound; whole numbers stay exact, since 2**63 - 1 is not a float."""
        return [int(text) if text.lstrip("-").isdecimal() else float(text) for text in _NOTATION.findall(self.text)[0]]

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            return False
        low, high = self.bounds
        number: Any = value
        above = number >= low if self.text[0] == "[" else number > low
        return bool(above and (number <= high if self.text[-1] == "]" else number < high))

    def __str__(self) -> str:
        return f"a {'whole ' * self.whole}number in {self.text}"

    def check(self, name: str, value: Any, hint: str) -> None:
        """Raises a `LabError` if the value of a flag (`--name`) or an argument is outside; `None` stands for not given."""
        if value is not None and value not in self:
            raise must_be(name, value, str(self), hint)


COUNT = Range("[1, 1e9]", whole=True)  # of updates or samples; larger numbers are mistakes
POSITIVE = Range("(0, inf)")
SEED = Range(f"[0, {2**63 - 1}]", whole=True)

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
