"""Measurements of small parts of a run, within a shared budget of time, and estimates of the whole."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ..core.environment import is_watched

Readings = list[tuple[int, float]]
"""Sizes of parts, ascending, and their seconds."""


class Budget:
    """Seconds that all measurements of a forecast share; late ones get what is left."""

    def __init__(self, seconds: float):
        self._started, self.seconds = time.perf_counter(), seconds

    @property
    def spent(self) -> float:
        return time.perf_counter() - self._started

    def share(self, part: float) -> float:
        """A share of the remaining seconds."""
        return part * max(0.0, self.seconds - self.spent)

    @contextmanager
    def shown(self, what: str) -> Iterator[None]:
        """Shows in a terminal or notebook what this block measures."""
        about = f"measuring {what} ({self.spent:.1f} of {self.seconds:g} s)"
        with tqdm(total=0, desc=about, bar_format="{desc}", leave=False, disable=not is_watched(), file=sys.stderr):
            yield


def grow(call: Callable[[int], Any], first: int, whole: int, seconds: float, least: int = 1) -> Readings:
    """
    Times parts of doubling size, up to the whole, while the next one is likely to end within these seconds, and the first
    `least` of them in any case. With a `least` of 1 the first part runs twice, and its first time does not count.
    """
    started, size, readings = time.perf_counter(), min(first, whole), []
    if least == 1:
        call(size)
    while True:
        before = time.perf_counter()
        call(size)
        now = time.perf_counter()
        readings.append((size, now - before))
        if size == whole or (len(readings) >= least and now - started + 2 * (now - before) > seconds):
            return readings
        size = min(2 * size, whole)


def line_through(readings: Readings) -> tuple[float, float]:
    """Constant seconds and seconds per item, neither below 0, from the smallest and the largest part."""
    (few, seconds_of_few), (many, seconds_of_many) = readings[0], readings[-1]
    if few == many:
        return 0.0, seconds_of_few / few
    slope = max(0.0, (seconds_of_many - seconds_of_few) / (many - few))
    return max(0.0, seconds_of_many - slope * many), slope


def power_of(readings: Readings, whole: int) -> float:
    """Seconds of the whole by a power law through the two largest parts."""
    size, seconds = readings[-1]
    power = 1.0
    if len(readings) > 1 and readings[-2][1] > 0:
        smaller, of_smaller = readings[-2]
        power = float(np.clip(np.log(seconds / of_smaller) / np.log(size / smaller), 0, 3))
    return seconds * (whole / size) ** power
