"""The tables of a report, from the rows of a summary and the records of runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from .metrics import metric_label
from .paper import ARM_LABELS, DATASETS, OURS, QUANTITIES, Quantity, reported
from .report_data import compared
from .statistics import LARGER_IS_BETTER, LEVEL, NEITHER_IS_BETTER, PERCENTS, word_for
from .table_formats import NONE, Table, interval, number, plus_minus, probability, without_empty

if TYPE_CHECKING:
    from .results import RunResult

_NEAREST = 3
_SHARES = tuple(map(str, PERCENTS))


def verdict(row: dict[str, Any], baseline: str | None) -> str:
    """What may be said of an arm on a data set: nothing but what the adjusted test says."""
    if row["arm"] == baseline:
        return "baseline"
    if row["mean"] is None and row.get("diverged"):
        return "diverged"
    if row["p_adjusted"] is None or row["diff"] is None:
        return NONE
    if row["p_adjusted"] >= LEVEL:
        return "cannot tell"
    return word_for(row["diff"], row["metric"])


def rows_of(summary: dict[str, Any], metric: str) -> list[dict[str, Any]]:
    """The rows of a metric, by data set and arm in the order of the study."""
    study = summary["study"]
    arms = {arm: place for place, arm in enumerate(study["arms"])}
    datasets = {dataset: place for place, dataset in enumerate(study["datasets"])}
    rows = [row for row in summary["rows"] if row["metric"] == metric]
    return sorted(rows, key=lambda row: (datasets.get(row["dataset"], len(datasets)), arms.get(row["arm"], len(arms))))


def summary_table(summary: dict[str, Any], metric: str) -> Table:
    """Everything the statistics say of a metric."""
    baseline = summary["study"]["baseline"]
    rows, strong = [], set()
    for place, row in enumerate(rows_of(summary, metric)):
        said = verdict(row, baseline)
        if said not in ("baseline", "cannot tell", NONE):
            strong.add((place, 2))
        runs = f"{row['n']}" + (f" + {row['diverged']} diverged" if row.get("diverged") else "")
        needed = row["seeds_needed"] or {}
        seeds = " / ".join(NONE if needed.get(share) is None else f"{needed[share]:,}" for share in _SHARES)
        rows.append([
            *(row["dataset"], row["arm"], said, runs, plus_minus(row["mean"], row["std"])),
            *(interval(row["ci_low"], row["ci_high"]), interval(row["boot_low"], row["boot_high"]), number(row["diff"])),
            *(interval(row["diff_low"], row["diff_high"]), probability(row["p_adjusted"]), number(row["effect_size"])),
            *(seeds if any(needed.get(share) is not None for share in _SHARES) else NONE, number(row.get("floor"))),
        ])  # fmt: skip
    columns = [
        *("data set", "arm", "beside the baseline", "runs", "mean ± std", "95 % interval", "by bootstrap"),
        *(
            "difference",
            "its 95 % interval",
            "adjusted p",
            "effect size",
            f"seeds to see {' / '.join(_SHARES)} %",
            "held-out points",
        ),
    ]
    better = (
        "" if metric in NEITHER_IS_BETTER else "Larger is better. " if metric in LARGER_IS_BETTER else "Smaller is better. "
    )
    note = (
        f"{better}Differences are to {baseline}, paired by seed; p is adjusted by Holm over all "
        f"arms and data sets of this metric, and a difference is called one below {LEVEL:g}. Effect size: mean of the "
        "paired differences over their standard deviation, with Hedges' correction for few seeds."
    )
    table = Table(f"summary_{metric}", metric_label(metric), columns, rows, note, labels=3, strong=frozenset(strong))
    return without_empty(table)


# --- the paper's table -----------------------------------------------------------------------------------------------


def paper_table(summary: dict[str, Any], results: Iterable[RunResult]) -> Table:
    """Schedule x data set with the paper's four figures in each, the paper's own beside ours."""
    study, finished = summary["study"], compared(results)
    datasets = [name for name in DATASETS if name in study["datasets"]]
    rows: list[list[str]] = []
    for arm in (arm for arm in ARM_LABELS if OURS.get(arm, arm) in study["arms"]):
        for place, quantity in enumerate(QUANTITIES):
            cells = [ARM_LABELS[arm] if place == 0 else "", quantity.label]
            for dataset in datasets:
                figures = reported(arm, dataset)
                paper = f"{figures[place]:.{quantity.decimals}f}" if figures else NONE
                cells += [paper, _ours(summary, finished, OURS.get(arm, arm), dataset, quantity)]
            rows.append(cells)
    groups = [("", 2), *((dataset, 2) for dataset in datasets)]
    columns = ["schedule", "", *("paper", "this study") * len(datasets)]
    note = (
        "The paper gives one figure each. Its “baseline, no schedule” is the cosine run of the code that it is built on, so "
        "beside it stands our cosine, and a constant learning rate has a row of its own. This study: mean ± standard "
        "deviation over seeds. Times are of other machines than the paper's, and of a stack of runs each has its share."
    )
    return Table("paper", "The paper's table, and this study's", columns, rows, note, groups, labels=2)


def _ours(summary: dict[str, Any], finished: list[RunResult], arm: str, dataset: str, quantity: Quantity) -> str:
    if quantity.metric is not None:
        found = (row for row in rows_of(summary, quantity.metric) if (row["arm"], row["dataset"]) == (arm, dataset))
        row = next(found, None)
        if row is not None and row["mean"] is None and row.get("diverged"):
            return "diverged"
        return plus_minus(row["mean"], row["std"]) if row else NONE
    runs = [result.record["train"] for result in finished if (result.arm, result.dataset) == (arm, dataset)]
    seconds = [train[quantity.seconds] for train in runs if train.get(quantity.seconds) is not None]
    if not seconds:
        return NONE
    return plus_minus(float(np.mean(seconds)), float(np.std(seconds, ddof=1)) if len(seconds) > 1 else None)


# --- what a study may have besides -----------------------------------------------------------------------------------


def speedup_table(rows: list[dict[str, Any]]) -> Table:
    """Updates that each arm needs for the baseline's final quality."""
    cells = [
        [
            *(row["dataset"], row["arm"], f"{row['n']}", f"{row['censored']}", number(row["updates_needed"])),
            *_speedup_cells(row),
        ]
        for row in rows
    ]
    columns = ["data set", "arm", "seeds", "never reached it", "updates needed", "speed-up", "95 % interval", "adjusted p"]
    note = (
        "Updates until a run is as good as the baseline at its end. A speed-up above 1 is faster than the baseline. Where "
        "some runs never got there, it is an upper bound and has no interval; where none did, there is no speed-up."
    )
    return Table("speedups", "Speed-ups", columns, cells, note, labels=2)


