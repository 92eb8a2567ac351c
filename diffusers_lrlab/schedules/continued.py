"""Curves that continue another one: how far two agree, and the schedules of extended and branched runs."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..core.errors import LabError, must_be
from ..core.spec import format_spec
from .expected import schedule_curves
from .registries import SCHEDULERS
from .resolve import describe_schedule, resolve_schedule
from .schedule import Schedule

_HAVE_DECAY = ("warmup_stable_decay", "trapezoid")
_CONSTANT = ("constant", "constant_with_warmup")


@dataclass(frozen=True)
class RunCurve:
    """The learning rate and momentum of each update of a run."""

    schedule: Schedule
    lr: float  # the peak
    momentum: float | None
    warmup_updates: int
    num_updates: int

    @cached_property
    def _curves(self) -> tuple[np.ndarray, np.ndarray]:
        return schedule_curves(self.schedule, self.lr, self.momentum, self.warmup_updates, self.num_updates)

    @property
    def lrs(self) -> np.ndarray:
        return self._curves[0]

    @property
    def momenta(self) -> np.ndarray:
        return self._curves[1]

    @property
    def text(self) -> str:
        return describe_schedule(self.schedule)

    def lasting(self, num_updates: int) -> "RunCurve":
        """The curve of the same schedule over another number of updates."""
        return dataclasses.replace(self, num_updates=num_updates)

    def with_schedule(self, spec: str, num_updates: int) -> "RunCurve":
        """The curve of another learning-rate schedule over another number of updates, with the same momentum schedule."""
        named = resolve_schedule(spec)
        schedule = dataclasses.replace(self.schedule, name=named.name, kwargs=named.kwargs)
        return dataclasses.replace(self, schedule=schedule, num_updates=num_updates)


def agreeing_updates(one: RunCurve, other: RunCurve, tolerance: float = 0.0) -> int:
    """Updates from the start whose rates differ by at most this share of the peak, and whose momenta are equal."""
    num = min(one.num_updates, other.num_updates)
    apart = np.abs(one.lrs[:num] - other.lrs[:num]) > tolerance * one.lr
    momenta = one.momenta[:num], other.momenta[:num]
    apart |= (momenta[0] != momenta[1]) & ~np.isnan(momenta[0])
    return int(np.argmax(apart)) if apart.any() else num


def rewound(curve: RunCurve, num_updates: int, at: int) -> RunCurve:
    """The curve of a run that takes up the same schedule over `num_updates` at the update `at`."""
    spec = _as_part(curve)
    return _spliced(curve, num_updates, [spec, spec], [at], [curve.num_updates, num_updates])


def rewarmed(curve: RunCurve, num_updates: int, at: int, num_warmup: int) -> RunCurve:
    """
    The curve of a run that warms up again from update `at`: over `num_warmup` updates, its rate moves along a line to the
    same schedule over `num_updates`, which it then follows.
    """
    longer = curve.lasting(num_updates)
    start, end = (float(value / curve.lr) for value in (curve.lrs[at - 1], longer.lrs[at + num_warmup]))
    rise = format_spec("piecewise", {"updates": [0.0, 1.0], "values": [start, end]})
    spec = _as_part(curve)
    lengths = [curve.num_updates, 0, num_updates]
    return _spliced(curve, num_updates, [spec, rise, spec], [at, at + num_warmup], lengths)


def followed_by(curve: RunCurve, num_updates: int, at: int, spec: str, level: float = 1.0) -> RunCurve:
    """
    The curve of a run that another schedule takes over at the update `at`, with its own clock and a peak of `level`, as a
    share of the run's peak.
    """
    part = resolve_schedule(spec)
    if why := part.more_than_a_curve:
        raise must_be("--then", spec, "a schedule of the learning rate and the clock alone", f"this one {why}")
    return _spliced(curve, num_updates, [_as_part(curve), spec], [at], [curve.num_updates, 0], [1.0, level])


def cooled_down(curve: RunCurve, at: int, num_decay: int, decay_type: str) -> RunCurve:
    """
    The curve of a branch: the plateau that is reached at the update `at`, cooled down in `num_decay` updates.

    A constant rate, or one of a WSD before its decay, becomes the `warmup_stable_decay` of that length; any other schedule
    is spliced with the cool-down.
    """
    num_updates, name = at + num_decay, curve.schedule.name
    level = float(curve.lrs[at - 1] / curve.lr)
    if level == 1.0 and name in (*_CONSTANT, *_HAVE_DECAY):
        kept = ("min_lr", "min_lr_ratio", "warmup_type", "warmup_start_ratio")
        given = {key: curve.schedule.kwargs.get(key) for key in kept}
        given |= {"num_decay_steps": num_decay, "decay_type": decay_type}
        branch = curve.with_schedule(format_spec("warmup_stable_decay", given), num_updates)
        if agreeing_updates(curve, branch) >= at:
            return branch
    decay = {"num_stable_steps": 0, "num_decay_steps": num_decay, "decay_type": decay_type}
    parts = [_as_part(curve), format_spec("warmup_stable_decay", decay)]
    return _spliced(curve, num_updates, parts, [at], [curve.num_updates, 0], [1.0, level])


def is_on_plateau(curve: RunCurve, at: int) -> bool:
    """Whether warm-up is over after `at` updates, and the last rates were equal."""
    return curve.warmup_updates < at <= curve.num_updates and at > 1 and curve.lrs[at - 1] == curve.lrs[max(at - 2, 0)]


def last_update_on_plateau(curve: RunCurve) -> int:
    """The latest update from which a cool-down can start; 0 if there is none."""
    equal = np.flatnonzero(np.diff(curve.lrs) == 0) + 2
    equal = equal[equal > curve.warmup_updates]
    return int(equal[-1]) if equal.size else 0


def _as_part(curve: RunCurve) -> str:
    """The learning-rate schedule as a spec string for `splice`, its floor relative to the peak."""
    schedule = curve.schedule
    if why := schedule.more_than_a_curve:
        raise LabError(
            f"The schedule {curve.text!r} {why}, so no other curve can follow it. Only runs whose learning rate is a "
            "function of the clock alone can continue with another curve."
        )
    kwargs = dict(schedule.kwargs)
    if (floor := kwargs.pop("min_lr", None)) is not None:
        kwargs["min_lr_ratio"] = floor / curve.lr
    entry = SCHEDULERS[schedule.name or ""]
    defaults = {parameter.name: parameter.default for parameter in (*entry.parameters, *entry.common)}
    return format_spec(
        schedule.name or "", {key: value for key, value in kwargs.items() if _is_given(value, defaults.get(key))}
    )


def _is_given(value: object, default: object) -> bool:
    return value is not None and value != (list(default) if isinstance(default, tuple) else default)


def _spliced(
    curve: RunCurve,
    num_updates: int,
    schedules: list[str],
    boundaries: list[int],
    lengths: list[int],
    scales: list[float] | None = None,
) -> RunCurve:
    kwargs = {"schedules": schedules, "boundaries": boundaries, "lengths": lengths, "scales": scales}
    spec = format_spec("splice", kwargs)
    return curve.with_schedule(spec, num_updates)
