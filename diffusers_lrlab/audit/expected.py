"""Comparison of the learning rates that ran with a schedule (`--expect`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.errors import LabError
from ..schedules.audit import TOLERANCE
from ..schedules.expected import resolve_length, schedule_curves
from ..schedules.resolve import resolve_schedule
from ..schedules.schedule import Schedule
from .reading import AuditedOptimizer

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
    for group, applied in enumerate(lr.T):
        peak = _peak(schedule, applied, expectation, total)
        beta1 = expectation.beta1 if expectation.beta1 is not None else np.nanmax(momenta[:, group], initial=0.0)
        curve, beta_curve = schedule_curves(schedule, peak, float(beta1), expectation.num_warmup_steps, total)
        updates = np.minimum(first + np.arange(len(lr)), total - 1)  # after its end, a schedule stays where it is
        expected[:, group] = curve[updates]
        tolerance = _TOLERANCES.get(optimizer.dtypes[group] if optimizer.dtypes else None, _COARSE)
        deviation = np.maximum(deviation, _above(tolerance, (applied - expected[:, group]) / (peak or 1.0)))
        if schedule.sets_momentum:
            deviation = np.maximum(deviation, _above(TOLERANCE, momenta[:, group] - beta_curve[updates]))
    wrong = np.flatnonzero(deviation)
    first_wrong = first + int(wrong[0]) if len(wrong) else None
    if first + len(lr) > total and first_wrong is None:
        first_wrong = total  # more updates than told
    return Comparison(expected, float(deviation.max(initial=0.0)), first_wrong, first)


def _above(tolerance: float, difference: np.ndarray) -> np.ndarray:
    """Absolute differences, without those within the tolerance; 1 where a value is not known."""
    off = np.nan_to_num(np.abs(difference), nan=1.0)
    return np.where(off > tolerance, off, 0.0)


def _first_update(optimizer: AuditedOptimizer) -> int:
    """The updates before a resume, by the position of the scheduler at the first update."""
    positions = optimizer.column("s")
    if not len(positions) or not np.isfinite(positions[0]) or positions[0] <= 0:
        return 0
    return round(positions[0] / max(steps_per_update(optimizer), 1.0))


def steps_per_update(optimizer: AuditedOptimizer) -> float:
    """How often the scheduler was stepped between two updates, on average; 0 without a scheduler."""
    positions = optimizer.column("s")
    if len(positions) < 2 or not np.isfinite(positions[[0, -1]]).all():
        return 0.0
    return float(positions[-1] - positions[0]) / (len(positions) - 1)


def _peak(schedule: Schedule, applied: np.ndarray, expectation: Expectation, total: int) -> float:
    if expectation.learning_rate is not None:
        return expectation.learning_rate
    highest = float(np.nanmax(applied, initial=0.0))
    # Of a schedule that rises above the optimizer's rate, or never reaches it.
    top = schedule_curves(schedule, 1.0, expectation.beta1 or 0.9, expectation.num_warmup_steps, total)[0].max()
    return highest / float(top) if top else highest