def _speedup_cells(row: dict[str, Any]) -> list[str]:
    """Speed-up, interval and p; runs that never got there make a bound of the first and leave nothing of the second."""
    p = probability(row["p_adjusted"])
    if not row["censored"] or row["speedup"] is None:
        return [number(row["speedup"]), interval(row["ci_low"], row["ci_high"]), p]
    return [NONE if row["censored"] == row["n"] else f"≤ {number(row['speedup'])}", NONE, p]


def tuning_table(rows: list[dict[str, Any]]) -> Table:
    """Learning rates that were tried for each arm, and the ones chosen."""
    cells = []
    for row in rows:
        said = ("chosen" + (", at the edge of those tried" if row["at_edge"] else "")) if row["chosen"] else ""
        cells.append([row["dataset"], row["arm"], said, f"{row['learning_rate']:g}", number(row["score"])])
    strong = frozenset((place, 2) for place, row in enumerate(rows) if row["chosen"])
    note = "Chosen on seeds that the comparison does not use. At the edge, a better one may lie outside of what was tried."
    columns = ["data set", "arm", "", "learning rate", "score"]
    return Table("tuning", "The learning rate of each arm", columns, cells, note, labels=3, strong=strong)


def consistency_table(rows: list[dict[str, Any]]) -> Table:
    """See [`~study.consistency.consistency`]."""
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
    """Rows with whatever keys they have, as columns in the order in which they first appear."""
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


def divergence_table(results: Iterable[RunResult]) -> Table | None:
    """Every run that diverged, with when and why; `None` if none did."""
    rows = [
        [
            *(result.dataset, result.arm, "tuning" if result.stage == "tune" else "comparison"),
            *(result.record["run"].get("error") or "", f"{result.seed}", number(result.learning_rate), _updates(result)),
        ]
        for result in results
        if result.status == "diverged"
    ]
    columns = ["data set", "arm", "stage", "what it said", "seed", "learning rate", "after updates"]
    return Table("divergences", "Runs that diverged", columns, rows, labels=4) if rows else None


def _updates(result: RunResult) -> str:
    train = result.record.get("train") or {}
    return f"{train['updates_done']:,} of {train['num_updates']:,}" if "updates_done" in train else NONE


_SECONDS = ("training_seconds", "sampling_seconds", "evaluation_seconds")


def cost_table(study: dict[str, Any], results: list[RunResult]) -> Table:
    """Runs and seconds of each arm, tuning and diverged runs among them, and the whole in hours."""
    rows, total = [], np.zeros(4)
    for arm in study["arms"]:
        trains = [result.record.get("train") or {} for result in results if result.arm == arm]
        seconds = np.array([len(trains), *(sum(train.get(key) or 0 for train in trains) for key in _SECONDS)])
        total += seconds
        rows.append([arm, *_costs(seconds)])
    rows.append(["all", *_costs(total)])
    columns = ["arm", "runs", "training, s", "sampling, s", "evaluation, s", "hours"]
    last = frozenset((len(rows) - 1, column) for column in range(len(columns)))
    return Table(
        "cost",
        "Cost",
        columns,
        rows,
        "Tuning runs and diverged runs among them. What a stack computes for all of its runs at once is shared equally.",
        strong=last,
    )


def _costs(seconds: np.ndarray) -> list[str]:
    return [f"{seconds[0]:,.0f}", *(f"{value:,.1f}" for value in seconds[1:]), f"{seconds[1:].sum() / 3600:,.2f}"]
