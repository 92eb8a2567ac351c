"""Comparison of the learning rates that ran with a schedule (`--expect`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.errors import LabError
from ..schedules.audit import TOLERANCE
from ..schedules.expected import resolve_length, schedule_curves
from ..schedules.schedule import Schedule, resolve_schedule
from .evidence import AuditedOptimizer

_TOLERANCES = {None: TOLERANCE, "torch.float64": TOLERANCE, "torch.float32": 1e-6}
_COARSE = 1e-2  # of learning rates in bfloat16 or float16


@dataclass(frozen=True)
class Expectation:
    """A schedule by which the optimizers of a program should have been updated."""

    spec: str
    num_updates: int | None = None  # of the whole run; otherwise as many as ran
    num_warmup_steps: float = 0
    learning_rate: float | None = None  # the peak; otherwise the highest rate of each group
    beta1: float | None = None  # of the optimizer, if the schedule sets the momentum; otherwise the highest one

    def check(self) -> None:
        """Raises a `LabError`, before the program is started, for a schedule that cannot be compared."""
        schedule = resolve_schedule(self.spec)
        if schedule.follows_metric:
            raise LabError(f"--expect {self.spec}: must be a function of the clock, got a schedule that follows a loss.")
        if self.num_updates is not None:
            schedule_curves(schedule, self.learning_rate or 1.0, self.beta1 or 0.9, self.num_warmup_steps, self.num_updates)
        elif self.num_warmup_steps < 1:
            resolve_length(schedule, self.num_warmup_steps, 1)


@dataclass(frozen=True)
class Comparison:
    """The result for one optimizer."""

    lr: np.ndarray  # expected, `(updates, groups)`
    largest_deviation: float  # of the learning rate relative to its peak, or of the momentum
    first_deviating_update: int | None
    first_update: int  # of the run, that the program did: not 0 after a resume

    @property
    def holds(self) -> bool:
        return self.first_deviating_update is None


def compare(optimizer: AuditedOptimizer, expectation: Expectation) -> Comparison:
    """Compares each update of an optimizer with the schedule."""
    schedule = resolve_schedule(expectation.spec)
    lr, momenta = optimizer.lr, optimizer.of_groups("m")
    first = _first_update(optimizer)
    total = first + len(lr) if expectation.num_updates is None else expectation.num_updates
    expected, deviation = np.zeros_like(lr), np.zeros(len(lr))
    updates = np.minimum(first + np.arange(len(lr)), total - 1)  # after its end, a schedule stays where it is
    for group, (applied, exists) in enumerate(zip(lr.T, optimizer.exists.T, strict=True)):
        peak = _peak(schedule, applied, expectation, total, updates[exists])
        beta1 = expectation.beta1 if expectation.beta1 is not None else np.nanmax(momenta[:, group], initial=0.0)
        curve, beta_curve = schedule_curves(schedule, peak, float(beta1), expectation.num_warmup_steps, total)
        expected[:, group] = np.where(exists, curve[updates], np.nan)
        tolerance = _TOLERANCES.get(optimizer.dtypes[group], _COARSE)
        wrong = _above(tolerance, (applied - curve[updates]) / (peak or 1.0))
        if schedule.sets_momentum:
            wrong = np.maximum(wrong, _above(TOLERANCE, momenta[:, group] - beta_curve[updates]))
        deviation = np.maximum(deviation, np.where(exists, wrong, 0.0))
    deviating = np.flatnonzero(deviation)
    first_wrong = first + int(deviating[0]) if len(deviating) else None
    if first + len(lr) > total and first_wrong is None:
        first_wrong = total  # more updates than told
    return Comparison(expected, float(deviation.max(initial=0.0)), first_wrong, first)


def _above(tolerance: float, difference: np.ndarray) -> np.ndarray:
    """Absolute differences, without those within the tolerance; 1 where a value is not known."""
    off = np.nan_to_num(np.abs(difference), nan=1.0)
    return np.where(off > tolerance, off, 0.0)


def _first_update(optimizer: AuditedOptimizer) -> int:
    """The updates before a resume: those that the optimizer has counted, or by the scheduler's position at its first one."""
    if optimizer.own_count:
        return optimizer.own_count
    position = optimizer.column("s")[0] - (optimizer.early_steps if optimizer.own_count == 0 else 0)
    return round(position / max(optimizer.steps_per_update, 1.0)) if np.isfinite(position) and position > 0 else 0


def _peak(schedule: Schedule, applied: np.ndarray, expectation: Expectation, total: int, updates: np.ndarray) -> float:
    if expectation.learning_rate is not None:
        return expectation.learning_rate
    highest = float(np.nanmax(applied, initial=0.0))
    # Of a schedule that rises above the optimizer's rate, or does not reach it at these updates.
    curve = schedule_curves(schedule, 1.0, expectation.beta1 or 0.9, expectation.num_warmup_steps, total)[0]
    top = float(curve[updates].max(initial=0.0))
    return highest / top if top else highest
