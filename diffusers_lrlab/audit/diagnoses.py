"""Findings about the learning rate that ran: what is wrong, why, and what to do.

A diagnosis is a function that looks at the evidence and returns a finding or `None`. A new one is a row of `DIAGNOSES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from . import of_gradients, of_resumes, of_schedules
from .evidence import Evidence, Finding

DIAGNOSES: tuple[Callable[[Evidence], Finding | None], ...] = (
    of_schedules.not_finite,
    of_resumes.schedule_not_resumed,
    of_schedules.too_long,
    of_schedules.rose_after_end,
    of_schedules.too_short,
    of_schedules.still_warming_up,
    of_schedules.over_early,
    of_resumes.ahead_of_updates,
    of_resumes.high_at_first,
    of_schedules.never_scheduled,
    of_gradients.discarded,
    of_schedules.rounded,
    of_resumes.jumped,
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


_OF_LENGTH = ("too_long", "rose_after_end", "too_short", "still_warming_up", "over_early", "high_at_end")


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
