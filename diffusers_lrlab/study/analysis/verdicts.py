"""Verdicts of tests on an arm compared with another, as objects from which all reports are written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...evaluation.metrics import word_for
from .statistics import LEVEL

Row = Mapping[str, Any]

DIFFERENCES = ("better", "worse", "higher", "lower", "faster", "slower")
NEVER = "never as good"
CANNOT_TELL = "cannot tell"
DIVERGED = "diverged"


@dataclass(frozen=True)
class Verdict:
    """The verdict on an arm compared with a reference, on one data set and by one metric."""

    arm: str
    reference: str  # the baseline or a control
    dataset: str
    metric: str  # or `SPEEDUP` of the specification
    difference: float | None  # mean over shared seeds, or the speed-up
    low: float | None  # of its 95 % interval
    high: float | None
    p: float | None  # adjusted; `None` if no test was possible
    word: str | None  # in `DIFFERENCES`, `NEVER`, `CANNOT_TELL` or `DIVERGED`; `None` if no test was possible
    sentence: str  # the verdict in numbers

    @property
    def is_difference(self) -> bool:
        """Whether the test shows a difference, or the arm never became as good."""
        return self.word == NEVER or self.word in DIFFERENCES


def word_of(row: Row) -> str | None:
    """The word for a row of `compare`: only what the adjusted test supports."""
    if row["mean"] is None and row.get("diverged"):
        return DIVERGED
    if row["p_adjusted"] is None or row["diff"] is None:
        return None
    return CANNOT_TELL if row["p_adjusted"] >= LEVEL else word_for(row["diff"], row["metric"])


def speed_word_of(row: Row) -> str | None:
    """The word for a row of `speedups`."""
    if row["n"] and row["censored"] == row["n"]:
        return NEVER
    if row["p_adjusted"] is None:
        return None
    if row["p_adjusted"] >= LEVEL:
        return CANNOT_TELL
    return "slower" if row["speedup"] < 1 else "faster"
