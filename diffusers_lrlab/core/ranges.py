"""Intervals of numbers, in one notation for options, parameters, checks, help and errors."""

import re
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any

from .errors import LabError, must_be

_NOTATION = re.compile(r"[\[(]([^,]+),([^,]+)[\])]")


def _bound(text: str) -> int | float:
    """Exact for whole numbers: a float could not tell 2**63 - 1 from 2**63."""
    try:
        return int(text)
    except ValueError:
        return float(text)


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
        whole (`bool`, *optional*, defaults to `False`): Whether it contains whole numbers alone.
    """

    text: str
    whole: bool = False

    def __post_init__(self) -> None:
        try:
            is_range = self.bounds[0] <= self.bounds[1]
        except ValueError:
            is_range = False
        if not is_range:
            raise LabError(
                f"range={self.text!r}: must be an interval, got {self.text!r}. Hint: write '(0, 1]' or '[1, inf)'."
            )

    @cached_property
    def bounds(self) -> tuple[int | float, int | float]:
        """The lower and the upper one."""
        found = _NOTATION.fullmatch(self.text)
        if found is None:
            raise ValueError(self.text)
        return _bound(found[1]), _bound(found[2])

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
        """Raises a `LabError` if the value of a flag (`--name`) or of an argument is outside; `None` was not given."""
        if value is not None and value not in self:
            raise must_be(name, value, str(self), hint)


COUNT = Range("[1, 1e9]", whole=True)  # of updates or samples; more is a slip
POSITIVE = Range("(0, inf)")
SEED = Range(f"[0, {2**63 - 1}]", whole=True)
