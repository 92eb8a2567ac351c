"""Tables besides those of metrics: speed-ups, controls, tuning, consistency, search, divergences, cost."""

import itertools
from typing import Any

import numpy as np

from ...evaluation.metrics import metric_label
from ..analysis.verdicts import SPEEDUP, word_of
from ..runs.results import RunResult
from .table_formats import NONE, Table, interval, number, probability
from .tables import strong

_NEAREST = 3


def other_tables(results: list[RunResult], summary: dict[str, Any]) -> list[Table]:
    """All of these for which there are data."""
    tables = [speedup_table(summary["speedups"])] if summary.get("speedups") else []
    tables += control_tables(summary)
    others = {"tuning": tuning_table, "consistency": consistency_table, "search": search_table}
    tables += [make(summary[name]) for name, make in others.items() if summary.get(name)]
    if diverged := [result for result in results if result.status == "diverged"]:
        tables.append(divergence_table(diverged))
    return [*tables, cost_table(summary["study"], results)]


_SPEEDUP_COLUMNS = [
    *("data set", "arm", "seeds", "never reached it", "ended worse", "updates needed"),
    *("speed-up", "95 % interval", "adjusted p"),
]
_BOUNDS = "Where some runs never got there, it is an upper bound and has no interval; where none did, there is no speed-up."


def speedup_table(rows: list[dict[str, Any]]) -> Table:
    """Updates that each arm needs for the baseline's final quality."""
    cells = []
    for row in rows:
        counts = [f"{row[key]}" for key in ("n", "censored", "ends_worse")]
        cells.append([row["dataset"], row["arm"], *counts, number(row["updates_needed"]), *_speedup_cells(row)])
    note = (
        "Updates until a run is as good as the baseline is at its end, to within what its evaluations scatter (two standard "
        f"deviations). A speed-up above 1 is faster than the baseline. {_BOUNDS}"
    )
    return Table("speedups", "Speed-ups", _SPEEDUP_COLUMNS, cells, note, labels=2)


def _speedup_cells(row: dict[str, Any]) -> list[str]:
    """Speed-up, interval and p; runs that never got there make the first a bound and leave no interval."""
    p = probability(row["p_adjusted"])
    if not row["censored"] or row["speedup"] is None:
        return [number(row["speedup"]), interval(row["ci_low"], row["ci_high"]), p]
    return [NONE if row["censored"] == row["n"] else f"≤ {number(row['speedup'])}", NONE, p]


def control_tables(summary: dict[str, Any]) -> list[Table]:
    """Differences and speed-ups of arms beside their controls; none where no arm has one."""
    controls = dict(summary.get("controls") or {})
    faster = controls.pop(SPEEDUP, None)
    tables = [_control_table([row for rows in controls.values() for row in rows])] if any(controls.values()) else []
    if faster:
        table = speedup_table(faster)
        cells = [[*row[:2], of_row["control"], *row[2:]] for row, of_row in zip(table.rows, faster, strict=True)]
        columns = [*table.columns[:2], "control", *table.columns[2:]]
        note = (
            "Updates until a run is as good as the one of arm and control that ends worse, to within what its evaluations "
            "scatter; so both reach it, unless they diverge. A speed-up above 1 is faster than the control. "
            f"{_BOUNDS} p is adjusted by Holm over all of these comparisons."
        )
        tables.append(Table("control_speedups", "Speed-ups beside controls", columns, cells, note, labels=3))
    return tables


def _control_table(rows: list[dict[str, Any]]) -> Table:
    cells, words = [], [word_of(row) for row in rows]
    for row, word in zip(rows, words, strict=True):
        names = [row["dataset"], row["arm"], row["control"], metric_label(row["metric"]), word or NONE]
        figures = [number(row["diff"]), interval(row["diff_low"], row["diff_high"]), probability(row["p_adjusted"])]
        cells.append([*names, f"{row['pairs']}", *figures])
    columns = ["data set", "arm", "control", "in", "beside the control", "seeds", "difference", "its 95 % interval"]
    note = (
        "Differences of an arm to its control, paired by seed; p is adjusted by Holm over all of these comparisons of a "
        "metric."
    )
    return Table("controls", "Beside controls", [*columns, "adjusted p"], cells, note, labels=5, strong=strong(words, 4))


