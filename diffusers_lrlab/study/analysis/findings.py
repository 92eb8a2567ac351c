"""Verdicts on arms, which claim no more than the adjusted tests support."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...evaluation.metrics import word_for
from ..spec.spec import SPEEDUP
from .statistics import LEVEL

Row = Mapping[str, Any]

DIFFERENCES = ("better", "worse", "higher", "lower", "faster", "slower")
NEVER = "never as good"
CANNOT_TELL = "cannot tell"
DIVERGED = "diverged"
NONE = "–"


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


def findings(rows: Iterable[Row], reference: str) -> list[Verdict]:
    """
    The verdict on each arm on each data set, from the rows of `compare` (with the optional key "diverged") or `speedups`.

    "Better" and "worse" ("higher" and "lower" if neither direction is better), "faster" and "slower" appear exactly where
    the adjusted p is below 0.05.
    """
    found = []
    for row in rows:
        metric, word, names = row.get("metric"), word_of, ("diff", "diff_low", "diff_high")
        if metric is None:
            metric, word, names = SPEEDUP, speed_word_of, ("speedup", "ci_low", "ci_high")
        if row["arm"] != reference:
            difference, low, high = (row[name] for name in names)
            of = row["arm"], reference, row["dataset"], metric
            found.append(Verdict(*of, difference, low, high, row["p_adjusted"], word(row)))
    return found


def percent(value: float) -> str:
    """A share in percent, to two digits."""
    width = 100 * abs(value)
    decimals = min(max(1 - math.floor(math.log10(width)), 0), 6) if width > 0 else 0
    rounded = round(100 * value, decimals) + 0.0  # no minus before a 0
    return f"{rounded:.{decimals}f} %".replace("-", "−")


def probability(p: float | None) -> str:
    """A p-value; one below the level of the tests is never rounded up to it."""
    if p is None:
        return NONE
    text = f"{p:.3f}"
    if p < LEVEL <= float(text):
        return f"< {LEVEL:g}"
    return "< 0.001" if p < 0.001 else text
