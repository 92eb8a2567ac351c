"""The tables of a report: from the rows of a summary and the records of runs, as text for the page and Markdown."""

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ...core.words import markdown_table
from ...evaluation.metrics import better_of, metric_label
from ..analysis.statistics import LEVEL, PERCENTS
from ..analysis.summary import DIFFERENCES, DIVERGED, Verdict, word_of
from ..results import RunResult

Row = dict[str, Any]  # of a summary
NONE = "–"


class Table(NamedTuple):
    """A table of formatted text."""

    name: str  # of its link
    title: str
    frame: pd.DataFrame  # of strings
    note: str = ""  # below the table
    num_labels: int = 1  # leading columns that hold names, not numbers


def is_strong(text: str) -> bool:
    """Whether a cell is emphasised: a difference that a test shows, and a choice."""
    return text in (*DIFFERENCES, DIVERGED) or text.startswith("chosen")


def rows_of(summary: dict[str, Any], metric: str) -> list[Row]:
    """The rows of a metric, by data set and arm in the order of the study."""
    arms, datasets = list(summary["study"]["arms"]), summary["study"]["datasets"]
    rows = [row for row in summary["rows"] if row["metric"] == metric]
    return sorted(rows, key=lambda row: (datasets.index(row["dataset"]), arms.index(row["arm"])))


def summary_table(summary: dict[str, Any], metric: str) -> Table:
    baseline = summary["study"]["baseline"]
    cells = [
        {
            "data set": row["dataset"],
            "arm": row["arm"],
            "verdict": "baseline" if row["arm"] == baseline else word_of(row) or NONE,
            "runs": f"{row['n']}" + (f" + {row['diverged']} diverged" if row.get("diverged") else ""),
            "mean ± std": plus_minus(row["mean"], row["std"]),
            "95 % interval": interval(row["ci_low"], row["ci_high"]),
            "difference": number(row["diff"]),
            "its 95 % interval": interval(row["diff_low"], row["diff_high"]),
            "adjusted p": probability(row["p_adjusted"]),
            "effect size": number(row["effect_size"]),
            f"seeds to see {' / '.join(map(str, PERCENTS))} %": _seeds_needed(row),
            "held-out data": number(row["floor"]),
        }
        for row in rows_of(summary, metric)
    ]
    better = {"neither": "", "larger": "Larger is better. ", "smaller": "Smaller is better. "}[better_of(metric)]
    note = (
        f"{better}Differences are from {baseline}, paired by seed. p is adjusted by Holm's method over all arms and data "
        f"sets of this metric; verdicts name a difference where it is below {LEVEL:g}. Effect size: the mean of the paired "
        "differences over their standard deviation, with Hedges' correction for few seeds."
    )
    frame = pd.DataFrame(cells)
    has_numbers = frame.ne(NONE).any() | frame.empty
    has_numbers.iloc[:3] = True
    return Table(f"summary_{metric}", metric_label(metric), frame.loc[:, has_numbers], note, 3)


def _seeds_needed(row: Row) -> str:
    needed = [row["seeds_needed"][str(percent)] for percent in PERCENTS]
    return " / ".join(f"{num:,}" if num else NONE for num in needed) if any(needed) else NONE


def findings_table(verdicts: Iterable[Verdict]) -> Table:
    cells = [
        {
            "metric": metric_label(verdict.metric), "arm": verdict.arm,
            "compared with": verdict.reference, "data set": verdict.dataset, "verdict": verdict.word or NONE,
            "difference": number(verdict.difference), "its 95 % interval": interval(verdict.low, verdict.high),
            "adjusted p": probability(verdict.p),
        }
        for verdict in sorted(verdicts, key=lambda verdict: not verdict.is_difference)
    ]  # fmt: skip
    note = (
        "p is adjusted by Holm's method over all comparisons of a metric with the baseline, and separately over those with "
        "controls."
    )
    return Table("findings", "All findings in numbers", pd.DataFrame(cells), note, 5)


