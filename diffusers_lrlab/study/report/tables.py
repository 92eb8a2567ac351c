"""The tables of a report, from the rows of a summary and the records of runs."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ...evaluation.metrics import better_of, metric_label
from ..analysis.paper import ARM_LABELS, DATASETS, OURS, QUANTITIES, Quantity, reported
from ..analysis.statistics import LEVEL, PERCENTS
from ..analysis.verdicts import CANNOT_TELL, word_of
from ..runs.results import RunResult
from .report_data import compared
from .table_formats import NONE, Table, interval, number, plus_minus, probability, without_empty

_PERCENTS = tuple(map(str, PERCENTS))
_BASELINE = "baseline"


def strong(words: list[str | None], column: int) -> frozenset[tuple[int, int]]:
    """The cells in this column, which has these words, that tell of a difference."""
    return frozenset((place, column) for place, word in enumerate(words) if word not in (_BASELINE, CANNOT_TELL, None))


def rows_of(summary: dict[str, Any], metric: str) -> list[dict[str, Any]]:
    """The rows of a metric, by data set and arm in the order of the study."""
    arms, datasets = list(summary["study"]["arms"]), summary["study"]["datasets"]
    rows = [row for row in summary["rows"] if row["metric"] == metric]
    return sorted(rows, key=lambda row: (datasets.index(row["dataset"]), arms.index(row["arm"])))


def summary_table(summary: dict[str, Any], metric: str) -> Table:
    baseline = summary["study"]["baseline"]
    found, rows = rows_of(summary, metric), []
    words = [_BASELINE if row["arm"] == baseline else word_of(row) for row in found]
    for row, word in zip(found, words, strict=True):
        runs = f"{row['n']}" + (f" + {row['diverged']} diverged" if row.get("diverged") else "")
        needed = [row["seeds_needed"][percent] for percent in _PERCENTS]
        seeds = " / ".join(f"{num:,}" if num else NONE for num in needed) if any(needed) else NONE
        rows.append([
            *(row["dataset"], row["arm"], word or NONE, runs, plus_minus(row["mean"], row["std"])),
            *(interval(row["ci_low"], row["ci_high"]), interval(row["boot_low"], row["boot_high"]), number(row["diff"])),
            *(interval(row["diff_low"], row["diff_high"]), probability(row["p_adjusted"]), number(row["effect_size"])),
            *(seeds, number(row["floor"])),
        ])  # fmt: skip
    columns = [
        *("data set", "arm", "beside the baseline", "runs", "mean ± std", "95 % interval", "by bootstrap", "difference"),
        *("its 95 % interval", "adjusted p", "effect size", f"seeds to see {' / '.join(_PERCENTS)} %", "held-out points"),
    ]
    better = {"neither": "", "larger": "Larger is better. ", "smaller": "Smaller is better. "}[better_of(metric)]
    note = (
        f"{better}Differences are to {baseline}, paired by seed; p is adjusted by Holm over all arms and data sets of this "
        f"metric, and a difference is called one below {LEVEL:g}. Effect size: mean of the paired differences over their "
        "standard deviation, with Hedges' correction for few seeds."
    )
    table = Table(f"summary_{metric}", metric_label(metric), columns, rows, note, labels=3, strong=strong(words, 2))
    return without_empty(table)


def paper_table(summary: dict[str, Any], results: Iterable[RunResult]) -> Table:
    """Schedules by data sets, with the paper's four figures beside ours."""
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
    trains = [result.record["train"] for result in finished if (result.arm, result.dataset) == (arm, dataset)]
    seconds = [train[quantity.seconds] for train in trains]
    std = float(np.std(seconds, ddof=1)) if len(seconds) > 1 else None
    return plus_minus(float(np.mean(seconds)), std) if seconds else NONE
