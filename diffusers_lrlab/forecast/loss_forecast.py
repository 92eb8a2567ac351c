"""Predicted losses of schedules that were not run, from curves of schedules that were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..core.errors import LabError
from ..core.words import counted
from .law_check import Check, Floor, check_laws
from .law_fits import FittedModel, LossCurve

_POINTS = 200  # of a predicted curve
_DEEPER = 0.02  # of the peak
SeedCurves = Mapping[int, LossCurve]  # curves of one schedule by seed


@dataclass(frozen=True, eq=False)
class Candidate:
    """A schedule to predict the loss of."""

    label: str
    lrs: np.ndarray  # of each update, `(updates,)`
    warmup_updates: int


@dataclass(frozen=True, eq=False)
class Predicted:
    """The predicted losses of a schedule."""

    candidate: Candidate
    updates: np.ndarray  # after warm-up, `(points,)`
    losses: np.ndarray  # means over seeds, `(points,)`
    interval: tuple[float, float] | None  # of the last one, over seeds, of 95 %; `None` for one seed
    extrapolates: list[str]  # in what it goes beyond the runs

    @property
    def final(self) -> float:
        return float(self.losses[-1])


def notes_of_extrapolation(predicted: Sequence[Predicted]) -> list[str]:
    """What the predictions go beyond, in sentences; schedules that go beyond the same share one."""
    beyond: dict[str, list[str]] = {}
    for one in predicted:
        if one.extrapolates:
            beyond.setdefault("; ".join(one.extrapolates), []).append(one.candidate.label)
    notes = []
    for how, labels in beyond.items():
        whose = f"All {counted(len(labels), 'schedule')}" if 1 < len(labels) == len(predicted) else ", ".join(labels)
        verb = "extrapolates" if len(labels) == 1 else "extrapolate"
        notes.append(f"{whose} {verb}, which the check does not cover: {how}.")
    return notes


@dataclass(frozen=True)
class Forecaster:
    """Laws checked on runs, and the chosen one fitted to all of them."""

    schedules: list[SeedCurves]
    floor: Floor
    check: Check

    @cached_property
    def curves(self) -> list[LossCurve]:
        """Means over the seeds of each schedule."""
        return [mean_curve([*of_seeds.values()]) for of_seeds in self.schedules]

    @cached_property
    def fitted(self) -> FittedModel:
        return self.check.best.fit(self.curves, self.floor)

    @cached_property
    def by_seed(self) -> list[FittedModel]:
        """The same for each of the seeds that all schedules have, if there are two or more."""
        seeds = set.intersection(*(set(of_seeds) for of_seeds in self.schedules))
        fits = [[of_seeds[seed] for of_seeds in self.schedules] for seed in sorted(seeds)] if len(seeds) > 1 else []
        return [self.check.best.fit(curves, self.floor) for curves in fits if self._is_above_floor(curves)]

    def _is_above_floor(self, curves: Sequence[LossCurve]) -> bool:
        """Whether the chosen model can be fitted; the losses of one seed may be below the floor where their mean is not."""
        if not self.check.best.with_floor:
            return True
        if self.check.best.by_part:
            return all((curve.parts > self.floor).all() for curve in curves if curve.parts is not None)
        return all(curve.losses.min() > np.mean(self.floor) for curve in curves)  # type: ignore[arg-type]

    def predict(self, candidate: Candidate) -> Predicted:
        """Raises a `LabError` if no law passed the check."""
        if not self.check.is_passed:
            raise LabError(self.check.describe())
        lrs, warmup = candidate.lrs, candidate.warmup_updates
        updates = np.unique(np.linspace(min(warmup + 1, len(lrs)), len(lrs), _POINTS).round().astype(int))
        losses = self.fitted.predict(lrs, warmup, updates)
        finals = [float(one.predict(lrs, warmup, updates[-1:])[0]) for one in self.by_seed]
        interval = _interval(float(losses[-1]), finals) if len(finals) > 1 else None
        return Predicted(candidate, updates, losses, interval, extrapolations(candidate, self.curves))


def make_forecaster(schedules: Sequence[SeedCurves], floor: Floor, law: str | None = None) -> Forecaster:
    """
    Checks the laws on curves of one or more schedules, each of one or more seeds; `law` allows only one law.

    `floor` is the loss that no model goes below: a number, one for each part of the noise levels, or `None`. Raises a
    `LabError` for curves with too few points. Whether a law can be trusted is in `check` of the result.
    """
    curves = [mean_curve([*of_seeds.values()]) for of_seeds in schedules]
    return Forecaster([*schedules], floor, check_laws(curves, floor, law))


def mean_curve(curves: Sequence[LossCurve]) -> LossCurve:
    """The mean over seeds of the same schedule, at the updates that all have."""
    shared = curves[0].updates
    for curve in curves[1:]:
        shared = np.intersect1d(shared, curve.updates)
    kept = [curve.where(np.isin(curve.updates, shared)) for curve in curves]
    parts = [curve.parts for curve in kept if curve.parts is not None]
    mean_parts = np.mean(parts, axis=0) if len(parts) == len(kept) else None
    first, losses = kept[0], np.mean([curve.losses for curve in kept], axis=0)
    return LossCurve(first.label, first.lrs, first.warmup_updates, shared, losses, mean_parts)


def _interval(center: float, values: Sequence[float]) -> tuple[float, float]:
    """Student's interval of a mean of 95 %, around a center."""
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
    return center - half, center + half


def extrapolations(candidate: Candidate, curves: Sequence[LossCurve]) -> list[str]:
    """The ways in which a schedule goes beyond those of the curves."""
    found, lrs, peak = [], candidate.lrs, float(candidate.lrs.max())
    longest, shortest = (pick(curve.num_updates for curve in curves) for pick in (max, min))
    if len(lrs) > longest:
        found.append(f"{len(lrs) / longest:.3g} times as long as the longest run")
    elif len(lrs) < shortest:
        found.append(f"{len(lrs) / shortest:.2g} times as long as the shortest run")
    peaks = [curve.peak for curve in curves]
    if not min(peaks) * (1 - 1e-6) <= peak <= max(peaks) * (1 + 1e-6):
        known = f"{min(peaks):g}" if min(peaks) == max(peaks) else f"{min(peaks):g} to {max(peaks):g}"
        found.append(f"peak {peak:g}, while the runs have {known}")
    lowest = min(float(curve.lrs[-1] / curve.peak) for curve in curves)
    if (low := float(lrs[min(candidate.warmup_updates, len(lrs) - 1) :].min() / peak)) < lowest - _DEEPER:
        found.append(f"falls to {low:.0%} of the peak, the runs to {lowest:.0%}")
    if _rises(lrs, candidate.warmup_updates) and not any(_rises(one.lrs, one.warmup_updates) for one in curves):
        found.append("rises again, which no run does")
    return found


def _rises(lrs: np.ndarray, warmup_updates: int) -> bool:
    return bool((np.diff(lrs[warmup_updates:]) > 1e-9 * lrs.max()).any())
