"""Findings about the learning rate that ran: what is wrong, why, and what to do.

A diagnosis is a function in `DIAGNOSES`. It looks at an optimizer in its process, and returns a finding or `None`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..core.words import agreeing, counted, times
from .expected import steps_per_update
from .reading import AuditedOptimizer, AuditedProcess

_CLOSE = 0.05  # relative difference of numbers of steps that is no finding
_JUMP = 1.5  # factor between consecutive updates


@dataclass(frozen=True)
class Finding:
    """A diagnosis that applies: a problem, or a note on what may be meant so."""

    name: str
    text: str  # cause and remedy
    is_problem: bool = True


@dataclass(frozen=True)
class Evidence:
    """An optimizer, its process, and whether the program ended by itself."""

    process: AuditedProcess
    optimizer: AuditedOptimizer
    is_complete: bool

    @property
    def lr(self) -> np.ndarray:
        return self.optimizer.lead

    @property
    def peak(self) -> float:
        return float(np.nanmax(self.lr, initial=0.0))

    @property
    def end(self) -> float:
        """The last learning rate relative to the highest one."""
        return float(self.lr[-1] / self.peak) if self.peak else 0.0

    @property
    def accumulated(self) -> int:
        """Backward passes of a usual update."""
        passes = self.optimizer.column("b")
        return int(np.nanmedian(passes)) if np.isfinite(passes).any() else 0

    @property
    def steps(self) -> float:
        """Scheduler steps per update."""
        return steps_per_update(self.optimizer)

    @property
    def length(self) -> float | None:
        """Steps that the scheduler was made for."""
        return (self.optimizer.scheduler or {}).get("length") or None

    @property
    def taken(self) -> float:
        """Scheduler steps until the run's end, with those before a resume."""
        positions = self.optimizer.column("s")
        return float(positions[-1] + self.steps) if len(positions) and np.isfinite(positions[-1]) else 0.0


def _stepped_per(seen: Evidence) -> str:
    return f"{times(round(seen.steps))} per update" if seen.steps >= 1 else f"once in {1 / seen.steps:.3g} updates"


