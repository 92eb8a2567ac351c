"""Diagnoses of updates: their position in the schedule after a resume, and the gradients that they use."""

from __future__ import annotations

import numpy as np

from ..core.words import agreeing, counted, times
from .evidence import Evidence, Finding, percent

CLOSE = 0.05  # share of the steps that is no finding
_JUMP = 1.5  # factor between consecutive updates
_STEPWISE = ("StepLR", "MultiStepLR", "ReduceLROnPlateau")  # which jump by themselves


def jumped(seen: Evidence) -> Finding | None:
    """The learning rate jumps, or is replaced, where a state is loaded."""
    lr = seen.lr
    for loaded in seen.optimizer.loaded:
        before, after = (next((each for each in loaded[key] if each), None) for key in ("before", "after"))
        update = loaded["update"]
        is_replaced = before is not None and after is not None and abs(after / before - 1) > 1e-6
        if is_replaced and update < len(lr) and lr[update] != before:  # the program may set it again
            return Finding(
                f"The checkpoint loaded before update {update:,} replaced the learning rate {before:.4g} by {after:.4g}: a "
                "new rate has no effect on a resumed run. Remedy: set it after loading, or start from weights only.",
                is_problem=False,
            )
        is_new = update == 0 and 0 in (seen.optimizer.positions[0], seen.optimizer.own_count)
        if (seen.optimizer.scheduler or {}).get("name") in _STEPWISE or is_new:
            continue  # accelerate loads a new optimizer's state, too
        if update + 2 < len(lr) and lr[update] > 0 and lr[update + 1] > 0:
            first, second = lr[update + 1] / lr[update], lr[update + 2] / lr[update + 1]
            if not 1 / _JUMP < first < _JUMP and 1 / _JUMP < second < _JUMP:
                return Finding(
                    f"After the state was loaded, update {update:,} ran at {lr[update]:.4g} and the next at "
                    f"{lr[update + 1]:.4g}. Remedy: load the state of the optimizer and of the scheduler, in this order, "
                    "before the first update."
                )
    return None


def high_at_first(seen: Evidence) -> Finding | None:
    """A warm-up whose first update is high."""
    lr = seen.lr
    if len(lr) < 10 or seen.optimizer.loaded[1:] or not lr[0] > _JUMP * lr[1] or lr[1] > 0.1 * seen.peak:
        return None
    if np.any(np.diff(lr[1:6]) < 0) or lr[5] <= lr[1]:
        return None  # no warm-up
    return Finding(
        f"The first update ran at {percent(lr[0] / seen.peak)} of the peak, and the warm-up then began at "
        f"{percent(lr[1] / seen.peak)}. Such a high first update may undo what was loaded. Remedy: another scheduler, or "
        "no warm-up."
    )


def schedule_not_resumed(seen: Evidence) -> Finding | None:
    """The optimizer continues an earlier run, and the scheduler starts again or is at another update."""
    done, position = seen.optimizer.own_count, seen.optimizer.positions[0]
    if not done or seen.steps <= 0 or not np.isfinite(position):
        return None
    due = done * seen.steps
    if abs(position - due) <= max(2, 2 * CLOSE * due):  # a gradient scaler may have skipped some
        return None
    remedy = "load the scheduler's state with that of the optimizer"
    if position > due:
        remedy += ", or make it with last_epoch as the number of its own steps before (not of micro-batches), less 1"
    return Finding(
        f"The optimizer continues after {counted(done, 'update', ',')}, by its own count, and the scheduler from its step "
        f"{position:,.0f}, not {due:,.0f}: the schedule {'starts again' if position <= 2 else 'continues elsewhere'}, at "
        f"{percent(seen.start)} of the highest rate. Remedy: {remedy}."
    )


def ahead_of_updates(seen: Evidence) -> Finding | None:
    """The scheduler is stepped before the first update, or for updates that are skipped."""
    optimizer = seen.optimizer
    early = optimizer.early_steps if optimizer.own_count == 0 else 0  # otherwise, to continue an earlier run
    if early <= seen.steps and seen.steps > 1 + CLOSE:
        early = 0  # of the first update, as by micro-batch
    later, where = _steps_without_updates(seen)
    length = seen.length or optimizer.num_updates
    share = max(early / ((optimizer.scheduler or {}).get("warmup") or length), later / length)
    if not seen.peak or not early and (share < CLOSE or later < 2):
        return None
    parts = []
    if early:
        first, last = optimizer.rows[0].get("from"), optimizer.rows[0].get("to")
        skipped = f", while the loss scaler skipped {counted(optimizer.skipped_first, 'update')}"
        rates = "its rates before" if None in (first, last) else f"its rates from {first:.4g} to {last:.4g}"
        rates = f"its rate of {first:.4g}" if first == last and first is not None else rates
        parts.append(
            f"The scheduler was stepped {times(early)} before the first update{skipped if optimizer.skipped_first else ''}, "
            f"so no update had {rates}, and the first ran at {percent(seen.start)} of the peak."
        )
    if later:
        parts.append(
            f"There were {counted(later, 'step')} of the scheduler without an update, first after update {where:,}."
        )
    remedy = "call scheduler.step() after optimizer.step(), and only then"
    if optimizer.skipped:
        remedy = "step the scheduler only if scaler.get_scale() is not lower after scaler.update() than before it"
    is_problem = share >= CLOSE and early + later > 1 and bool(later or optimizer.skipped_first)
    return Finding(f"{' '.join(parts)} Remedy: {remedy}.", is_problem)


