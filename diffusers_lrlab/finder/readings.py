"""The losses that a range test reads between its updates, and its end."""

import math
from typing import NamedTuple

import numpy as np

MEMORY = {"classic": 0.9, "probe": 0.0}  # smoothing by mode: losses of batches are noisy
_RISEN = 0.1  # share of the fall by which the loss rises past its minimum
_ABOVE_NOISE = 3.0  # standard errors of the smoothed loss, where it is smoothed
_NEAR = 32  # readings from which noise is estimated


class Sweep(NamedTuple):
    """The measurements of one test."""

    lrs: np.ndarray  # rate of the last update before each reading, float64 (num_readings,)
    losses: np.ndarray  # float64 (num_readings,)
    bins: np.ndarray  # by noise level, least first, (num_readings, num_bins); no columns in mode "classic"
    num_updates: int  # done
    ended: str | None = None  # the reason for an end before the highest rate


class Readings:
    """
    The losses of a test so far, one for each rate, over `num_updates` from the lowest rate to the highest.

    The test ends where the smoothed loss, of which each reading keeps the share `memory` ([`MEMORY`]), is `stop_factor`
    times its minimum so far.
    """

    def __init__(self, num_updates: int, stop_factor: float, memory: float):
        self.num_updates, self.stop_factor, self.memory = num_updates, stop_factor, memory
        self.ended: str | None = None
        self._lrs: list[float] = []
        self._losses: list[float] = []
        self._bins: list[np.ndarray] = []
        self._smoothed = self._first = math.nan
        self._best = math.inf

    def start(self, lrs: np.ndarray, loss: float, bins: np.ndarray) -> None:
        """Adds a reading before the first update, at the rate before these; it does not affect the end of the test."""
        self._note(lrs[0] ** 2 / lrs[1], loss, bins)

    def _note(self, lr: float, loss: float, bins: np.ndarray) -> None:
        self._lrs.append(lr)
        self._losses.append(loss)
        self._bins.append(bins)

    def add(self, done: int, lr: float, loss: float, bins: np.ndarray) -> bool:
        """Adds a reading after `done` updates, the last at rate `lr`. Returns whether the test continues."""
        self._note(lr, loss, bins)
        if not math.isfinite(loss):
            self.ended = f"the loss was not finite at a rate of {lr:.3g}"
            return False
        is_first = math.isnan(self._smoothed)
        self._smoothed = loss if is_first else self.memory * self._smoothed + (1 - self.memory) * loss
        self._first = self._smoothed if is_first else self._first
        self._best = min(self._best, self._smoothed)
        if self._smoothed > self.stop_factor * self._best:
            self.ended = f"at a rate of {lr:.3g} the loss was {self._smoothed / self._best:.3g} times its minimum"
            return False
        risen = max(_RISEN * (self._first - self._best), _ABOVE_NOISE * self._error())
        return not (done >= self.num_updates and self._smoothed > self._best + risen)

    def _error(self) -> float:
        """The standard error of the smoothed loss; 0 if readings are of a fixed probe, which has no noise of batches."""
        if not self.memory or len(self._losses) < 3:
            return 0.0
        return noise_of(np.array(self._losses[-_NEAR:])) * math.sqrt((1 - self.memory) / (1 + self.memory))

    def sweep(self, num_updates: int, num_bins: int) -> Sweep:
        losses, bins = np.array(self._losses, np.float64), np.array(self._bins, np.float64)
        return Sweep(np.array(self._lrs, np.float64), losses, bins.reshape(len(losses), num_bins), num_updates, self.ended)


def noise_of(values: np.ndarray) -> float:
    """The standard deviation of readings around a curve, from their second differences, which cancel its slope."""
    with np.errstate(over="ignore"):
        return math.sqrt(float(np.square(np.diff(values, 2)).mean()) / 6)


def no_finite_gradient(lr: float) -> str:
    return f"no fp16 gradient was finite at a rate of {lr:.3g}, at any loss scale"
