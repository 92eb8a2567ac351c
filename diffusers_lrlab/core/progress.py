"""The clock: everything that the lab varies during training is a function of `Progress`."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .errors import LabError, must_be
from .values import Range
from .words import counted


def clip(value: Any, low: float, high: float) -> Any:
    """`value` clipped to `[low, high]`; plain numbers stay plain, which is ten times as fast as NumPy."""
    return min(max(value, low), high) if isinstance(value, (int, float)) else np.clip(value, low, high)


_FINITE, _LENGTH = Range("(-inf, inf)"), Range("[1, inf)", whole=True)
_refused = partial(must_be, hint="count optimizer updates", of="Progress()")


@dataclass(frozen=True)
class Progress:
    """A reading of the clock, in optimizer updates: not micro-batches, not processes, not scheduler calls.

    Args:
        update (`int`, `float` or array of numbers): Updates done so far; the first update of a run happens at 0, the last at
            `total_updates - 1`. A fraction is between two updates, as schedules of third-party scripts can be. For an array
            every curve returns an array, so that a whole run is evaluated at once.
        total_updates (`int`): Updates of the whole run.
        warmup_updates (`int`, *optional*, defaults to 0): Updates of warm-up; the peak is at `update == warmup_updates`.
    """

    update: Any
    total_updates: int
    warmup_updates: int = 0

    def __post_init__(self) -> None:
        update, total, warmup = self.update, self.total_updates, self.warmup_updates
        if type(update) is type(total) is type(warmup) is int and 0 <= warmup < total:  # at every update of a schedule
            return
        is_moment = update.dtype.kind in "iuf" if isinstance(update, np.ndarray) else update in _FINITE
        if not is_moment:
            raise _refused("update", update, "a finite number or an array of numbers")
        if total not in _LENGTH:
            raise _refused("total_updates", total, str(_LENGTH))
        if warmup not in (shorter := Range(f"[0, {total})", whole=True)):
            raise _refused("warmup_updates", warmup, str(shorter))

    @property
    def span(self) -> int:
        """Updates between the end of warm-up and the end of the run."""
        return self.total_updates - self.warmup_updates

    @property
    def now(self) -> Any:
        """The update, clipped to `[0, total_updates]`, so that a schedule is constant past its end."""
        return clip(self.update, 0, self.total_updates)

    @property
    def after_warmup(self) -> Any:
        """Updates since warm-up ended, clipped to `[0, span]`."""
        return clip(self.update - self.warmup_updates, 0, self.span)

    @property
    def fraction(self) -> Any:
        """0 until warm-up ends, 1 from the end of the run on."""
        return self.after_warmup / self.span

    @property
    def warmup_fraction(self) -> Any:
        return clip(self.update / self.warmup_updates, 0.0, 1.0) if self.warmup_updates else 1.0


def resolve_updates(value: float, total_updates: int, what: str) -> int:
    """A number of updates, from a number (`500`) or a fraction of `total_updates` in (0, 1), rounded to the nearest."""
    if not 0 <= value < math.inf or (value >= 1 and value != int(value)):
        raise LabError(
            f"{what} {value!r} is neither a whole number of updates (0, 500, ...) nor a fraction of the run in (0, 1)."
        )
    return round(float(value) * total_updates) if value < 1 else int(value)


def resolve_warmup_updates(warmup: float, total_updates: int) -> int:
    """Warm-up in updates, from a number (`500`) or a fraction of the run (`0.05`); less than the whole run."""
    updates = resolve_updates(warmup, total_updates, "Warm-up")
    if updates >= total_updates:
        raise LabError(
            f"Warm-up of {counted(updates, 'update')} does not fit into a run of {counted(total_updates, 'update')}: the "
            f"peak would never be reached. Use at most {total_updates - 1}, or a fraction such as 0.05 (5 % of the run)."
        )
    return updates
