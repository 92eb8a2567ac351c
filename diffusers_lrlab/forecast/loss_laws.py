r"""Laws of the loss under a schedule of the learning rate: formulas alone; `law_fits.py` fits them.

For given exponents each law is a sum of columns that depend on the schedule, with coefficients that are not negative:
\(L = L_0 + \sum_j c_j x_j\). Rates are relative to a peak and times to a length, so that all numbers are around 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_MOST_DROPS = 256  # of a curve; more, as in a long cosine, are joined with their neighbours
_MOST_STEPS = 2048  # of the bound, for the same reason


@dataclass(frozen=True, eq=False)
class RateSums:
    """
    Sums of the rates of a run, after some numbers of updates.

    The laws of annealing see a schedule as its drops: how far the rate fell (a rise is negative) at the start of an update,
    and how much training has followed since. A warm-up has no drops.
    """

    rates: np.ndarray  # of each update, `(updates,)`
    updates: np.ndarray  # at which the laws are wanted, int64 `(points,)`
    step: float  # the time of an update
    sums: np.ndarray  # of the rates, `(points,)`
    sums_at_peak: np.ndarray  # the same, with warm-up counted at the rate that follows it
    drops: np.ndarray  # `(drops,)`
    levels: np.ndarray  # the rate after each drop, `(drops,)`
    elapsed: np.ndarray  # time since each drop, 0 before it, `(points, drops)`
    passed: np.ndarray  # sum of the rates since each drop, 0 before it, `(points, drops)`

    @classmethod
    def of(
        cls, lrs: np.ndarray, warmup_updates: int, updates: np.ndarray, peak: float = 1.0, length: float = 1.0
    ) -> RateSums:
        """From a learning rate for each update, relative to a peak and to a number of updates."""
        rates, updates, step = lrs / peak, np.asarray(updates, int), 1 / length
        at_peak = rates.copy()
        at_peak[:warmup_updates] = rates[min(warmup_updates, len(rates) - 1)]
        every = -np.diff(at_peak, prepend=at_peak[0])
        fallen = np.flatnonzero(every)
        starts = np.arange(0, len(fallen), math.ceil(len(fallen) / _MOST_DROPS) or 1)
        ends = np.append(starts[1:], len(fallen)) - 1
        first = fallen[(starts + ends) // 2] if len(fallen) else fallen  # the middle one stands for all that are joined
        drops = np.add.reduceat(every[fallen], starts) if len(fallen) else np.zeros(0)
        totals = np.concatenate([[0.0], np.cumsum(rates) * step])
        return cls(
            rates=rates,
            updates=updates,
            step=step,
            sums=totals[updates],
            sums_at_peak=(np.cumsum(at_peak) * step)[updates - 1],
            drops=drops,
            levels=rates[first],
            elapsed=np.maximum(updates[:, None] - first, 0) * step,
            passed=np.maximum(totals[updates][:, None] - totals[first], 0),
        )

    @cached_property
    def bounds(self) -> np.ndarray:
        r"""The terms of [`bound_terms`] that \(D^2\) and \(G^2\) multiply, `(points, 2)`."""
        block = math.ceil(len(self.rates) / _MOST_STEPS)
        edges = np.arange(0, len(self.rates), block)
        means = np.add.reduceat(self.rates, edges) / np.diff([*edges, len(self.rates)])
        rows = []
        for update in self.updates:
            first, *others = bound_terms(means[: max(1, round(update / block))])
            rows.append((first / (block * self.step), sum(others)))
        return np.array(rows)


def annealing_gains(sums: RateSums, memory: float) -> np.ndarray:
    r"""
    \(S_2 = \sum_i m_i\) with \(m_i = \lambda m_{i-1} + (\eta_{i-1} - \eta_i)\) (arXiv 2408.11029, equation 2): `(points,)`.

    Summed over drops: one that was followed by n updates has added \((1 - \lambda^n) / (1 - \lambda)\) times its size.
    `memory` is \(-1 / \ln \lambda\) in units of time, since \(\lambda\) counts updates.
    """
    shares = np.expm1(-sums.elapsed / memory) / np.expm1(-sums.step / memory)
    return shares @ sums.drops * sums.step


def decay_gains(sums: RateSums, b: float, c: float, scale: float) -> np.ndarray:
    r"""
    \(\sum_{k \le t} (\eta_{k-1} - \eta_k) G(\eta_k^{-c} S_k)\) with \(S_k = \sum_{i=k}^t \eta_i\),
    \(G(x) = 1 - (C x + 1)^{-b}\), and \(G = 1\) at a rate of 0 (arXiv 2503.12811, equation 4): `(points,)`. `scale` is C.
    """
    is_zero = sums.levels <= 0
    levels = np.where(is_zero, 1.0, sums.levels)
    gains = 1 - (scale * sums.passed * levels**-c + 1) ** -b
    return np.where(is_zero & (sums.elapsed > 0), 1.0, gains) @ sums.drops


def bound_terms(rates: np.ndarray) -> tuple[float, float, float]:
    r"""
    The terms of the bound on the last iterate, with \(D = G = 1\) (arXiv 2501.18965, theorem 1):
    \(\frac{1}{2 \sum \eta}\), \(\frac{\sum \eta_t^2}{2 \sum \eta}\) and
    \(\frac12 \sum_{k<T} \frac{\eta_k}{\sum_{t>k} \eta_t} \frac{\sum_{t \ge k} \eta_t^2}{\sum_{t \ge k} \eta_t}\).

    Zeros before the first and after the last positive rate are left out.
    """
    used = np.flatnonzero(rates)
    if not len(used):
        return np.inf, np.inf, np.inf
    rates = rates[used[0] : used[-1] + 1]
    left, squares = np.cumsum(rates[::-1])[::-1], np.cumsum(rates[::-1] ** 2)[::-1]
    third = (rates[:-1] / left[1:] * squares[:-1] / left[:-1]).sum() / 2
    return 1 / (2 * left[0]), squares[0] / (2 * left[0]), third


def _annealing(sums: RateSums, shape: Mapping[str, float]) -> np.ndarray:
    return np.stack([sums.sums_at_peak ** -shape["a"], -annealing_gains(sums, shape["memory"])], axis=1)


def _multi_power(sums: RateSums, shape: Mapping[str, float]) -> np.ndarray:
    gains = decay_gains(sums, shape["b"], shape["c"], shape["scale"])
    return np.stack([sums.sums ** -shape["a"], -gains], axis=1)


def _bound(sums: RateSums, shape: Mapping[str, float]) -> np.ndarray:
    return sums.bounds


def _power_of_updates(sums: RateSums, shape: Mapping[str, float]) -> np.ndarray:
    return (sums.updates * sums.step)[:, None] ** -shape["a"]


@dataclass(frozen=True, eq=False)
class Law:
    """A law of the loss."""

    name: str
    source: str
    columns: Callable[[RateSums, Mapping[str, float]], np.ndarray]  # beside that of L0, which is 1: `(points, coefficients)`
    coefficients: tuple[str, ...]
    # Exponents and the like: the lowest and the highest value, and those that a fit starts from.
    shape: Mapping[str, tuple[float, float, tuple[float, ...]]]
    least_schedules: int = 1  # to be fitted to


_POWER = (0.02, 4.0, (0.2, 0.5, 1.0, 2.0))
LAWS = {
    law.name: law
    for law in (
        Law(
            "annealing",
            "arXiv 2408.11029",
            _annealing,
            ("A", "C"),
            {"a": _POWER, "memory": (1e-3, 3.0, (0.01, 0.05, 0.2, 1.0))},
        ),
        Law(
            "multi-power",
            "arXiv 2503.12811",
            _multi_power,
            ("A", "B"),
            {
                "a": _POWER,
                "b": (0.05, 4.0, (0.3, 1.0)),
                "c": (1e-3, 2.0, (0.1, 0.6)),
                "scale": (0.05, 1e4, (2.0, 30.0, 300.0)),
            },
            least_schedules=2,
        ),
        Law("bound", "arXiv 2501.18965", _bound, ("D^2", "G^2"), {}),
    )
}
POWER_OF_UPDATES = Law("power law in updates", "a baseline", _power_of_updates, ("A",), {"a": _POWER})
