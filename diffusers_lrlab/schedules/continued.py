"""Curves that continue another one: how far two agree, and a plateau that is cooled down."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..core.spec import format_spec
from .expected import schedule_curves
from .resolve import describe_schedule, resolve_schedule
from .schedule import Schedule

_KEPT_BY_COOLDOWN = ("min_lr", "min_lr_ratio", "warmup_type", "warmup_start_ratio")


@dataclass(frozen=True)
class RunCurve:
    """The learning rate and momentum of each update of a run."""

    schedule: Schedule
    lr: float  # the peak
    momentum: float | None
    warmup_updates: int
    num_updates: int

    @cached_property
    def _curves(self) -> tuple[np.ndarray, np.ndarray]:
        return schedule_curves(self.schedule, self.lr, self.momentum, self.warmup_updates, self.num_updates)

    @property
    def lrs(self) -> np.ndarray:
        """float64 `(num_updates,)`."""
        return self._curves[0]

    @property
    def momenta(self) -> np.ndarray:
        """float64 `(num_updates,)`; NaN if the schedule does not set the momentum."""
        return self._curves[1]

    @property
    def text(self) -> str:
        return describe_schedule(self.schedule)

    def lasting(self, num_updates: int) -> "RunCurve":
        """The curve of the same schedule over another number of updates."""
        return dataclasses.replace(self, num_updates=num_updates)

    def cooled_down(self, at: int, num_decay: int, decay_type: str) -> "RunCurve":
        """The curve of a `warmup_stable_decay` that begins to decay after `at` updates, with this momentum schedule."""
        given = {key: self.schedule.kwargs.get(key) for key in _KEPT_BY_COOLDOWN}
        given |= {"num_decay_steps": num_decay, "decay_type": decay_type}
        named = resolve_schedule(format_spec("warmup_stable_decay", given))
        schedule = dataclasses.replace(self.schedule, name=named.name, kwargs=named.kwargs)
        return dataclasses.replace(self, schedule=schedule, num_updates=at + num_decay)

    def in_words(self, at: int) -> str:
        """The first, highest and last rate from an update on, and the one before."""
        rest = self.lrs[at:]
        highest = at + int(rest.argmax())
        return (
            f"{rest[0]:.4g} first (update {at}), {rest.max():.4g} highest (update {highest}), {rest[-1]:.4g} last "
            f"(update {self.num_updates - 1}); {self.lrs[at - 1]:.4g} before"
        )


def agreeing_updates(one: RunCurve, other: RunCurve) -> int:
    """Updates from the start in which the rates and momenta of two curves are equal."""
    num = min(one.num_updates, other.num_updates)
    momenta = one.momenta[:num], other.momenta[:num]
    differ = (one.lrs[:num] != other.lrs[:num]) | ((momenta[0] != momenta[1]) & ~np.isnan(momenta[0]))
    return int(np.argmax(differ)) if differ.any() else num
