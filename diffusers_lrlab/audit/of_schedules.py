"""Diagnoses of the schedule and its length, and of the learning rates themselves."""

from __future__ import annotations

import numpy as np

from ..core.words import counted
from .evidence import Evidence, Finding, percent, stepped_per

CLOSE = 0.05  # relative difference of numbers of steps that is no finding
_FEWEST_ROUNDED = 20  # different learning rates
_MOST_DIFFERENCES = 5  # different third differences of a warm-up and a power
_VANISHED = 1e-3  # of the peak


def too_long(seen: Evidence) -> Finding | None:
    """The run ends before the schedule, which then ends too high."""
    if not seen.length or not seen.is_complete or not 0 < seen.taken < seen.length * (1 - CLOSE) or seen.steps <= 0:
        return None
    if seen.end > 0.999 and np.nanmin(seen.lr[len(seen.lr) // 2 :]) > 0.999 * seen.peak:
        return None  # a constant rate
    ratio = seen.length / seen.taken
    reason = ""
    if abs(ratio - seen.accumulated) < 0.1 * ratio and seen.accumulated > 1:
        reason = f" It seems to count micro-batches: there are {seen.accumulated} backward passes in an update."
    warmup = (seen.optimizer.scheduler or {}).get("warmup")
    made = f"{seen.length:,.0f} steps" + (f", {warmup:,.0f} of them warm-up" if warmup else "")
    if seen.steps < 1 and abs(seen.length / seen.optimizer.num_updates - 1) < CLOSE:
        remedy, warmup = "step the scheduler after every optimizer.step(), not once per epoch", None
    else:
        remedy = f"make it for {counted(round(seen.taken), 'step', ',')}"
    remedy += ", and count its warm-up in the same unit" if warmup else ""
    return Finding(
        f"The schedule was made for {made}, and the run took {seen.taken:,.0f} of these steps (the scheduler was stepped "
        f"{stepped_per(seen)}): it ended at {percent(seen.end)} of the peak.{reason} Remedy: {remedy}."
    )


def rose_after_end(seen: Evidence) -> Finding | None:
    """The scheduler is stepped beyond its length, where a cosine rises again."""
    positions = seen.optimizer.positions
    if not seen.length or len(seen.lr) < 3:
        return None
    after = np.flatnonzero(positions >= seen.length)
    if len(after) < 2:
        return None
    risen = float(np.nanmax(seen.lr[after]) - seen.lr[after[0]])
    if risen <= 0.01 * seen.peak:
        return None
    return Finding(
        f"The schedule of {seen.length:,.0f} steps ended at update {after[0]:,}, and the learning rate then rose again to "
        f"{percent((seen.lr[after[0]] + risen) / seen.peak)} of the peak, since the scheduler was stepped "
        f"{stepped_per(seen)}. Remedy: {_remedy_for_steps(seen)}."
    )


def too_short(seen: Evidence) -> Finding | None:
    """The schedule is over long before the run."""
    positions = seen.optimizer.positions
    if not seen.length or rose_after_end(seen) or seen.taken <= seen.length * (1 + CLOSE):
        return None
    if np.ptp(seen.lr) <= 1e-3 * seen.peak:
        return None
    ended = np.flatnonzero(positions >= seen.length)
    first = int(ended[0]) if len(ended) else seen.optimizer.num_updates
    left = seen.optimizer.num_updates - first
    if left <= CLOSE * seen.optimizer.num_updates:
        return None
    return Finding(
        f"The schedule of {seen.length:,.0f} steps ended at update {first:,}; the other {counted(left, 'update', ',')} had "
        f"its last learning rate, since the scheduler was stepped {stepped_per(seen)}. Remedy: {_remedy_for_steps(seen)}."
    )


def _remedy_for_steps(seen: Evidence) -> str:
    if _is_stepped_per_micro_batch(seen):
        return "step the scheduler once per update, after optimizer.step(), not once per micro-batch"
    return (
        f"make it for {counted(round(seen.taken), 'step', ',')}, the updates of the run times the scheduler steps per update"
    )


def _is_stepped_per_micro_batch(seen: Evidence) -> bool:
    return seen.accumulated > 1 and abs(seen.steps - seen.accumulated) < 0.1


def warmup_scaled(seen: Evidence) -> Finding | None:
    """The warm-up takes fewer updates than the steps it was made for."""
    warmup = (seen.optimizer.scheduler or {}).get("warmup")
    if not warmup or warmup < 2 or seen.steps < 1 + 2 * CLOSE or too_short(seen) or rose_after_end(seen):
        return None  # the same cause
    lasts = counted(warmup / seen.steps, "update", ",.3g")
    remedy = f"give it {counted(round(warmup * seen.steps), 'step', ',')}"
    if _is_stepped_per_micro_batch(seen):
        remedy = "step the scheduler once per update, not once per micro-batch"
    return Finding(
        f"The warm-up of {warmup:,.0f} scheduler steps lasts {lasts}, since the scheduler was stepped {stepped_per(seen)}. "
        f"If you asked for {warmup:,.0f} updates, {remedy}.",
        is_problem=False,
    )


def still_warming_up(seen: Evidence) -> Finding | None:
    """The learning rate is highest at the end."""
    lr = seen.lr
    if len(lr) < 10 or not seen.is_complete or not lr[-1] >= seen.peak > lr[-1 - len(lr) // 10] * (1 + 1e-9):
        return None
    if np.any(np.diff(lr) < 0):
        return None  # a restart
    return Finding(
        f"The learning rate still rose at the last update, {seen.optimizer.num_updates - 1:,}: the run ended within the "
        "warm-up. Remedy: shorten the warm-up, or train longer."
    )


def high_at_end(seen: Evidence) -> Finding | None:
    """The learning rate still falls at the end, and the length of the scheduler is not known."""
    lr = seen.lr
    if seen.length or not seen.is_complete or len(lr) < 10 or seen.end < 0.1:
        return None
    last = lr[-max(len(lr) // 10, 3) :]
    falls = bool(np.all(np.diff(last) < 0))
    if not falls:
        return None
    return Finding(
        f"The learning rate still fell at the end, where it was {percent(seen.end)} of its peak. If it should reach its "
        "lowest value, the schedule is too long for the run: make it for "
        f"{counted(seen.optimizer.num_updates, 'update', ',')}.",
        is_problem=False,
    )


def over_early(seen: Evidence) -> Finding | None:
    """A decay without a length is over early, such as one meant per epoch that is stepped per batch."""
    if seen.length or len(seen.lr) < 20 or not seen.peak or np.isnan(seen.lr).any():
        return None
    lr = np.nan_to_num(seen.optimizer.lr)
    peaks = lr.max(axis=0)
    shares = (lr[:, peaks > 0] / peaks[peaks > 0]).max(axis=1)  # of its peak, in the group that has most of it
    end, settles = shares[-1], shares[-1] >= _VANISHED * (1 - 1e-9)  # at a rate that is not lost beside the peak
    higher = np.flatnonzero(shares >= (end * (1 + 1e-9) if settles else _VANISHED * (1 - 1e-9)))
    first = int(higher[-1]) + 1 if len(higher) else 0
    lasts = 1 - first / len(lr)  # as a share of the run
    if lasts < (0.3 if not settles else 0.6 if end <= 0.05 else 0.9) or end > 0.5:
        return None
    remedy = "step the scheduler once per epoch, or count in batches: gamma ** (1 / batches per epoch), step_size, "
    remedy = f"if the decay is meant per epoch, {remedy}milestones and patience times the batches per epoch"
    if 0 < seen.steps < 1 - 2 * CLOSE:
        remedy = "choose a slower decay, such as a gamma closer to 1"
    elif seen.optimizer.scheduler is None:
        remedy = "if the decay is meant per epoch, apply it once per epoch, not at every update"
    return Finding(
        f"{f'At {percent(end)}' if settles else 'Below 0.1 %'} of the peak from update {first:,} of {len(lr):,} on, "
        f"for {percent(lasts)} of the run. Remedy: {remedy}.",
        is_problem=bool(lasts >= (0.9 if settles else 0.5)),
    )


def rarely_stepped(seen: Evidence) -> Finding | None:
    """The scheduler is stepped less often than the optimizer."""
    if not 0 < seen.steps < 1 - 2 * CLOSE or seen.optimizer.num_updates < 10:
        return None
    moves = np.diff(seen.optimizer.positions)
    first = int(np.argmax(moves > 0))
    if 1 < first < len(moves) - 2 and np.all(moves[first:] > 0):
        text = f"The scheduler was first stepped after update {first:,}: until then, the rate was that of its step 0."
        return Finding(f"{text} If that is not meant, step it from the first update on.", is_problem=False)
    return Finding(
        f"The scheduler was stepped {stepped_per(seen)}. That is usual for schedules by epoch; a schedule made for updates "
        "must be stepped after every optimizer.step().",
        is_problem=False,
    )


def never_scheduled(seen: Evidence) -> Finding | None:
    """There is a scheduler, and it is never stepped."""
    if seen.optimizer.scheduler is None or seen.optimizer.num_updates < 3 or seen.steps != 0:
        return None
    is_stepped_at_end = seen.taken > seen.optimizer.positions[-1]  # a single epoch
    if is_stepped_at_end or np.ptp(seen.lr) > 0:
        return None
    return Finding(
        f"The scheduler ({seen.optimizer.scheduler['name']}) was never stepped, so the learning rate stayed at "
        f"{seen.lr[-1]:.4g}. Remedy: call scheduler.step() after every optimizer.step()."
    )


def not_finite(seen: Evidence) -> Finding | None:
    """Updates at a learning rate of NaN or infinity, which the curve leaves out."""
    wrong = np.flatnonzero((seen.optimizer.exists & ~np.isfinite(seen.optimizer.lr)).any(axis=1))
    if not len(wrong):
        return None
    return Finding(
        f"The learning rate was NaN or infinite in {counted(len(wrong), 'update', ',')}, first at update {wrong[0]:,}. "
        "Remedy: look for a division by 0, or a root of a negative number, in what sets it."
    )


def rounded(seen: Evidence) -> Finding | None:
    """Learning rates in half precision, or cut to a few digits."""
    coarse = next((dtype for dtype in seen.optimizer.dtypes if dtype in ("torch.bfloat16", "torch.float16")), None)
    if coarse:
        text = f"The learning rate is kept in {coarse.removeprefix('torch.')}, which rounds it by up to 0.4 %"
        return Finding(f"{text}. Remedy: give the optimizer a Python float, or a float32 tensor.")
    lr = seen.lr[np.isfinite(seen.lr) & (seen.lr > 0)]
    values = np.unique(lr)
    if len(values) < _FEWEST_ROUNDED:
        return None  # as by hand
    for digits in range(6, 11):
        scaled = values * 10.0**digits
        is_grid = np.all(np.abs(scaled - np.round(scaled)) < 1e-6) and scaled.max(initial=0.0) >= 1
        # Lines and powers of round numbers are on a grid, too, and have few different third differences.
        if is_grid and len(np.unique(np.diff(np.round(lr * 10.0**digits), n=3))) > _MOST_DIFFERENCES:
            return Finding(
                f"All learning rates are multiples of 1e-{digits}: the program rounds them, by up to "
                f"{percent(1 / scaled.max())} of the peak.",
                is_problem=bool(scaled.max() < 1000),
            )
    return None


def own_estimate(seen: Evidence) -> Finding | None:
    """Optimizers that multiply the learning rate by their own factor."""
    if not seen.optimizer.adapts:
        return None
    text = f"{seen.optimizer.name} multiplies this learning rate by an estimate of its own, which the audit does not show."
    return Finding(text, is_problem=False)


def unseen_steps(seen: Evidence) -> Finding | None:
    """Steps that were found from changes of the weights, not by hooks."""
    if not any(row.get("x") for row in seen.optimizer.rows):
        return None
    return Finding(
        "The optimizer's step is compiled, or otherwise hidden from torch's hooks: its updates were found by the change of "
        "a weight, and the learning rate was read after each.",
        is_problem=False,
    )


def engine_hides(seen: Evidence) -> Finding | None:
    """Parts of an update that an engine does itself, where the audit cannot see them."""
    if "deepspeed" in (seen.process.end or {}).get("engines", []):
        text = "DeepSpeed's engine trained: what it clips, divides and skips by itself is not seen here."
        return Finding(text, is_problem=False)
    if seen.optimizer.weights in ("DTensor", "FlatParameter"):
        text = "FSDP shards the weights: the norm that clipping measures is not read, since that would need other processes."
        return Finding(text, is_problem=False)
    return None
