"""Evidence that diagnoses read, and the findings that they return."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..core.words import times
from .expected import steps_per_update
from .reading import AuditedOptimizer, AuditedProcess


@dataclass(frozen=True)
class Finding:
    """A diagnosis that applies: a problem, or a note on something that may be intended."""

    name: str = field(default="", kw_only=True)  # of the diagnosis
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

    @cached_property
    def peak(self) -> float:
        return float(np.nanmax(self.lr, initial=0.0))

    @property
    def start(self) -> float:
        """The first learning rate relative to the highest one."""
        return float(self.lr[0] / self.peak) if self.peak else 0.0

    @property
    def end(self) -> float:
        """The last learning rate relative to the highest one."""
        return float(self.lr[-1] / self.peak) if self.peak else 0.0

    @property
    def accumulated(self) -> int:
        """Backward passes in a typical update."""
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
        if self.optimizer.final_position is not None:
            return float(self.optimizer.final_position)
        position = self.optimizer.positions[-1]
        return float(position + self.steps) if np.isfinite(position) else 0.0


def stepped_per(seen: Evidence) -> str:
    if seen.steps >= 1 or not seen.steps:
        return f"{times(round(seen.steps))} per update"
    num_steps = seen.steps * (seen.optimizer.num_updates - 1)
    return f"once in {seen.optimizer.num_updates / (num_steps + 1):.3g} updates"


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"
