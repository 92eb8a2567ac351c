"""Intervals of numbers, in one notation for options, parameters, checks, help and errors."""

import re
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any

from .errors import must_be

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
