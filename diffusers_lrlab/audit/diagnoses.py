"""Findings about the learning rate that ran: what is wrong, why, and what to do.

A diagnosis is a function that looks at the evidence and returns a finding or `None`. A new one is a row of `DIAGNOSES`.
"""

from __future__ import annotations

from collections.abc import Callable

from . import of_gradients, of_schedules
from .evidence import Evidence, Finding

DIAGNOSES: tuple[Callable[[Evidence], Finding | None], ...] = (
    of_schedules.too_long,
    of_schedules.rose_after_end,
    of_schedules.too_short,
    of_schedules.still_warming_up,
    of_schedules.high_at_first,
    of_schedules.never_scheduled,
    of_gradients.discarded,
    of_schedules.rounded,
    of_schedules.jumped,
    of_schedules.high_at_end,
    of_schedules.warmup_scaled,
    of_gradients.summed,
    of_gradients.clipped_early,
    of_schedules.rarely_stepped,
    of_gradients.overflowed,
    of_gradients.clipped,
    of_gradients.unused,
    of_schedules.own_estimate,
    of_schedules.unseen_steps,
    of_schedules.engine_hides,
)


def diagnose(seen: Evidence) -> list[Finding]:
    """All findings about an optimizer, problems first."""
    found = [finding for diagnosis in DIAGNOSES if (finding := diagnosis(seen)) is not None]
    return sorted(found, key=lambda finding: not finding.is_problem)
