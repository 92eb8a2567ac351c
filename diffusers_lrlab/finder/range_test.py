"""The learning-rate range test: updates at a rising rate, and the losses that are read between them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..core.errors import LabError
from ..core.options import THIS_START, check_ranges, check_types, option

_EXTENSION = 2  # decades
_STOP_FACTOR = 10.0  # times its minimum, at which the smoothed loss ends a test
OF_BATCHES = 0.9  # smoothing of the losses of batches, which are noisy
_RISEN = 0.1  # share of the fall by which the loss rises past its minimum
_ABOVE_NOISE = 3.0  # standard errors of the smoothed loss, where it is smoothed
_NEAR = 32  # readings from which noise is estimated


@dataclass(frozen=True, kw_only=True)
class FinderConfig:
    """Parameters that control the learning-rate finder."""

    _argument_group_name = "learning-rate finder"

    start_lr: float = option(
        None,
        "Lowest rate (default: 1e-7 for AdamW; for other optimizers, scaled like their usual rate).",
        THIS_START,
        range="(0, 1e30]",
    )
    end_lr: float = option(
        None,
        "Highest rate (default: 1e-2 for AdamW, scaled likewise). While the loss still falls, the test continues beyond it, "
        "at most a hundredfold.",
        THIS_START,
        range="(0, 1e30]",
    )
    num_updates: int = option(200, "Updates from the lowest to the highest rate.", THIS_START, range="[10, 1e6]")
    repeats: int = option(
        3, "Number of tests, each with other batches, timesteps and noise.", THIS_START, range="[1, 10000]"
    )

    def __post_init__(self) -> None:
        check_types(self)

    def check(self) -> None:
        """Raises a `LabError` for settings that are not allowed."""
        check_ranges(self, FinderConfig)
        if self.start_lr is not None and self.end_lr is not None and self.end_lr < 2 * self.start_lr:
            raise LabError(
                f"--end_lr {self.end_lr:g}: must be at least 2 times --start_lr, got --start_lr {self.start_lr:g}. Hint: "
                "lower --start_lr, or raise --end_lr."
            )

    def lrs(self) -> np.ndarray:
        """Rates of all possible updates, evenly spaced on a logarithmic scale: float64."""
        decades = math.log10(self.end_lr / self.start_lr) / (self.num_updates - 1)
        # A narrow range at most doubles.
        most = self.num_updates + min(math.floor(_EXTENSION / decades), self.num_updates)
        return self.start_lr * 10 ** (decades * np.arange(most))


class Sweep(NamedTuple):
    """The measurements of one test."""

    lrs: np.ndarray  # rate of the last update before each reading, float64 (num_readings,)
    losses: np.ndarray  # float64 (num_readings,)
    num_updates: int  # done
    ended: str | None = None  # the reason for an end before the highest rate


class NoFiniteGradient(Exception):
    """No fp16 gradient of an update was finite, at any loss scale."""


class RangeTest:
    """
    A test: `lr` is the rate of the next update, after which [`add`] takes the loss.

    It ends where the smoothed loss is ten times its minimum so far; from the highest rate on, where it has risen past this
    minimum. `memory` is the share of the smoothed loss that each reading keeps.
    """

    def __init__(self, settings: FinderConfig, memory: float = 0.0):
        self.settings, self.lrs, self.memory = settings, settings.lrs(), memory
        self.done, self.goes_on = 0, True
        self.ended: str | None = None
        self._readings: list[tuple[float, float]] = []  # rates and losses
        self._smoothed = self._first = math.nan
        self._best = math.inf

    @property
    def lr(self) -> float:
        return float(self.lrs[self.done])

    def start(self, loss: float) -> None:
        """Adds a loss before the first update, at the rate before the lowest; it does not affect the end of the test."""
        self._readings.append((self.lrs[0] ** 2 / self.lrs[1], loss))

    def add(self, loss: float | None) -> bool:
        """Counts an update, with the loss that was read after it, if any. Returns whether another one follows."""
        lr, self.done = self.lr, self.done + 1
        has_ended = loss is not None and self._ends_at(lr, loss)
        self.goes_on = not has_ended and self.done < len(self.lrs)
        return self.goes_on

    def _ends_at(self, lr: float, loss: float) -> bool:
        self._readings.append((lr, loss))
        if not math.isfinite(loss):
            self.ended = f"the loss was not finite at a rate of {lr:.3g}"
            return True
        is_first = math.isnan(self._smoothed)
        self._smoothed = loss if is_first else self.memory * self._smoothed + (1 - self.memory) * loss
        self._first = self._smoothed if is_first else self._first
        self._best = min(self._best, self._smoothed)
        if self._smoothed > _STOP_FACTOR * self._best:
            self.ended = f"at a rate of {lr:.3g} the loss was {self._smoothed / self._best:.3g} times its minimum"
            return True
        risen = max(_RISEN * (self._first - self._best), _ABOVE_NOISE * self._error())
        return self.done >= self.settings.num_updates and self._smoothed > self._best + risen

    def _error(self) -> float:
        """The standard error of the smoothed loss; 0 without smoothing, for losses of a fixed probe have no noise."""
        if not self.memory or len(self._readings) < 3:
            return 0.0
        losses = np.array([loss for _, loss in self._readings[-_NEAR:]])
        return noise_of(losses) * math.sqrt((1 - self.memory) / (1 + self.memory))

    def fail(self) -> None:
        """Ends the test at an update without a finite gradient."""
        self.ended, self.goes_on = f"no fp16 gradient was finite at a rate of {self.lr:.3g}, at any loss scale", False

    def sweep(self) -> Sweep:
        lrs, losses = np.array(self._readings, np.float64).reshape(-1, 2).T.copy()
        return Sweep(lrs, losses, self.done, self.ended)


def range_test(step: Callable[[float], float | None], settings: FinderConfig, first: float | None = None) -> Sweep:
    """
    A test of `step(rate)`, which does an update at that rate and returns the loss read after it, if any.

    `first` is the loss before the first update.
    """
    test = RangeTest(settings)
    if first is not None:
        test.start(first)
    while test.goes_on:
        try:
            test.add(step(test.lr))
        except NoFiniteGradient:
            test.fail()
    return test.sweep()


def noise_of(values: np.ndarray) -> float:
    """The standard deviation of readings around a curve, from their second differences, which cancel its slope."""
    with np.errstate(over="ignore"):
        return math.sqrt(float(np.square(np.diff(values, 2)).mean()) / 6)
