"""Data of the plots of a report: a style for each arm, and curves as means, bands and single seeds."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ...core.plotting import COLORS
from ...core.words import counted
from ..runs.results import RunResult, by_cell
from ..spec.spec import Cell

*_COLORS, _BASELINE = COLORS  # the baseline is black
# With more arms than colours, lines (in the notations of matplotlib and SVG) and markers differ too.
_LINES = (("-", ""), ("--", "7 4"), (":", "2 3"), ("-.", "7 3 2 3"))
_MARKERS = ("o", "D", "s", "^", "x")

MOST_POINTS = 120  # of a mean curve: a plot is a few hundred pixels wide
_MOST_SEED_POINTS = 60
_MOST_SEED_LINES = 200  # of one data set, shared by the arms
_MOST_LINES_OF_AN_ARM = 20


class Style(NamedTuple):
    """How all plots show an arm: colour, line style in the notations of matplotlib and SVG, and marker."""

    color: str
    line: str
    dashes: str
    marker: str


class CurveKind(NamedTuple):
    """A quantity that is plotted over the updates."""

    name: str  # of files
    title: str
    group: str  # of a run's curves
    keys: tuple[str, ...]  # in that group: the first one that a run has is plotted
    axis: str
    is_loss: bool = False  # on a logarithmic scale if it is positive


CURVE_KINDS = (
    CurveKind("loss", "Training loss", "loss", ("loss",), "training loss", True),
    CurveKind("quality", "Held-out loss", "quality", ("validation_loss_ema", "validation_loss"), "held-out loss", True),
    CurveKind("lr", "Learning rate", "loss", ("lr",), "learning rate"),
    CurveKind("beta1", "Momentum", "loss", ("beta1",), "momentum (beta1)"),
)


class MeanCurve(NamedTuple):
    """
    One arm on one data set; arrays are `(num,)`, with `num` at most `MOST_POINTS`.

    The band is one standard deviation on either side, clipped to what single seeds reached, so that it stays positive
    where they do.
    """

    updates: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: list[np.ndarray]  # empty if all are equal
    seed_updates: np.ndarray
    num_runs: int  # in the mean; more than `seeds` where those would crowd the plot


def styles(arms: Iterable[str], baseline: str | None) -> dict[str, Style]:
    arms = list(arms)
    chosen = {arm: Style(_BASELINE, *_LINES[0], _MARKERS[0]) for arm in arms}
    for index, arm in enumerate(arm for arm in arms if arm != baseline):
        turn, color = divmod(index, len(_COLORS))
        chosen[arm] = Style(_COLORS[color], *_LINES[turn % len(_LINES)], _MARKERS[(turn + 1) % len(_MARKERS)])
    return chosen


def compared(results: Iterable[RunResult]) -> list[RunResult]:
    """The finished runs of the comparison, by seed, without runs for tuning and runs that diverged."""
    finished = [result for result in results if result.stage == "compare" and result.status == "finished"]
    return sorted(finished, key=lambda result: result.seed)


def shown_arms(arms: Iterable[str], shown: Iterable[Cell]) -> list[str]:
    present = {arm for arm, _ in shown}
    return [arm for arm in arms if arm in present]


def shown_datasets(datasets: list[str], shown: Iterable[Cell]) -> list[str]:
    present = {dataset for _, dataset in shown}
    return [dataset for dataset in datasets if dataset in present]


def mean_curves(results: Iterable[RunResult], kind: CurveKind) -> dict[Cell, MeanCurve]:
    """Curves of one kind, by arm and data set, of finished runs that have one."""
    found = {}
    for cell, runs in by_cell(compared(results)).items():
        if curves := {run.seed: curve for run in runs if (curve := curve_of(run.curves, kind)) is not None}:
            found[cell] = curves
    arms = len({arm for arm, _ in found})
    most_lines = min(_MOST_LINES_OF_AN_ARM, max(3, _MOST_SEED_LINES // max(arms, 1)))
    return {cell: _mean_curve(curves, most_lines) for cell, curves in found.items()}


def curve_of(curves: dict[str, Any], kind: CurveKind) -> tuple[np.ndarray, np.ndarray] | None:
    """Updates and finite values, both `(num,)`, if there are any."""
    group = curves.get(kind.group) or {}
    key = next((key for key in kind.keys if group.get(key)), None)
    if key is None:
        return None
    updates, values = (np.array(group[name], dtype=float) for name in ("update", key))  # null becomes NaN
    finite = np.isfinite(values)
    return (updates[finite], values[finite]) if finite.any() else None


def _thin(updates: np.ndarray, most: int) -> np.ndarray:
    return updates[np.unique(np.linspace(0, len(updates) - 1, min(len(updates), most)).round().astype(int))]


def _mean_curve(by_seed: dict[int, tuple[np.ndarray, np.ndarray]], most_lines: int) -> MeanCurve:
    """Means over seeds, where all of them were still training."""
    curves = [*by_seed.values()]
    start = max(updates[0] for updates, _ in curves)
    end = min(updates[-1] for updates, _ in curves)
    longest = max((updates for updates, _ in curves), key=len)
    inside = longest[(longest >= start) & (longest <= end)]
    inside = inside if len(inside) else longest  # seeds may share no update
    grid, coarse = _thin(inside, MOST_POINTS), _thin(inside, _MOST_SEED_POINTS)
    values = np.stack([np.interp(grid, *curve) for curve in curves])
    mean = values.mean(axis=0)
    std = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
    lowest, highest = values.min(axis=0), values.max(axis=0)
    varies = not np.allclose(lowest, highest, rtol=1e-9, atol=0)
    seeds = [np.interp(coarse, *curve) for curve in curves[:most_lines]] if varies else []
    low, high = np.maximum(mean - std, lowest), np.minimum(mean + std, highest)
    return MeanCurve(grid, mean, low, high, seeds, coarse, len(curves))


def is_told(kind: CurveKind, shown: dict[Cell, MeanCurve]) -> bool:
    """Whether there are curves to plot: a momentum that no schedule moves, the same in all arms, says nothing."""
    values = {float(value) for curve in shown.values() for value in (curve.low.min(), curve.high.max())}
    return bool(shown) and not (kind.name == "beta1" and len(values) == 1)


def spans_decades(values: dict[Cell, np.ndarray]) -> bool:
    """Whether a linear scale would hide small values: all are positive, and one data set spans a factor of 20."""
    sets: dict[str, list[np.ndarray]] = {}
    for (_, dataset), found in values.items():
        sets.setdefault(dataset, []).append(found)
    spans = [(min(map(np.min, found)), max(map(np.max, found))) for found in sets.values()]
    return all(low > 0 for low, _ in spans) and any(bool(high > 20 * low) for low, high in spans)


def lines_left_out(shown: dict[Cell, MeanCurve]) -> str:
    """A note on how many seeds are plotted as single lines; empty if all are."""
    crowded = [curve for curve in shown.values() if len(curve.seeds) not in (0, curve.num_runs)]
    if not crowded:
        return ""
    most, num_lines = max(curve.num_runs for curve in crowded), max(len(curve.seeds) for curve in crowded)
    return (
        f"Of up to {counted(most, 'seed')} per arm, the first {num_lines} are plotted as lines; means and bands are of all."
    )


def curves_as_csv(shown: dict[str, dict[Cell, MeanCurve]]) -> str:
    """The plotted curves: the mean over seeds, and the ends of the band around it."""
    rows = [
        (name, dataset, arm, *point, curve.num_runs)
        for name, of_kind in shown.items() for (arm, dataset), curve in of_kind.items()
        for point in zip(curve.updates, curve.mean, curve.low, curve.high, strict=True)
    ]  # fmt: skip
    columns = ["curve", "data set", "arm", "update", "mean", "low", "high", "runs"]
    return pd.DataFrame(rows, columns=columns).to_csv(index=False, float_format="%.6g", lineterminator="\n")


def values_as_csv(values: dict[str, dict[Cell, list[tuple[int, float]]]]) -> str:
    """The final value of every run by every metric."""
    rows = [
        (metric, dataset, arm, *value)
        for metric, of_metric in values.items() for (arm, dataset), found in of_metric.items() for value in found
    ]  # fmt: skip
    columns = ["metric", "data set", "arm", "seed", "value"]
    return pd.DataFrame(rows, columns=columns).to_csv(index=False, float_format="%.9g", lineterminator="\n")


def final_values(results: Iterable[RunResult], metric: str) -> dict[Cell, list[tuple[int, float]]]:
    """For every arm and data set, (seed, value) of the finished runs that have this metric, by seed."""
    values = {}
    for cell, runs in by_cell(compared(results)).items():
        scores = [(run.seed, run.results.get(metric)) for run in runs]
        if finite := [(seed, float(score)) for seed, score in scores if score is not None and np.isfinite(score)]:
            values[cell] = finite
    return values
