"""What the pictures of a report are drawn from: one look for each arm, and curves as means, spreads and single seeds."""

import csv
import io
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ...core.plotting import COLORS
from ...core.words import counted
from ..runs.results import RunResult

*_COLORS, _BASELINE = COLORS  # the baseline is black
# More arms than colours differ by their lines, in the words of matplotlib and SVG, and markers.
_LINES = (("-", ""), ("--", "7 4"), (":", "2 3"), ("-.", "7 3 2 3"))
_MARKERS = ("o", "D", "s", "^", "x")

MOST_POINTS = 120  # of a mean curve: a plot is a few hundred pixels wide
_MOST_SEED_POINTS = 60
_MOST_SEED_LINES = 200  # of one data set, shared by the arms
_MOST_LINES_OF_AN_ARM = 20

Place = tuple[str, str]  # arm and data set


def shortened(text: str, most: int) -> str:
    """The text on one line, cut if it is longer than `most`."""
    text = " ".join(str(text).split())
    return text if len(text) <= most else text[: most - 1] + "…"


class Look(NamedTuple):
    """How an arm is drawn in all plots: colour, line in the words of matplotlib and of SVG, and marker."""

    color: str
    line: str
    dashes: str
    marker: str


class Family(NamedTuple):
    """Curves in one picture."""

    name: str  # for files
    title: str
    group: str  # of a run's curves
    keys: tuple[str, ...]  # in that group: the first one that a run has is drawn
    axis: str
    is_loss: bool = False  # a logarithmic scale may serve


FAMILIES = (
    Family("loss", "Training loss", "loss", ("loss",), "training loss", True),
    Family("quality", "Held-out loss", "quality", ("validation_loss_ema", "validation_loss"), "held-out loss", True),
    Family("lr", "Learning rate", "loss", ("lr",), "learning rate"),
    Family("beta1", "Momentum", "loss", ("beta1",), "momentum (beta1)"),
)


class Course(NamedTuple):
    """
    One curve of one arm on one data set; arrays are `(num,)`, and `MOST_POINTS` at most.

    The band is a standard deviation wide on either side, within what single seeds reached, so that it stays positive where
    they do.
    """

    updates: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: list[np.ndarray]  # empty if all are equal
    seed_updates: np.ndarray
    num_runs: int  # that the mean is of; more than `seeds` where those would crowd the plot


def looks(arms: Iterable[str], baseline: str | None) -> dict[str, Look]:
    arms = list(arms)
    chosen = {arm: Look(_BASELINE, *_LINES[0], _MARKERS[0]) for arm in arms}
    for place, arm in enumerate(arm for arm in arms if arm != baseline):
        turn, color = divmod(place, len(_COLORS))
        chosen[arm] = Look(_COLORS[color], *_LINES[turn % len(_LINES)], _MARKERS[(turn + 1) % len(_MARKERS)])
    return chosen


def compared(results: Iterable[RunResult]) -> list[RunResult]:
    """The finished runs of the comparison, by seed: none that only chose a learning rate, none that diverged."""
    finished = [result for result in results if result.stage == "compare" and result.status == "finished"]
    return sorted(finished, key=lambda result: result.seed)


def shown_arms(arms: Iterable[str], shown: Iterable[Place]) -> list[str]:
    present = {arm for arm, _ in shown}
    return [arm for arm in arms if arm in present]


def shown_datasets(datasets: list[str], shown: Iterable[Place]) -> list[str]:
    present = {dataset for _, dataset in shown}
    return [dataset for dataset in datasets if dataset in present]


def courses(results: Iterable[RunResult], family: Family) -> dict[Place, Course]:
    """Curves of one kind, by arm and data set, of finished runs; runs without one are left out."""
    found: dict[Place, list[tuple[np.ndarray, np.ndarray]]] = {}
    for result in compared(results):
        if (curve := curve_of(result.curves, family)) is not None:
            found.setdefault((result.arm, result.dataset), []).append(curve)
    arms = len({arm for arm, _ in found})
    most_lines = min(_MOST_LINES_OF_AN_ARM, max(3, _MOST_SEED_LINES // max(arms, 1)))
    return {place: _course(curves, most_lines) for place, curves in found.items()}


def curve_of(curves: dict[str, Any], family: Family) -> tuple[np.ndarray, np.ndarray] | None:
    """Updates and finite values, both `(num,)`, if there are any."""
    group = curves.get(family.group) or {}
    key = next((key for key in family.keys if group.get(key)), None)
    if key is None:
        return None
    updates, values = (np.array(group[name], dtype=float) for name in ("update", key))  # null becomes NaN
    finite = np.isfinite(values)
    return (updates[finite], values[finite]) if finite.any() else None


def _thin(updates: np.ndarray, most: int) -> np.ndarray:
    return updates[np.unique(np.linspace(0, len(updates) - 1, min(len(updates), most)).round().astype(int))]


def _course(curves: list[tuple[np.ndarray, np.ndarray]], most_lines: int) -> Course:
    """Means over seeds where all of them were still training."""
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
    return Course(grid, mean, np.maximum(mean - std, lowest), np.minimum(mean + std, highest), seeds, coarse, len(curves))


def spans_decades(values: dict[Place, np.ndarray]) -> bool:
    """Whether a linear scale would hide what is small: all values are positive, and one data set spans a factor of 20."""
    sets: dict[str, list[np.ndarray]] = {}
    for (_, dataset), found in values.items():
        sets.setdefault(dataset, []).append(found)
    spans = [(min(map(np.min, found)), max(map(np.max, found))) for found in sets.values()]
    return all(low > 0 for low, _ in spans) and any(bool(high > 20 * low) for low, high in spans)


def lines_left_out(shown: dict[Place, Course]) -> str:
    """A note on how many seeds are drawn as single lines; empty where all are."""
    crowded = [course for course in shown.values() if len(course.seeds) not in (0, course.num_runs)]
    if not crowded:
        return ""
    most, drawn = max(course.num_runs for course in crowded), max(len(course.seeds) for course in crowded)
    return f"Of up to {counted(most, 'seed')} an arm, the first {drawn} are drawn as lines; means and bands are of all."


def courses_as_csv(shown: dict[str, dict[Place, Course]]) -> str:
    """What is drawn as curves: the mean over seeds, and the ends of the band around it."""
    rows = [
        (title, dataset, arm, f"{update:g}", *(f"{value:.6g}" for value in values), course.num_runs)
        for title, of_title in shown.items() for (arm, dataset), course in of_title.items()
        for update, *values in zip(course.updates, course.mean, course.low, course.high, strict=True)
    ]  # fmt: skip
    return _csv(("curve", "data set", "arm", "update", "mean", "low", "high", "runs"), rows)


def values_as_csv(values: dict[str, dict[Place, list[tuple[int, float]]]]) -> str:
    """What every run scored."""
    rows = [
        (metric, dataset, arm, seed, f"{value:.9g}")
        for metric, of_metric in values.items() for (arm, dataset), found in of_metric.items() for seed, value in found
    ]  # fmt: skip
    return _csv(("metric", "data set", "arm", "seed", "value"), rows)


def _csv(columns: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


def final_values(results: Iterable[RunResult], metric: str) -> dict[Place, list[tuple[int, float]]]:
    """For every arm and data set, (seed, value) of the finished runs that have this metric, by seed."""
    values: dict[Place, list[tuple[int, float]]] = {}
    for result in compared(results):
        value = result.results.get(metric)
        if value is not None and np.isfinite(value):
            values.setdefault((result.arm, result.dataset), []).append((result.seed, float(value)))
    return values
