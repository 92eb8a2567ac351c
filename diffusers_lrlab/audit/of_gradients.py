"""Diagnoses of gradients: deleted, summed, clipped, or skipped by a scaler."""

from __future__ import annotations

import numpy as np

from ..core.words import agreeing, counted, times
from .evidence import Evidence, Finding, percent


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
