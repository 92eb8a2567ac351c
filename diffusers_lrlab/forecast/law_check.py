"""Whether to trust a law of the loss: its errors on losses that it was not fitted to, beside those of naive forecasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import LabError, did_you_mean
from ..core.listing import aligned
from ..core.words import counted
from .law_fits import LossCurve, Model
from .loss_laws import LAWS, POWER_OF_UPDATES

LEAST_POINTS = 10  # of a curve, after its warm-up
LAST = 0.2  # share of a curve whose losses are predicted
_CUTS = (0.6, 0.8, 1.0)  # of the losses of one or two curves: each part is predicted from what came before
_WHOLE = 3  # schedules from which on whole curves are left out
LAST_VALUE = "last value of the nearest schedule"
Floor = float | np.ndarray | None


@dataclass(frozen=True)
class Check:
    """Relative errors of predicted losses by trial, `(trials,)` each: mean of |predicted / observed - 1|."""

    held_out: str  # the losses that were predicted
    errors: dict[Model, np.ndarray]
    naive: dict[str, np.ndarray]
    notes: tuple[str, ...] = ()  # models that could not be tried

    @property
    def best(self) -> Model:
        """The model with the smallest mean error over all trials."""
        return min(self.errors, key=lambda model: float(self.errors[model].mean()))

    @property
    def best_naive(self) -> str:
        return min(self.naive, key=lambda name: float(self.naive[name].mean()))

    @property
    def error(self) -> float:
        """
        The mean error of choosing a law: in each trial, that of the model with the smallest mean error in the others, since
        the error by which a model was chosen is too low.
        """
        table = np.array([*self.errors.values()])
        others = table.sum(axis=1, keepdims=True) - table
        return float(table[others.argmin(axis=0), np.arange(table.shape[1])].mean())

    @property
    def is_passed(self) -> bool:
        """Whether choosing a law has a smaller error than each naive forecast."""
        return self.error < float(self.naive[self.best_naive].mean())

    def describe(self) -> str:
        """The errors as a table, and the outcome."""
        ordered = sorted(self.errors, key=lambda model: float(self.errors[model].mean()))
        rows = [["law", "error"], *([model.name, f"{self.errors[model].mean():.3%}"] for model in ordered)]
        rows += [["law chosen by the other trials", f"{self.error:.3%}"]]
        rows += [[f"baseline: {name}", f"{values.mean():.3%}"] for name, values in self.naive.items()]
        if self.is_passed:
            outcome = f"A chosen law beats both baselines, so {self.best.name!r} is used."
        else:
            outcome = (
                f"No forecast: a chosen law has an error of {self.error:.3%} on unseen losses, and the baseline "
                f"{self.best_naive!r} has {self.naive[self.best_naive].mean():.3%}. Hint: give runs of more schedules, or "
                "longer ones that are validated more often."
            )
        return "\n".join([f"Error of {self.held_out}:", aligned(rows), *self.notes, outcome])

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "held_out": self.held_out,
            "errors": {model.name: values.tolist() for model, values in self.errors.items()},
            "naive_errors": {name: values.tolist() for name, values in self.naive.items()},
            "law": self.best.name,
            "error_of_chosen": self.error,
            "is_passed": self.is_passed,
            "notes": [*self.notes],
        }


def check_input(curves: Sequence[LossCurve], law: str | None) -> None:
    """Raises a `LabError` for a curve with few points, or a law that is unknown or needs more schedules."""
    for curve in curves:
        if len(curve.losses) < LEAST_POINTS:
            raise LabError(
                f"{curve.label}: must have {LEAST_POINTS} validation losses or more after its warm-up, got "
                f"{len(curve.losses)}; a law has up to seven parameters. Hint: train with a smaller --validation_steps, or "
                "a study with more evaluation_points."
            )
    models_for(curves, None, law)


def check_laws(curves: Sequence[LossCurve], floor: Floor, law: str | None = None) -> Check:
    """
    Fits each law to some of the losses and predicts others; `law` allows only one law.

    With three schedules or more, each is left out in turn, and the last fifth of its losses is predicted from the others.
    With fewer, the losses of each run from 60 to 80 % and from 80 to 100 % are predicted from what came before.
    """
    check_input(curves, law)
    models, notes = models_for(curves, floor, law)
    if len(curves) < _WHOLE:
        notes.append(f"With fewer than {_WHOLE} schedules none is left out, so the check does not cover other schedules.")
    trials = list(_trials(curves))
    errors: dict[Model, list[float]] = {model: [] for model in models}
    naive: dict[str, list[float]] = {LAST_VALUE: [], POWER_OF_UPDATES.name: []}
    for fitted_to, held_out, last in trials:
        for model, own in [*errors.items(), (Model(POWER_OF_UPDATES), naive[POWER_OF_UPDATES.name])]:
            fitted = model.fit(fitted_to, floor)
            own.append(_error(fitted.predict(held_out.lrs, held_out.warmup_updates, held_out.updates), held_out))
        naive[LAST_VALUE].append(_error(np.full(len(held_out.losses), last), held_out))
    left_out = "the last fifth of each schedule, predicted from the others"
    in_time = "losses late in each run, predicted from what came before"
    return Check(
        left_out if len(curves) >= _WHOLE else in_time,
        {model: np.array(values) for model, values in errors.items()},
        {name: np.array(values) for name, values in naive.items()},
        tuple(notes),
    )


def models_for(curves: Sequence[LossCurve], floor: Floor, law: str | None) -> tuple[list[Model], list[str]]:
    """The models that these curves can be fitted by, and a note on each kind that cannot."""
    if law is not None and law not in LAWS:
        raise LabError(f"--law {law}: must be one of {', '.join(LAWS)}, got {law!r}.{did_you_mean(law, LAWS)}")
    num = len(curves) - 1 if len(curves) >= _WHOLE else len(curves)  # schedules in each fit of the check
    asked = [each for name, each in LAWS.items() if law in (None, name)]
    laws = [each for each in asked if num >= each.least_schedules]
    if not laws:
        raise LabError(
            f"--law {law}: must be fitted to {asked[0].least_schedules} schedules or more, got "
            f"{counted(num, 'schedule')}. Hint: give runs of more schedules to --from, or leave out --law."
        )
    notes = [f"{each.name} needs {each.least_schedules} schedules to fit." for each in asked if each not in laws]
    models = [Model(each) for each in laws]
    has_parts = all(curve.parts is not None for curve in curves)
    by_part = [each for each in laws if each.least_schedules == 1] if has_parts else []
    models += [Model(each, by_part=True) for each in by_part]
    if floor is not None and all(curve.losses.min() > np.mean(floor) for curve in curves):
        models += [Model(each, True) for each in laws]
        if by_part and _is_below_parts(curves, np.asarray(floor)):
            models += [Model(each, True, True) for each in by_part]
        elif by_part:
            notes.append(
                "The floor of the loss at each noise level is not known, so laws by noise level are fitted without one."
            )
    elif floor is not None:
        lowest = min(curve.losses.min() for curve in curves)
        notes.append(
            f"The floor, {np.mean(floor):.6g}, is not below all losses ({lowest:.6g}), so no law is fitted above it."
        )
    return models, notes


def _is_below_parts(curves: Sequence[LossCurve], floor: np.ndarray) -> bool:
    return floor.ndim == 1 and all((curve.parts.min(axis=0) > floor).all() for curve in curves if curve.parts is not None)


def _trials(curves: Sequence[LossCurve]) -> Iterator[tuple[list[LossCurve], LossCurve, float]]:
    """Curves to fit, the points to predict, and the naive forecast of them by a last value."""
    if len(curves) >= _WHOLE:
        for held_out in curves:
            rest = [curve for curve in curves if curve is not held_out]
            yield (
                rest,
                held_out.where(held_out.updates > (1 - LAST) * held_out.num_updates),
                nearest(held_out, rest).losses[-1],
            )
        return
    for start, end in zip(_CUTS[:-1], _CUTS[1:], strict=True):
        begun = [_between(curve, 0.0, start) for curve in curves]
        for curve, before in zip(curves, begun, strict=True):
            yield begun, _between(curve, start, end), before.losses[-1]


def _between(curve: LossCurve, start: float, end: float) -> LossCurve:
    """The losses between two shares of all of them, of which a warm-up has none."""
    first, last = (round(share * len(curve.losses)) for share in (start, end))
    return curve.where(np.arange(first, last))


def _error(predicted: np.ndarray, curve: LossCurve) -> float:
    return float(np.abs(predicted / curve.losses - 1).mean())


def nearest(curve: LossCurve, others: Sequence[LossCurve]) -> LossCurve:
    """The curve with the most similar schedule: mean difference of the rates over the run, and ratio of the lengths."""

    def distance(other: LossCurve) -> float:
        shares, peak = np.linspace(0, 1, 201), max(curve.peak, other.peak)
        rates = [np.interp(shares, np.linspace(0, 1, each.num_updates), each.lrs / peak) for each in (curve, other)]
        return float(np.abs(rates[0] - rates[1]).mean()) + abs(np.log(curve.num_updates / other.num_updates))

    return min(others, key=distance)
