"""The result of an audit: diagnoses of each optimizer, and the comparison with a schedule (`--expect`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from diffusers_lrlab.schedules.schedule import resolve_schedule

from ..core.errors import LabError
from ..schedules.audit import TOLERANCE, deviation
from ..schedules.expected import resolve_length, schedule_curves
from ..schedules.schedule import Schedule
from . import of_schedules, of_updates
from .evidence import AuditedOptimizer, AuditedProcess, Evidence, Finding

# A diagnosis looks at the evidence and returns a finding or `None`. A new one is a row here.
DIAGNOSES: tuple[Callable[[Evidence], Finding | None], ...] = (
    of_schedules.not_finite,
    of_updates.schedule_not_resumed,
    of_schedules.too_long,
    of_schedules.rose_after_end,
    of_schedules.too_short,
    of_schedules.still_warming_up,
    of_schedules.over_early,
    of_updates.ahead_of_updates,
    of_updates.high_at_first,
    of_schedules.never_scheduled,
    of_updates.discarded,
    of_schedules.rounded,
    of_updates.jumped,
    of_schedules.high_at_end,
    of_schedules.warmup_scaled,
    of_updates.summed,
    of_updates.clipped_early,
    of_schedules.rarely_stepped,
    of_updates.overflowed,
    of_updates.clipped,
    of_updates.unused,
    of_schedules.own_estimate,
    of_schedules.unseen_steps,
    of_schedules.engine_hides,
)
_OF_LENGTH = ("too_long", "rose_after_end", "too_short", "still_warming_up", "over_early", "high_at_end")
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


@dataclass(frozen=True)
class Section:
    """The result for one optimizer."""

    optimizer: AuditedOptimizer
    evidence: Evidence
    findings: list[Finding]
    comparison: Comparison | None
    not_compared: str | None = None  # why the expectation cannot be: a warm-up longer than a run that ended early, say


@dataclass(frozen=True)
class Audit:
    """The result for a program."""

    command: list[str]
    status: int  # of the program
    processes: list[AuditedProcess]  # the main one first
    sections: list[Section]
    expectation: Expectation | None
    differing_process: tuple[int, int] | None  # rank, and the first update whose rates are not those of the main process

    @property
    def num_others(self) -> int:
        """Processes that trained separately from the main process."""
        return sum(each.rank == self.processes[0].rank and bool(each.stepped) for each in self.processes[1:])

    @property
    def holds(self) -> bool:
        """Whether the expectation was met, which needs updates to compare."""
        comparisons = [section.comparison for section in self.sections]
        return self.expectation is None or bool(comparisons) and all(each is not None and each.holds for each in comparisons)


def make_audit(command: list[str], status: int, processes: list[AuditedProcess], expectation: Expectation | None) -> Audit:
    """Diagnoses the main process, and compares it with the expectation and with the other processes."""
    sections = []
    main = processes[0] if processes else AuditedProcess()
    is_complete = status == 0 and main.end is not None and main.end["error"] is None
    for optimizer in main.stepped:
        evidence = Evidence(main, optimizer, is_complete)
        comparison = not_compared = None
        try:
            comparison = None if expectation is None else compare(optimizer, expectation)
        except LabError as error:  # known only now, since it depends on the updates that ran
            not_compared = str(error)
        sections.append(Section(optimizer, evidence, diagnose(evidence), comparison, not_compared))
    return Audit(command, status, processes, sections, expectation, _differing(processes))


def _differing(processes: list[AuditedProcess]) -> tuple[int, int] | None:
    for other in processes[1:]:
        for number, optimizer in processes[0].optimizers.items():
            theirs = other.optimizers.get(number)
            if theirs is None or not theirs.rows or other.rank == processes[0].rank:
                continue
            common = min(len(optimizer.rows), len(theirs.rows))
            ours, others = optimizer.lead[:common], theirs.lead[:common]
            if wrong := np.flatnonzero(~np.isclose(ours, others, rtol=1e-9, atol=0, equal_nan=True)).tolist():
                return other.rank, wrong[0]
    return None


# --- diagnoses ----------------------------------------------------------------------------------------------------------


def diagnose(seen: Evidence) -> list[Finding]:
    """All findings about an optimizer, problems first."""
    found = [finding for diagnosis in DIAGNOSES if (finding := _guarded(diagnosis, seen)) is not None]
    if any(finding.name == "schedule_not_resumed" for finding in found):  # another length would be the wrong remedy
        found = [finding for finding in found if finding.name not in _OF_LENGTH]
    return sorted(found, key=lambda finding: not finding.is_problem)


def _guarded(diagnosis: Callable[[Evidence], Finding | None], seen: Evidence) -> Finding | None:
    """One diagnosis that fails costs a line, not the audit of a run."""
    name = diagnosis.__name__
    try:
        finding = diagnosis(seen)
    except Exception as error:
        finding = Finding(f"The diagnosis `{name}` failed: {type(error).__name__}: {error}.", is_problem=False)
    return finding and replace(finding, name=name)


# --- expected and applied learning rates ------------------------------------------------------------------------------


def compare(optimizer: AuditedOptimizer, expectation: Expectation) -> Comparison:
    """Compares each update of an optimizer with the schedule."""
    schedule = resolve_schedule(expectation.spec)
    lr, momenta = optimizer.lr, optimizer.of_groups("m")
    first = _first_update(optimizer)
    total = first + len(lr) if expectation.num_updates is None else expectation.num_updates
    expected, off = np.zeros_like(lr), np.zeros(len(lr))
    updates = np.minimum(first + np.arange(len(lr)), total - 1)  # after its end, a schedule stays where it is
    for group, (applied, exists) in enumerate(zip(lr.T, optimizer.exists.T, strict=True)):
        peak = _peak(schedule, applied, expectation, total, updates[exists])
        beta1 = expectation.beta1 if expectation.beta1 is not None else np.nanmax(momenta[:, group], initial=0.0)
        curve, beta_curve = schedule_curves(schedule, peak, float(beta1), expectation.num_warmup_steps, total)
        expected[:, group] = np.where(exists, curve[updates], np.nan)
        tolerance = _TOLERANCES.get(optimizer.dtypes[group], _COARSE)
        wrong = _above(tolerance, deviation(applied, curve[updates], peak))
        if schedule.sets_momentum:
            wrong = np.maximum(wrong, _above(TOLERANCE, deviation(momenta[:, group], beta_curve[updates])))
        off = np.maximum(off, np.where(exists, wrong, 0.0))
    deviating = np.flatnonzero(off)
    first_wrong = first + int(deviating[0]) if len(deviating) else None
    if first + len(lr) > total and first_wrong is None:
        first_wrong = total  # more updates than told
    return Comparison(expected, float(off.max(initial=0.0)), first_wrong, first)


def _above(tolerance: float, deviations: np.ndarray) -> np.ndarray:
    """Deviations above the tolerance, others as 0; 1 where a value is not known."""
    off = np.nan_to_num(deviations, nan=1.0)
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
