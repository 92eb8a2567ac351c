"""Data of the plots of a report: a style for each arm, curves as means with bands, and final values."""

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np

from ...core.plotting import COLORS
from ..results import RunResult, by_cell
from ..spec.spec import Cell

*_COLORS, _BASELINE = COLORS  # the baseline is black
# With more arms than colours, lines differ too: in the notations of matplotlib and SVG.
_LINES = (("-", ""), ("--", "7 4"), (":", "2 3"), ("-.", "7 3 2 3"))

MOST_POINTS = 120  # of a mean curve: a plot is a few hundred pixels wide


class Style(NamedTuple):
    """How all plots show an arm: colour, and line style in the notations of matplotlib and SVG."""

    color: str
    line: str
    dashes: str


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


def styles(arms: Collection[str], baseline: str | None) -> dict[str, Style]:
    others = [arm for arm in arms if arm != baseline]
    turns = ((arm, *divmod(index, len(_COLORS))) for index, arm in enumerate(others))
    chosen = {arm: Style(_COLORS[color], *_LINES[turn % len(_LINES)]) for arm, turn, color in turns}
    return {arm: chosen.get(arm, Style(_BASELINE, *_LINES[0])) for arm in arms}


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
        if curves := [curve for run in runs if (curve := curve_of(run.curves, kind)) is not None]:
            found[cell] = _mean_curve(curves)
    return found


def curve_of(curves: dict[str, Any], kind: CurveKind) -> tuple[np.ndarray, np.ndarray] | None:
    """Updates and finite values, both `(num,)`, if there are any."""
    group = curves.get(kind.group) or {}
    key = next((key for key in kind.keys if group.get(key)), None)
    if key is None:
        return None
    updates, values = (np.array(group[name], dtype=float) for name in ("update", key))  # null becomes NaN
    finite = np.isfinite(values)
    return (updates[finite], values[finite]) if finite.any() else None


def _mean_curve(curves: list[tuple[np.ndarray, np.ndarray]]) -> MeanCurve:
    """Means over seeds, where all of them were still training."""
    start = max(updates[0] for updates, _ in curves)
    end = min(updates[-1] for updates, _ in curves)
    longest = max((updates for updates, _ in curves), key=len)
    inside = longest[(longest >= start) & (longest <= end)]
    inside = inside if len(inside) else longest  # seeds may share no update
    grid = inside[np.unique(np.linspace(0, len(inside) - 1, min(len(inside), MOST_POINTS)).round().astype(int))]
    values = np.stack([np.interp(grid, *curve) for curve in curves])
    mean = values.mean(axis=0)
    std = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
    low, high = np.maximum(mean - std, values.min(axis=0)), np.minimum(mean + std, values.max(axis=0))
    return MeanCurve(grid, mean, low, high)


def is_told(kind: CurveKind, shown: dict[Cell, MeanCurve]) -> bool:
    """Whether there are curves to plot: a momentum that no schedule moves, the same in all arms, says nothing."""
    values = {float(value) for curve in shown.values() for value in (curve.low.min(), curve.high.max())}
    return bool(shown) and not (kind.name == "beta1" and len(values) == 1)


def final_values(results: Iterable[RunResult], metric: str) -> dict[Cell, list[tuple[int, float]]]:
    """For every arm and data set, (seed, value) of the finished runs that have this metric, by seed."""
    values = {}
    for cell, runs in by_cell(compared(results)).items():
        scores = [(run.seed, run.results.get(metric)) for run in runs]
        if finite := [(seed, float(score)) for seed, score in scores if score is not None and np.isfinite(score)]:
            values[cell] = finite
    return values
