"""Sentences about arms, which say no more than the adjusted tests do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .statistics import LEVEL, word_for

Row = Mapping[str, Any]
SPEEDUP = "speedup"  # what sentences about it are kept under, beside those of metrics


def findings(rows: Iterable[Row], metric: str, baseline: str, label: str | None = None) -> list[str]:
    """
    One sentence, or two, for each arm on each data set.

    "Better" and "worse" ("higher" and "lower" where that is no merit) appear exactly where the adjusted p is below 0.05, in
    the metric's own direction. Everything else "cannot be told".

    Args:
        rows (`list[dict]`): Of `compare`, perhaps with the key "diverged"; those of other metrics are passed over.
        metric (`str`): Which one to tell of.
        baseline (`str`): The arm that the others are compared with.
        label (`str`, *optional*): What to call the metric, if not by its name.

    Returns:
        `list[str]`: in the order of the rows.
    """
    chosen = [row for row in rows if row["metric"] == metric]
    references = {row["dataset"]: row for row in chosen if row["arm"] == baseline}
    return [
        _sentence(row, references.get(row["dataset"], {}), baseline, label or metric)
        + _diverged(row)
        + _diverged(references.get(row["dataset"], {}))
        for row in chosen
        if row["arm"] != baseline
    ]


def speedup_findings(rows: Iterable[Row], baseline: str, quality: str = "quality", common: bool = False) -> list[str]:
    """
    One sentence, or two, for each arm on each data set, from the rows of `speedups`.

    "Faster" and "slower" appear exactly where the adjusted p is below 0.05. Where no run of an arm reached the target,
    that is all that is said. `common` is that of `speedups`.
    """
    rows = list(rows)
    target = f"the {quality} that both reach" if common else f"its final {quality}"
    references = {row["dataset"]: row for row in rows if row["arm"] == baseline}
    return [
        _speedup_sentence(row, baseline, quality, target) + _diverged(references.get(row["dataset"], {}))
        for row in rows
        if row["arm"] != baseline
    ]


def _sentence(row: Row, reference: Row, baseline: str, label: str) -> str:
    arm, dataset, pairs = row["arm"], row["dataset"], row["pairs"]
    for name, of_arm in ((arm, row), (baseline, reference)):
        if not of_arm.get("n"):
            return f"{name} has no {label} on {dataset}, so {arm} cannot be compared with {baseline} there."
    if not pairs:
        return f"{arm} and {baseline} share no seed on {dataset}, so they cannot be compared there."
    diff = row["diff"]
    if row["p"] is None:
        return (
            f"Whether {arm} differs from {baseline} on {dataset} cannot be told from {_seeds(pairs)} (difference "
            f"{signed(diff)}); a test takes two seeds at least."
        )
    if diff == 0 and row["diff_low"] is None:
        return f"{arm} and {baseline} have the same {label} on {dataset} with {_every(pairs)}."
    interval = "the same each time"
    if row["diff_low"] is not None:
        interval = f"95 % interval {_range(row, 'diff_low', 'diff_high')}"
    if row["p_adjusted"] < LEVEL:
        word = word_for(diff, row["metric"])
        return (
            f"{arm} is {word} than {baseline} on {dataset} in {label}: {number(row['mean'])} instead of "
            f"{number(reference['mean'])} ({_difference_of(row, reference)} {signed(diff)}, {interval}, adjusted "
            f"{p_value(row['p_adjusted'])}, {_seeds(pairs)})."
        )
    return (
        f"Whether {arm} differs from {baseline} on {dataset} cannot be told from {_seeds(pairs)} (difference "
        f"{signed(diff)}, {interval}, adjusted {p_value(row['p_adjusted'])}){_hint(row)}."
    )


def _hint(row: Row) -> str:
    """The smallest difference that these seeds would have shown, and how many the next smaller one takes."""
    needed = {int(percent): seeds for percent, seeds in row["seeds_needed"].items() if seeds}
    seen = [percent for percent, seeds in needed.items() if seeds <= row["pairs"]]
    unseen = [percent for percent, seeds in needed.items() if seeds > row["pairs"]]
    hints = []
    if seen:
        hints.append(f"one of {min(seen)} % would probably have been seen in a single test")
    if unseen:
        hints.append(f"about {_seeds(needed[max(unseen)])} would show one of {max(unseen)} %")
    return f"; {', '.join(hints)}" if hints else ""


def _speedup_sentence(row: Row, baseline: str, quality: str, target: str) -> str:
    arm, dataset, n, censored = row["arm"], row["dataset"], row["n"], row["censored"]
    if not n:
        return f"{arm} and {baseline} have no runs on {dataset} that could be compared by the updates they need."
    if censored == n:
        return f"{arm} never reached the final {quality} of {baseline} on {dataset}, in {_runs(n)}."
    figures = f"{'at most ' if censored else ''}{number(row['speedup'])} times as fast"
    if row["ci_low"] is not None:
        figures += f", 95 % interval {_range(row, 'ci_low', 'ci_high', form=number)}"
    if row["p_adjusted"] is not None:
        figures += f", adjusted {p_value(row['p_adjusted'])}"
    significant = row["p_adjusted"] is not None and row["p_adjusted"] < LEVEL
    word = "slower" if significant and row["speedup"] < 1 else "faster"
    claim = f"{arm} is {word} than {baseline} to {target} on {dataset}"
    if significant:
        text = f"{claim} ({figures}, {_seeds(n)})."
        if word == "faster" and row.get("ends_worse"):
            text += f" It ends worse with {row['ends_worse']} of them."
    else:
        text = f"Whether {claim} cannot be told from {_seeds(n)} ({figures})."
    untold = f" {censored} of {_runs(n)} of {arm} never got there"
    diverged = min(row.get("diverged") or 0, censored)
    untold += f", {diverged} of them because they diverged" if diverged else ""
    return text + (f"{untold}." if censored else "")


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}"


def signed(value: float) -> str:
    """Three significant digits, with the sign."""
    return f"{value:+.3g}" if value else "0"


def p_value(p: float) -> str:
    """Such as "p = 0.003", which never reads 0.05 for what is below."""
    if p < 0.0001:
        return "p < 0.0001"
    texts = (f"{p:.{digits}g}" for digits in range(2, 18))
    return "p = " + next(text for text in texts if (p < LEVEL) == (float(text) < LEVEL))


def _range(row: Row, low: str, high: str, form: Any = signed) -> str:
    return f"{form(row[low])} to {form(row[high])}"


def _difference_of(row: Row, reference: Row) -> str:
    """Means over all seeds and differences over shared ones may disagree: then the words say which is which."""
    return "difference" if row["pairs"] == row["n"] == reference["n"] else "difference over shared seeds"


def _seeds(count: int) -> str:
    return f"{count:,} seed" if count == 1 else f"{count:,} seeds"


def _runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"


def _every(count: int) -> str:
    return "both seeds" if count == 2 else f"all {count} seeds"


def _diverged(row: Row) -> str:
    """How many runs are in none of the figures, an empty string for none."""
    diverged = row.get("diverged")
    return f" {diverged} of {_runs(diverged + row['n'])} of {row['arm']} diverged." if diverged else ""
