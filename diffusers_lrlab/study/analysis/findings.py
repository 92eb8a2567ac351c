"""Verdicts on arms, with sentences that claim no more than the adjusted tests support."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...core.words import counted
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


def findings(rows: Iterable[Row], metric: str, baseline: str, label: str | None = None) -> list[Verdict]:
    """
    The verdict on each arm on each data set.

    "Better" and "worse" ("higher" and "lower" if neither direction is better) appear exactly where the adjusted p is below
    0.05. `rows` are those of `compare`, with the optional key "diverged"; rows of other metrics are ignored. `label` is
    shown in place of the metric's name.
    """
    pairs = _with_references(baseline, (row for row in rows if row["metric"] == metric))
    found = []
    for row, reference in pairs:
        sentence = _sentence(row, reference, baseline, label or metric) + _diverged(row) + _diverged(reference)
        figures = row["diff"], row["diff_low"], row["diff_high"], row["p_adjusted"]
        found.append(Verdict(row["arm"], baseline, row["dataset"], metric, *figures, word_of(row), sentence))
    return found


def speedup_findings(rows: Iterable[Row], baseline: str, quality: str = "quality", common: bool = False) -> list[Verdict]:
    """
    The verdict on each arm on each data set, from the rows of `speedups`.

    "Faster" and "slower" appear exactly where the adjusted p is below 0.05. Where no run of an arm reached the target, the
    sentence only states that. `common` is that of `speedups`.
    """
    target = f"the {quality} that both reach" if common else f"its final {quality}"
    pairs = _with_references(baseline, rows)
    found = []
    for row, reference in pairs:
        sentence = _speedup_sentence(row, baseline, quality, target) + _diverged(reference)
        figures = row["speedup"], row["ci_low"], row["ci_high"], row["p_adjusted"]
        found.append(Verdict(row["arm"], baseline, row["dataset"], SPEEDUP, *figures, speed_word_of(row), sentence))
    return found


def _with_references(baseline: str, rows: Iterable[Row]) -> list[tuple[Row, Row]]:
    """The row of each arm but the baseline, with the baseline's on the same data set, or an empty one."""
    rows = list(rows)
    references = {row["dataset"]: row for row in rows if row["arm"] == baseline}
    return [(row, references.get(row["dataset"], {})) for row in rows if row["arm"] != baseline]


def _sentence(row: Row, reference: Row, baseline: str, label: str) -> str:
    arm, dataset, pairs, diff = row["arm"], row["dataset"], row["pairs"], row["diff"]
    for name, of_arm in ((arm, row), (baseline, reference)):
        if not of_arm.get("n"):
            return f"{name} has no {label} on {dataset}, so {arm} cannot be compared with {baseline} there."
    if not pairs:
        return f"{arm} and {baseline} share no seed on {dataset}, so they cannot be compared there."
    if row["p"] is None:
        return f"{arm} and {baseline} share only one seed on {dataset} (difference {signed(diff)}): a test needs two."
    if diff == 0 and row["diff_low"] is None:
        every = "both seeds" if pairs == 2 else f"all {counted(pairs, 'seed')}"
        return f"{arm} and {baseline} have the same {label} on {dataset} with {every}."
    interval = "the same each time"
    if row["diff_low"] is not None:
        interval = f"95 % interval {signed(row['diff_low'])} to {signed(row['diff_high'])}"
    figures = f"{signed(diff)}, {interval}, adjusted {p_value(row['p_adjusted'])}"
    word = word_of(row)
    if word == CANNOT_TELL:
        seeds = counted(pairs, "seed")
        return (
            f"{arm} does not differ significantly from {baseline} on {dataset} (difference {figures}, {seeds}){_hint(row)}."
        )
    # Means over all seeds may disagree with differences over shared ones, so the sentence names the latter.
    shared = "" if pairs == row["n"] == reference["n"] else " over shared seeds"
    return (
        f"{arm} is {word} than {baseline} on {dataset} in {label}: {number(row['mean'])} instead "
        f"of {number(reference['mean'])} (difference{shared} {figures}, {counted(pairs, 'seed')})."
    )


def _hint(row: Row) -> str:
    needed = {int(percent): seeds for percent, seeds in row["seeds_needed"].items() if seeds}
    seen = [percent for percent, seeds in needed.items() if seeds <= row["pairs"]]
    unseen = [percent for percent, seeds in needed.items() if seeds > row["pairs"]]
    hint = f"; a difference of {min(seen)} % would probably have been seen in a single test" if seen else ""
    if unseen:
        seeds, what = counted(needed[max(unseen)], "seed"), "one" if seen else "a difference"
        hint += f"{',' if seen else ';'} about {seeds} would show {what} of {max(unseen)} %"
    return hint


def _speedup_sentence(row: Row, baseline: str, quality: str, target: str) -> str:
    arm, dataset, n, censored = row["arm"], row["dataset"], row["n"], row["censored"]
    if not n:
        return f"{arm} and {baseline} have no runs on {dataset} that could be compared by the updates they need."
    word = speed_word_of(row)
    if word == NEVER:
        return f"{arm} never reached the final {quality} of {baseline} on {dataset}, in {counted(n, 'run')}."
    figures = f"{'at most ' if censored else ''}{number(row['speedup'])} times as fast"
    if row["p_adjusted"] is None:
        return f"{arm} and {baseline} share only one seed on {dataset} ({figures}): a test needs two."
    if row["ci_low"] is not None:
        figures += f", 95 % interval {number(row['ci_low'])} to {number(row['ci_high'])}"
    figures += f", adjusted {p_value(row['p_adjusted'])}, {counted(n, 'seed')}"
    text = f"than {baseline} to {target} on {dataset} ({figures})."
    if word == CANNOT_TELL:
        text = f"{arm} is not significantly faster or slower {text}"
    else:
        text = f"{arm} is {word} {text}"
        if row["speedup"] >= 1 and row.get("ends_worse"):
            text += f" It ends worse with {row['ends_worse']} of them."
    if not censored:
        return text
    diverged = min(row.get("diverged") or 0, censored)
    because = f", {diverged} of them because they diverged" if diverged else ""
    return f"{text} {censored} of {counted(n, 'run')} of {arm} never got there{because}."


def _diverged(row: Row) -> str:
    """A sentence on runs that diverged, which the numbers omit; empty if none did."""
    diverged = row.get("diverged")
    return f" {diverged} of {counted(diverged + row['n'], 'run')} of {row['arm']} diverged." if diverged else ""


# --- numbers as text -------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    return f"{value:.3g}"


def signed(value: float) -> str:
    return f"{value:+.3g}" if value else "0"


def p_value(p: float) -> str:
    """A p-value as text, such as "p = 0.003"; a value below 0.05 is never rounded up to 0.05."""
    if p < 0.0001:
        return "p < 0.0001"
    texts = (f"{p:.{digits}g}" for digits in range(2, 18))
    return "p = " + next(text for text in texts if (p < LEVEL) == (float(text) < LEVEL))


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
