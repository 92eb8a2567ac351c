"""The tables of a report, from the rows of a summary and the records of runs."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from ...evaluation.metrics import better_of, metric_label
from ..analysis.figures import NONE, probability
from ..analysis.statistics import LEVEL, PERCENTS
from ..analysis.verdicts import CANNOT_TELL, word_of
from ..runs.results import RunResult
from ..spec.spec import SPEEDUP
from .formats import Table, interval, number, plus_minus, without_empty
from .reach import power_table

Row = dict[str, Any]  # of a summary
_BASELINE = "baseline"


def rows_of(summary: dict[str, Any], metric: str) -> list[Row]:
    """The rows of a metric, by data set and arm in the order of the study."""
    arms, datasets = list(summary["study"]["arms"]), summary["study"]["datasets"]
    rows = [row for row in summary["rows"] if row["metric"] == metric]
    return sorted(rows, key=lambda row: (datasets.index(row["dataset"]), arms.index(row["arm"])))


def other_tables(results: list[RunResult], summary: dict[str, Any]) -> list[Table]:
    """All tables except those of metrics, where there are data for them."""
    tables = [speedup_table(summary["speedups"])] if summary.get("speedups") else []
    tables += control_tables(summary)
    makers = {"power": power_table, "tuning": tuning_table}
    tables += [make(summary[name]) for name, make in makers.items() if summary.get(name)]
    if diverged := [result for result in results if result.status == "diverged"]:
        tables.append(divergence_table(diverged))
    return [*tables, cost_table(summary["study"], results)]


def _strong(words: Iterable[str | None], column: int) -> frozenset[tuple[int, int]]:
    """The cells of this column that state a difference."""
    return frozenset((row, column) for row, word in enumerate(words) if word not in (_BASELINE, CANNOT_TELL, None))


def summary_table(summary: dict[str, Any], metric: str) -> Table:
    baseline, rows = summary["study"]["baseline"], rows_of(summary, metric)
    words = [_BASELINE if row["arm"] == baseline else word_of(row) for row in rows]
    cells = [
        {
            "data set": row["dataset"],
            "arm": row["arm"],
            "verdict": word or NONE,
            "runs": f"{row['n']}" + (f" + {row['diverged']} diverged" if row.get("diverged") else ""),
            "mean ± std": plus_minus(row["mean"], row["std"]),
            "95 % interval": interval(row["ci_low"], row["ci_high"]),
            "by bootstrap": interval(row["boot_low"], row["boot_high"]),
            "difference": number(row["diff"]),
            "its 95 % interval": interval(row["diff_low"], row["diff_high"]),
            "adjusted p": probability(row["p_adjusted"]),
            "effect size": number(row["effect_size"]),
            f"seeds to see {' / '.join(map(str, PERCENTS))} %": _seeds_needed(row),
            "held-out data": number(row["floor"]),
        }
        for row, word in zip(rows, words, strict=True)
    ]
    better = {"neither": "", "larger": "Larger is better. ", "smaller": "Smaller is better. "}[better_of(metric)]
    note = (
        f"{better}Differences are from {baseline}, paired by seed. p is adjusted by Holm's method over all arms and data "
        f"sets of this metric; verdicts name a difference where it is below {LEVEL:g}. Effect size: the mean of the paired "
        "differences over their standard deviation, with Hedges' correction for few seeds."
    )
    frame = without_empty(pd.DataFrame(cells), 3)
    return Table(f"summary_{metric}", metric_label(metric), frame, note, 3, _strong(words, 2))


def _seeds_needed(row: Row) -> str:
    needed = [row["seeds_needed"][str(percent)] for percent in PERCENTS]
    return " / ".join(f"{num:,}" if num else NONE for num in needed) if any(needed) else NONE


_BOUNDS = (
    "If some runs never reach it, the speed-up is an upper bound and has no interval; if none reaches it, there is no "
    "speed-up."
)


def speedup_table(rows: list[Row]) -> Table:
    """Updates that each arm needs for the baseline's final quality."""
    note = (
        "Updates until a run is as good as the baseline is at its end, to within two standard deviations of the noise of an "
        f"evaluation. Above 1, the arm is faster than the baseline. {_BOUNDS}"
    )
    return Table("speedups", "Speed-ups", _speedups(rows), note, 2)


def _speedups(rows: list[Row]) -> pd.DataFrame:
    cells = []
    for row in rows:
        shown, between = number(row["speedup"]), interval(row["ci_low"], row["ci_high"])
        if row["censored"] and row["speedup"] is not None:  # a bound, without an interval
            shown, between = (NONE if row["censored"] == row["n"] else f"≤ {shown}"), NONE
        control = {"control": row["control"]} if "control" in row else {}
        cells.append({
            "data set": row["dataset"], "arm": row["arm"], **control, "seeds": f"{row['n']}",
            "never reached it": f"{row['censored']}", "ended worse": f"{row['ends_worse']}",
            "updates needed": number(row["updates_needed"]), "speed-up": shown, "95 % interval": between,
            "adjusted p": probability(row["p_adjusted"]),
        })  # fmt: skip
    return pd.DataFrame(cells)


def control_tables(summary: dict[str, Any]) -> list[Table]:
    """Differences and speed-ups of arms compared with their controls; none where no arm has one."""
    controls = dict(summary.get("controls") or {})
    speedups = controls.pop(SPEEDUP, None)
    tables = []
    if rows := list(itertools.chain(*controls.values())):
        cells = [
            {
                "data set": row["dataset"], "arm": row["arm"], "control": row["control"],
                "metric": metric_label(row["metric"]), "verdict": word_of(row) or NONE, "seeds": f"{row['pairs']}",
                "difference": number(row["diff"]), "its 95 % interval": interval(row["diff_low"], row["diff_high"]),
                "adjusted p": probability(row["p_adjusted"]),
            }
            for row in rows
        ]  # fmt: skip
        note = (
            "Differences of an arm from its control, paired by seed; p is adjusted by Holm's method over all of these "
            "comparisons of a metric."
        )
        strong = _strong(map(word_of, rows), 4)
        tables.append(Table("controls", "Comparisons with controls", pd.DataFrame(cells), note, 5, strong))
    if speedups:
        note = (
            "Updates until a run is as good as the worse of arm and control is at its end, to within the noise of an "
            "evaluation; both reach that, unless they diverge. Above 1, the arm is faster than its control. "
            f"{_BOUNDS} p is adjusted by Holm's method over all of these comparisons."
        )
        tables.append(Table("control_speedups", "Speed-ups over controls", _speedups(speedups), note, 3))
    return tables


def tuning_table(rows: list[Row]) -> Table:
    """Learning rates that were tried for each arm, and the ones chosen."""
    chosen = [("chosen" + ", at the edge of those tried" * row["at_edge"]) if row["chosen"] else "" for row in rows]
    cells = [
        {"data set": row["dataset"], "arm": row["arm"], "": word, "learning rate": f"{row['learning_rate']:g}",
         "score": number(row["score"])}
        for row, word in zip(rows, chosen, strict=True)
    ]  # fmt: skip
    strong = frozenset((index, 2) for index, word in enumerate(chosen) if word)
    note = "Chosen by seeds that the comparison does not use. At the edge, a rate beyond those tried may be better."
    return Table("tuning", "The learning rate of each arm", pd.DataFrame(cells), note, 3, strong)


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
    strong = frozenset((len(cells) - 1, column) for column in range(6))
    return Table("cost", "Cost", pd.DataFrame(cells), note, strong=strong)