def tuning_table(rows: list[dict[str, Any]]) -> Table:
    """Learning rates that were tried for each arm, and the ones chosen."""
    cells = []
    for row in rows:
        said = ("chosen" + (", at the edge of those tried" if row["at_edge"] else "")) if row["chosen"] else ""
        cells.append([row["dataset"], row["arm"], said, f"{row['learning_rate']:g}", number(row["score"])])
    strong = frozenset((place, 2) for place, row in enumerate(rows) if row["chosen"])
    note = (
        "Chosen on seeds that the comparison does not use. At the edge, a better one may lie outside of all that was tried."
    )
    columns = ["data set", "arm", "", "learning rate", "score"]
    return Table("tuning", "The learning rate of each arm", columns, cells, note, labels=3, strong=strong)


def consistency_table(rows: list[dict[str, Any]]) -> Table:
    note = (
        "Means over pairs of runs. Distance: between the points that both make of the same noise by DDIM, beside that of "
        "points from unrelated noise; the smaller the ratio, the more the runs agree. Loss barrier: how far the held-out "
        "loss of the averaged weights rises between two neighbouring seeds, on the straight line from weights to weights. "
        "Curvature: its second difference at the ends of that line, whose length counts as 1."
    )
    return _any_table("consistency", "Consistency", rows, note)


def search_table(rows: list[dict[str, Any]]) -> Table:
    """The nearest arms to each of the paper's rows, see [`~study.paper.nearest_arms`]; `summary.json` has all."""
    nearest = [row for _, some in itertools.groupby(rows, lambda row: row["paper_row"]) for row in [*some][:_NEAREST]]
    note = (
        f"The {_NEAREST} arms of this study that come nearest to each row of the paper. Off by: the factor between their "
        "figures and the paper's, as the geometric mean over these data sets, training-set loss and KL; 1 is equal. What "
        "leads to the same figures need not be what was done."
    )
    return _any_table("search", "Which arms lead to the paper's figures", nearest, note)


def _any_table(name: str, title: str, rows: list[dict[str, Any]], note: str) -> Table:
    """Rows with any keys, as columns in the order in which they first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    texts = [key for key in columns if any(isinstance(row.get(key), str) for row in rows)]
    ordered = texts + [key for key in columns if key not in texts]
    cells = [[_any_text(row.get(key)) for key in ordered] for row in rows]
    return Table(name, title, [key.replace("_", " ") for key in ordered], cells, note, labels=max(len(texts), 1))


def _any_text(value: Any) -> str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return number(value) if isinstance(value, float) else str(value)


def divergence_table(diverged: list[RunResult]) -> Table:
    """Every run that diverged, when and why."""
    rows = []
    for result in diverged:
        train, stage = result.record["train"], "tuning" if result.stage == "tune" else "comparison"
        updates = f"{train['updates_done']:,} of {train['num_updates']:,}"
        names = [result.dataset, result.arm, stage, result.record["run"]["error"] or ""]
        rows.append([*names, f"{result.seed}", number(result.learning_rate), updates])
    columns = ["data set", "arm", "stage", "what it said", "seed", "learning rate", "after updates"]
    return Table("divergences", "Runs that diverged", columns, rows, labels=4)


def cost_table(study: dict[str, Any], results: list[RunResult]) -> Table:
    """Runs and seconds of each arm, tuning and diverged runs included, and the total in hours."""
    costs = {}
    for arm in study["arms"]:
        trains = [result.record["train"] for result in results if result.arm == arm]
        parts = [sum(train[f"{part}_seconds"] for train in trains) for part in ("training", "sampling", "evaluation")]
        costs[arm] = np.array([len(trains), *parts])
    rows = []
    for name, (runs, *seconds) in [*costs.items(), ("all", sum(costs.values(), np.zeros(4)))]:
        rows.append([name, f"{runs:,.0f}", *(f"{value:,.1f}" for value in seconds), f"{sum(seconds) / 3600:,.2f}"])
    columns = ["arm", "runs", "training, s", "sampling, s", "evaluation, s", "hours"]
    note = "Tuning runs and diverged runs among them. What a stack computes for all of its runs at once is shared equally."
    return Table("cost", "Cost", columns, rows, note, strong=frozenset((len(rows) - 1, place) for place in range(6)))