def tuning_table(rows: list[Row]) -> Table:
    """Learning rates that were tried for each arm, and the ones chosen."""
    cells = [
        {
            "data set": row["dataset"], "arm": row["arm"],
            "choice": ("chosen" + ", at the edge of those tried" * row["at_edge"]) * row["chosen"],
            "learning rate": f"{row['learning_rate']:g}", "score": number(row["score"]),
        }
        for row in rows
    ]  # fmt: skip
    note = "Chosen by seeds that the comparison does not use. At the edge, a rate beyond those tried may be better."
    return Table("tuning", "The learning rate of each arm", pd.DataFrame(cells), note, 3)


def divergence_table(diverged: list[RunResult]) -> Table:
    cells = []
    for result in diverged:
        train = result.record["train"]
        cells.append({
            "data set": result.dataset, "arm": result.arm,
            "stage": "tuning" if result.stage == "tune" else "comparison",
            "error": result.record["run"]["error"] or "", "seed": f"{result.seed}",
            "learning rate": number(result.learning_rate),
            "after updates": f"{train['updates_done']:,} of {train['num_updates']:,}",
        })  # fmt: skip
    return Table("divergences", "Runs that diverged", pd.DataFrame(cells), num_labels=4)


def cost_table(study: dict[str, Any], results: list[RunResult]) -> Table:
    """Runs and seconds of each arm, with those of tuning and of diverged runs, and the total in hours."""
    parts = ("training", "sampling", "evaluation")
    costs = []
    for arm in study["arms"]:
        trains = [result.record["train"] for result in results if result.arm == arm]
        costs.append([len(trains), *(sum(train[f"{part}_seconds"] for train in trains) for part in parts)])
    named = [*zip(study["arms"], costs, strict=True), ("all", np.sum(costs, axis=0))]
    cells = []
    for name, (runs, *seconds) in named:
        times = {f"{part}, s": f"{value:,.1f}" for part, value in zip(parts, seconds, strict=True)}
        cells.append({"arm": name, "runs": f"{runs:,.0f}", **times, "hours": f"{sum(seconds) / 3600:,.2f}"})
    note = "Tuning runs and diverged runs are included. Work done once for a whole stack is shared equally among its runs."
    return Table("cost", "Cost", pd.DataFrame(cells), note)


# --- numbers and tables as text --------------------------------------------------------------------------------------


def number(value: float | None, spec: str = ".4g") -> str:
    return NONE if value is None or not math.isfinite(value) else f"{value:{spec}}".replace("-", "−")


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


def interval(low: float | None, high: float | None) -> str:
    """Both ends of an interval, to two digits of its width where that is readable."""
    if low is None or high is None:
        return NONE
    spec = _two_digits_of(high - low, max(abs(low), abs(high))) or ".4g"
    return f"{number(low, spec)} to {number(high, spec)}"


def plus_minus(mean: float | None, std: float | None) -> str:
    """A mean with its standard deviation, to two digits of the latter where that is readable."""
    if mean is None or not math.isfinite(mean) or not std or not math.isfinite(std):
        return number(mean)
    spec = _two_digits_of(std, abs(mean))
    return f"{number(mean, spec or '.4g')} ± {number(std, spec or '.2g')}"


def _two_digits_of(width: float, value: float) -> str | None:
    """The format that shows two digits of `width`; `None` if that takes over 6 decimals, or the value is large."""
    if not (math.isfinite(value) and math.isfinite(width) and width > 0) or value >= 1e6:
        return None
    decimals = max(1 - math.floor(math.log10(width)), 0)
    return f".{decimals}f" if decimals <= 6 else None


def to_markdown(table: Table) -> str:
    """A GitHub table with its note."""
    cells = table.frame.map(lambda text: f"**{markdown_text(text)}**" if is_strong(text) else markdown_text(text))
    text = markdown_table([*map(markdown_text, table.frame.columns)], cells.to_numpy().tolist(), table.num_labels)
    return text + (f"\n\n{markdown_text(table.note)}" if table.note else "")


_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~&$])")


def markdown_text(text: str) -> str:
    """Text that Markdown shows literally, on one line."""
    return _MARKDOWN.sub(r"\\\1", " ".join(str(text).split()))