def _steps_without_updates(seen: Evidence) -> tuple[int, int]:
    """Scheduler steps after the first update beyond the usual number per update, and the update before the first of them."""
    positions = seen.optimizer.positions
    moves = np.diff(np.append(positions, np.nan if seen.optimizer.final_position is None else seen.optimizer.final_position))
    known = moves[np.isfinite(moves)]
    usual = float(np.median(known)) if len(known) else 0.0
    if usual < 1 or np.mean(known == usual) < 0.5:
        return 0, 0
    more = np.where(np.isfinite(moves), np.maximum(moves - usual, 0), 0)
    return int(more.sum()), int(np.argmax(more > 0))


# --- gradients ----------------------------------------------------------------------------------------------------------


def discarded(seen: Evidence) -> Finding | None:
    """Gradients are deleted before an optimizer used them."""
    lost = sum(seen.process.discarded)
    used = float(np.nansum(seen.optimizer.column("b")))
    if not lost or lost < 0.02 * (lost + used):
        return None
    return Finding(
        f"The gradients of {counted(lost, 'backward pass', ',')} ({percent(lost / (lost + used))}) were deleted by "
        "zero_grad() before an optimizer step used them. Remedy: call zero_grad() only after optimizer.step(); with "
        "accumulation, once per update."
    )


def unused(seen: Evidence) -> Finding | None:
    """Gradients at the end that no update has used."""
    left = (seen.process.end or {}).get("unused", 0)
    if not seen.is_complete or left < 2 or left < seen.accumulated / 2:
        return None
    verb = agreeing(left, "was", "were")
    return Finding(f"The last {counted(left, 'backward pass')} {verb} not followed by an update.", is_problem=False)


def summed(seen: Evidence) -> Finding | None:
    """Micro-batches whose losses are not divided by their number."""
    divisors = seen.optimizer.column("d")
    known = divisors[np.isfinite(divisors)]
    if seen.accumulated < 2 or not len(known) or np.any(known != 1.0):
        return None
    n = seen.accumulated
    return Finding(
        f"The gradients of {n} backward passes are added up in an update, and no loss is divided by {n}. If these are "
        f"micro-batches, the gradient is their sum, not their average: steps of SGD are longer by a factor of {n}, and "
        f"clipping acts earlier. Remedy: (loss / {n}).backward(), if your loss is not averaged elsewhere.",
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
        f"Clipping shortened the gradient in {percent(share)} of the updates (median norm {np.median(norms[measured]):.3g}, "
        f"limit {np.median(limits[measured]):.3g}): with Adam that hardly matters, with SGD the limit sets the step.",
        is_problem=False,
    )


def clipped_early(seen: Evidence) -> Finding | None:
    """Clipping before all micro-batches of an update have been added."""
    calls = seen.optimizer.column("k")
    if seen.accumulated < 2 or not np.isfinite(calls).any() or np.nanmedian(calls) < seen.accumulated:
        return None
    return Finding(
        f"Gradients were clipped {times(int(np.nanmedian(calls)))} per update, after each backward pass, so partial sums "
        "were clipped too. Remedy: clip once, just before optimizer.step().",
        is_problem=False,
    )


def overflowed(seen: Evidence) -> Finding | None:
    """Updates that a gradient scaler skipped."""
    skipped = seen.optimizer.skipped + int(np.nansum(seen.optimizer.column("i") > 0))
    share = skipped / max(skipped + seen.optimizer.num_updates, 1)
    if share < 0.05 or skipped < 2:
        return None
    return Finding(
        f"The gradient scaler skipped {counted(skipped, 'update')} ({percent(share)}) for overflows in float16. A few at "
        "the start are usual. Remedy: train in bfloat16, or lower the learning rate.",
        is_problem=False,
    )
