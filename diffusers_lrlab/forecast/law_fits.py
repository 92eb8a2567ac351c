"""Laws of the loss fitted to validation losses of runs, and the losses that they predict for other schedules."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .loss_laws import Law, RateSums

_DELTA = 1e-3  # of Huber's loss on the logarithm, as in both papers
_POLISHED = 2  # starts that are fitted to the end
_INSIDE = 1e-12  # distance of a start from its bounds


@dataclass(frozen=True, eq=False)
class LossCurve:
    """The validation losses of a run, or their means over runs that differ in the seed alone."""

    label: str
    lrs: np.ndarray  # of each update, float64 `(updates,)`
    warmup_updates: int
    updates: np.ndarray  # done before each validation, int64 `(points,)`
    losses: np.ndarray  # `(points,)`
    parts: np.ndarray | None = None  # the same of equal parts of the noise levels, `(points, parts)`

    @property
    def num_updates(self) -> int:
        return len(self.lrs)

    @property
    def peak(self) -> float:
        return float(self.lrs.max())

    def where(self, kept: np.ndarray) -> LossCurve:
        """The curve with some of its points, by a mask or by indices."""
        parts = None if self.parts is None else self.parts[kept]
        return dataclasses.replace(self, updates=self.updates[kept], losses=self.losses[kept], parts=parts)

    def part(self, index: int) -> LossCurve:
        """The curve of one part of the noise levels."""
        assert self.parts is not None
        return dataclasses.replace(self, losses=self.parts[:, index], parts=None)


@dataclass(frozen=True)
class Fit:
    """A fitted law."""

    law: Law
    floor: float
    peak: float  # that rates are relative to
    length: float  # in updates, that times are relative to
    coefficients: dict[str, float]  # L0, above the floor, and those of the law
    shape: dict[str, float]

    def predict(self, lrs: np.ndarray, warmup_updates: int, updates: np.ndarray) -> np.ndarray:
        """The loss after numbers of updates with these rates, never below the floor: float64 `(points,)`."""
        sums = RateSums.of(lrs, warmup_updates, updates, self.peak, self.length)
        above = _columns(self.law, sums, self.shape) @ np.array([*self.coefficients.values()])
        return self.floor + np.maximum(above, 0.0)


def fit_law(law: Law, curves: Sequence[LossCurve], floor: float = 0.0) -> Fit:
    """
    A law fitted to the losses above a floor, by Huber's loss of their logarithms. Starting points are exponents on a grid,
    with coefficients by least squares; the best of them are optimised to the end. All losses must be above the floor.
    """
    from scipy.optimize import least_squares, nnls

    peak, length = max(curve.peak for curve in curves), max(curve.num_updates for curve in curves)
    sums = [RateSums.of(curve.lrs, curve.warmup_updates, curve.updates, peak, length) for curve in curves]
    losses = np.concatenate([curve.losses for curve in curves]) - floor
    names, num = [*law.shape], 1 + len(law.coefficients)

    def columns(shape: Mapping[str, float]) -> np.ndarray:
        return np.concatenate([_columns(law, one, shape) for one in sums])

    def residuals(point: np.ndarray) -> np.ndarray:
        predicted = columns(dict(zip(names, np.exp(point[num:]), strict=True))) @ point[:num]
        return np.log(np.maximum(predicted, 1e-3 * losses.min()) / losses)

    starts = []
    for values in itertools.product(*(law.shape[name][2] for name in names)):
        relative = columns(dict(zip(names, values, strict=True))) / losses[:, None]
        coefficients, error = nnls(relative, np.ones(len(losses)))
        starts.append((error, [*coefficients, *np.log(values)]))
    low, high = ([bound] * num + [float(np.log(law.shape[name][side])) for name in names]
                 for side, bound in ((0, 0.0), (1, np.inf)))  # fmt: skip
    found = []
    for _, start in sorted(starts, key=lambda pair: pair[0])[: _POLISHED if names else 1]:
        inside = np.clip(start, np.array(low) + _INSIDE, np.array(high) - _INSIDE)
        options = {"loss": "huber", "f_scale": _DELTA, "x_scale": "jac", "max_nfev": 100}
        found.append(least_squares(residuals, inside, bounds=(low, high), **options))
    best = min(found, key=lambda result: result.cost).x
    named = dict(zip(("L0", *law.coefficients), best[:num].tolist(), strict=True))
    return Fit(law, floor, peak, length, named, dict(zip(names, np.exp(best[num:]).tolist(), strict=True)))


def _columns(law: Law, sums: RateSums, shape: Mapping[str, float]) -> np.ndarray:
    return np.concatenate([np.ones((len(sums.updates), 1)), law.columns(sums, shape)], axis=1)


@dataclass(frozen=True)
class Model:
    """A law with or without the floor, for the loss as a whole or for each part of the noise levels."""

    law: Law
    with_floor: bool = False
    by_part: bool = False

    @property
    def name(self) -> str:
        above, by_part = ", above the floor" * self.with_floor, ", by noise level" * self.by_part
        return f"{self.law.name}{above}{by_part}"

    def fit(self, curves: Sequence[LossCurve], floor: float | np.ndarray | None) -> FittedModel:
        """`floor` is a number, or one for each part of the noise levels."""
        floors = np.atleast_1d(floor if floor is not None and self.with_floor else 0.0)
        if not self.by_part:
            return FittedModel(self, [fit_law(self.law, curves, float(floors.mean()))])
        assert curves[0].parts is not None
        floors = np.broadcast_to(floors, curves[0].parts.shape[1])
        fits = [fit_law(self.law, [curve.part(i) for curve in curves], float(own)) for i, own in enumerate(floors)]
        return FittedModel(self, fits)


@dataclass(frozen=True)
class FittedModel:
    """A model fitted to curves."""

    model: Model
    fits: list[Fit]  # one, or one for each part

    def predict(self, lrs: np.ndarray, warmup_updates: int, updates: np.ndarray) -> np.ndarray:
        """The loss after numbers of updates, `(points,)`."""
        return np.mean([fit.predict(lrs, warmup_updates, updates) for fit in self.fits], axis=0)