def too_long(seen: Evidence) -> Finding | None:
    """The run ends before the schedule, which then ends too high."""
    if not seen.length or not seen.is_complete or seen.taken >= seen.length * (1 - _CLOSE) or seen.steps <= 0:
        return None
    if seen.end > 0.999 and np.nanmin(seen.lr[len(seen.lr) // 2 :]) > 0.999 * seen.peak:
        return None  # a constant rate
    ratio = seen.length / seen.taken
    reason = ""
    if abs(ratio - seen.accumulated) < 0.1 * ratio and seen.accumulated > 1:
        reason = f" It seems to count micro-batches: there are {seen.accumulated} backward passes in an update."
    remedy = f"give it {round(seen.optimizer.num_updates * max(seen.steps, 0))} steps, and its warm-up in the same unit"
    return Finding(
        "too_long",
        f"The schedule was made for {seen.length:,.0f} steps, and the run took {seen.taken:,.0f} of them (the scheduler was "
        f"stepped {_stepped_per(seen)}): it ended at {_percent(seen.end)} of the peak.{reason} Remedy: {remedy}.",
    )


def rose_after_end(seen: Evidence) -> Finding | None:
    """The scheduler is stepped beyond its length, where a cosine rises again."""
    positions = seen.optimizer.column("s")
    if not seen.length or len(seen.lr) < 3:
        return None
    after = np.flatnonzero(positions >= seen.length)
    if len(after) < 2:
        return None
    risen = float(np.nanmax(seen.lr[after]) - seen.lr[after[0]])
    if risen <= 0.01 * seen.peak:
        return None
    return Finding(
        "rose_after_end",
        f"The schedule of {seen.length:,.0f} steps ended at update {after[0]:,}, and the learning rate then rose again to "
        f"{_percent((seen.lr[after[0]] + risen) / seen.peak)} of the peak, since the scheduler was stepped "
        f"{_stepped_per(seen)}. Remedy: {_remedy_for_steps(seen)}.",
    )


def too_short(seen: Evidence) -> Finding | None:
    """The schedule is over long before the run."""
    positions = seen.optimizer.column("s")
    if not seen.length or rose_after_end(seen) or seen.taken <= seen.length * (1 + _CLOSE):
        return None
    if np.ptp(seen.lr) <= 1e-3 * seen.peak:
        return None
    ended = np.flatnonzero(positions >= seen.length)
    first = int(ended[0]) if len(ended) else seen.optimizer.num_updates
    left = seen.optimizer.num_updates - first
    if left <= _CLOSE * seen.optimizer.num_updates:
        return None
    return Finding(
        "too_short",
        f"The schedule of {seen.length:,.0f} steps ended at update {first:,}; the other {counted(left, 'update', ',')} ran at "
        f"its last learning rate, since the scheduler was stepped {_stepped_per(seen)}. Remedy: {_remedy_for_steps(seen)}.",
    )


def _remedy_for_steps(seen: Evidence) -> str:
    needed = round(seen.optimizer.num_updates * max(seen.steps, 1))
    if seen.steps > 1 + _CLOSE and abs(seen.steps - seen.accumulated) < 0.1:
        return "step the scheduler once per update, after optimizer.step(), not once per micro-batch"
    return f"make it for {needed:,} steps, the updates of the run times the steps of each"


def warmup_scaled(seen: Evidence) -> Finding | None:
    """The warm-up takes fewer updates than the steps it was made for."""
    warmup = (seen.optimizer.scheduler or {}).get("warmup")
    if not warmup or warmup < 2 or seen.steps < 1 + 2 * _CLOSE:
        return None
    updates = warmup / seen.steps
    return Finding(
        "warmup_scaled",
        f"The warm-up of {warmup:,.0f} scheduler steps lasts {updates:,.3g} updates, since the scheduler was stepped "
        f"{_stepped_per(seen)}. If you asked for {warmup:,.0f} updates, give it {round(warmup * seen.steps):,} steps.",
        is_problem=False,
    )


def still_warming_up(seen: Evidence) -> Finding | None:
    """The learning rate is highest at the end."""
    lr = seen.lr
    if len(lr) < 10 or not seen.is_complete or lr[-1] < seen.peak or lr[-1] <= lr[len(lr) // 2] * (1 + 1e-9):
        return None
    return Finding(
        "still_warming_up",
        f"The learning rate still rose at the last update, {seen.optimizer.num_updates - 1:,}: the run ended within the "
        "warm-up. Remedy: shorten the warm-up, or train longer.",
    )


def high_at_end(seen: Evidence) -> Finding | None:
    """The learning rate still falls at the end, of a scheduler whose length is not known."""
    lr = seen.lr
    if seen.length or not seen.is_complete or len(lr) < 10 or seen.end < 0.1:
        return None
    last = lr[-max(len(lr) // 10, 3) :]
    falls = bool(np.all(np.diff(last) < 0))
    if not falls:
        return None
    return Finding(
        "high_at_end",
        f"The learning rate still fell at the end, where it was {_percent(seen.end)} of its peak. If it should reach its "
        "lowest value, the schedule is too long for the run: make it for "
        f"{counted(seen.optimizer.num_updates, 'update', ',')}.",
        is_problem=False,
    )


def rarely_stepped(seen: Evidence) -> Finding | None:
    """The scheduler is stepped less often than the optimizer."""
    if not 0 < seen.steps < 1 - 2 * _CLOSE or seen.optimizer.num_updates < 10:
        return None
    return Finding(
        "rarely_stepped",
        f"The scheduler was stepped {_stepped_per(seen)}. That is usual for schedules by epoch; a schedule made for updates "
        "must be stepped after every optimizer.step().",
        is_problem=False,
    )


def never_scheduled(seen: Evidence) -> Finding | None:
    """There is a scheduler, and it is never stepped."""
    if seen.optimizer.scheduler is None or seen.optimizer.num_updates < 3 or seen.steps != 0:
        return None
    if np.ptp(seen.lr) > 0:
        return None
    return Finding(
        "never_scheduled",
        f"The scheduler ({seen.optimizer.scheduler['name']}) was never stepped, so the learning rate stayed at "
        f"{seen.lr[-1]:.4g}. Remedy: call scheduler.step() after every optimizer.step().",
    )


def rounded(seen: Evidence) -> Finding | None:
    """Learning rates in half precision, or cut to a few digits."""
    coarse = next((dtype for dtype in seen.optimizer.dtypes if dtype in ("torch.bfloat16", "torch.float16")), None)
    if coarse:
        text = f"The learning rate is kept in {coarse.removeprefix('torch.')}, which rounds it by up to 0.4 %"
        return Finding("rounded", f"{text}. Remedy: give the optimizer a Python float, or a float32 tensor.")
    values = np.unique(seen.lr[np.isfinite(seen.lr) & (seen.lr > 0)])
    for digits in range(6, 11):
        scaled = values * 10.0**digits
        is_grid = np.all(np.abs(scaled - np.round(scaled)) < 1e-6) and scaled.max(initial=0.0) >= 1
        if len(values) >= 10 and is_grid:
            return Finding(
                "rounded",
                f"All learning rates are multiples of 1e-{digits}: the program rounds them, by up to "
                f"{_percent(1 / scaled.max())} of the peak.",
                is_problem=bool(scaled.max() < 1000),
            )
    return None


def jumped(seen: Evidence) -> Finding | None:
    """The learning rate jumps where a state was loaded."""
    lr = seen.lr
    for loaded in seen.optimizer.loaded:
        before, after = (next((each for each in loaded[key] if each), None) for key in ("before", "after"))
        update = loaded["update"]
        if before and after and not 1 / _JUMP < after / before < _JUMP and update < len(lr) and lr[update] == after:
            return Finding(
                "loaded_lr",
                f"The checkpoint loaded before update {update:,} replaced the learning rate {before:.4g} by {after:.4g}. A new "
                "learning rate has no effect on a resumed run. Remedy: set it after loading, or start from weights only.",
                is_problem=False,
            )
        if update + 2 < len(lr) and lr[update] > 0 and lr[update + 1] > 0:
            first, second = lr[update + 1] / lr[update], lr[update + 2] / lr[update + 1]
            if not 1 / _JUMP < first < _JUMP and 1 / _JUMP < second < _JUMP:
                return Finding(
                    "jumped",
                    f"After the state was loaded, update {update:,} ran at {lr[update]:.4g} and the next at "
                    f"{lr[update + 1]:.4g}. Remedy: load the state of the optimizer and of the scheduler, in this order, "
                    "before the first update.",
                )
    return None


def discarded(seen: Evidence) -> Finding | None:
    """Gradients are deleted before an optimizer used them."""
    lost = sum(seen.process.discarded)
    used = float(np.nansum(seen.optimizer.column("b")))
    if not lost or lost < 0.02 * (lost + used):
        return None
    return Finding(
        "discarded",
        f"The gradients of {counted(lost, 'backward pass', ',')} ({_percent(lost / (lost + used))}) were deleted by "
        "zero_grad() before an optimizer step used them. Remedy: call zero_grad() only after optimizer.step(); with "
        "accumulation, once per update.",
    )


def unused(seen: Evidence) -> Finding | None:
    """Gradients at the end that no update has used."""
    left = (seen.process.end or {}).get("unused", 0)
    if not seen.is_complete or left < 2 or left < seen.accumulated / 2:
        return None
    verb = agreeing(left, "was", "were")
    return Finding(
        "unused",
        f"The last {counted(left, 'backward pass')} {verb} followed by no update.",
        is_problem=False,
    )


def summed(seen: Evidence) -> Finding | None:
    """Micro-batches whose losses are not divided by their number."""
    divisors = seen.optimizer.column("d")
    known = divisors[np.isfinite(divisors)]
    if seen.accumulated < 2 or not len(known) or np.any(known != 1.0):
        return None
    n = seen.accumulated
    return Finding(
        "summed",
        f"The gradients of {n} backward passes are added up in an update, and no loss is divided by {n}. If these are "
        f"micro-batches, the gradient is {n} times that of their average: SGD takes steps {n} times as long, and clipping "
        f"acts earlier. Remedy: (loss / {n}).backward(), if your loss is not averaged elsewhere.",
        is_problem=False,
    )


def clipped(seen: Evidence) -> Finding | None:
    """Most updates are clipped."""
    norms, limits = seen.optimizer.column("n"), seen.optimizer.column("c")
    measured = np.isfinite(norms) & np.isfinite(limits)
    share = float(np.mean(norms[measured] > limits[measured])) if measured.any() else 0.0
    if share < 0.5 or measured.sum() < 10:
        return None
    return Finding(
        "clipped",
        f"Clipping shortened the gradient in {_percent(share)} of the updates (norm {np.median(norms[measured]):.3g} by the "
        f"median, limit {np.median(limits[measured]):.3g}): with Adam that hardly matters, with SGD the limit sets the step.",
        is_problem=False,
    )


def clipped_early(seen: Evidence) -> Finding | None:
    """Clipping before all micro-batches of an update have been added."""
    calls = seen.optimizer.column("k")
    if seen.accumulated < 2 or not np.isfinite(calls).any() or np.nanmedian(calls) < seen.accumulated:
        return None
    return Finding(
        "clipped_early",
        f"Gradients were clipped {times(int(np.nanmedian(calls)))} per update, after each backward pass, so partial sums were "
        "clipped. Remedy: clip once, just before optimizer.step().",
        is_problem=False,
    )


def overflowed(seen: Evidence) -> Finding | None:
    """Updates that a gradient scaler skipped."""
    skipped = seen.optimizer.skipped + int(np.nansum(seen.optimizer.column("i") > 0))
    share = skipped / max(skipped + seen.optimizer.num_updates, 1)
    if share < 0.05 or skipped < 2:
        return None
    return Finding(
        "overflowed",
        f"The gradient scaler skipped {counted(skipped, 'update')} ({_percent(share)}) because of overflows in float16. A few "
        "at the start are usual. Remedy: train in bfloat16, or lower the learning rate.",
        is_problem=False,
    )


def own_estimate(seen: Evidence) -> Finding | None:
    """Optimizers that multiply the learning rate by their own factor."""
    if not seen.optimizer.adapts:
        return None
    text = f"{seen.optimizer.name} multiplies this learning rate by an estimate of its own, which the audit does not show."
    return Finding("own_estimate", text, is_problem=False)


def unseen_steps(seen: Evidence) -> Finding | None:
    """Steps that were found by the weights, not by hooks."""
    if not any(row.get("x") for row in seen.optimizer.rows):
        return None
    return Finding(
        "unseen_steps",
        "The optimizer's step is compiled, or otherwise hidden from torch's hooks: its updates were found by the change of a "
        "weight, and the learning rate was read after each.",
        is_problem=False,
    )


DIAGNOSES: tuple[Callable[[Evidence], Finding | None], ...] = (
    *(too_long, rose_after_end, too_short, still_warming_up, never_scheduled, discarded, rounded, jumped),
    *(high_at_end, warmup_scaled, summed, clipped_early, rarely_stepped, overflowed, clipped, unused),
    *(own_estimate, unseen_steps),
)


def diagnose(seen: Evidence) -> list[Finding]:
    """All findings about an optimizer, problems first."""
    found = [finding for diagnosis in DIAGNOSES if (finding := diagnosis(seen)) is not None]
    return sorted(found, key=lambda finding: not finding.is_problem)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
