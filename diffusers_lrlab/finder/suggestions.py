"""The learning rate that losses at rising rates suggest: a tenth of the rate at the middle of the flat bottom."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..core.errors import must_be
from ..core.words import counted
from .range_test import noise_of

FEWEST = 5  # readings that a suggestion needs
_SMALLEST_FALL = 0.02  # share of the loss at the start
# In standard errors of the smoothed curve. The minimum of a curve that does not fall is less than 3.5 errors below its start
# in 99 of 100 curves of 200 readings, in 95 of 20 to 100 readings, and in 90 of the shortest.
_SIGNIFICANT, _CLEAR = 3.5, 8.0  # a fall that counts; one that needs no more smoothing
_SPIKE = 20.0  # times the third quartile of nearby distances to the median of 3
_FINEST, _COARSEST = 50, 12.5  # widths of the smoothing kernel per curve


class Suggestion(NamedTuple):
    """A suggested learning rate, if any."""

    lr: float | None
    reason: str  # also of no rate
    interval: tuple[float, float] | None = None  # equally good rates
    is_noise: bool = False  # there is no rate because noise hides any fall of the loss


def minimum_tenth(lrs: ArrayLike, losses: ArrayLike) -> Suggestion:
    """
    A tenth of the rate at the middle of the smoothed loss's flat bottom: the usual rule of thumb.

    At the bottom, the loss is above its minimum by less than 5 % of the whole fall; the position of the minimum within it is
    due to chance.

    Args:
        lrs (`ArrayLike`): Rising rates above 0, `(num_readings,)`.
        losses (`ArrayLike`): The loss at each, of the same shape; those from the first non-finite one on are ignored.

    Returns:
        [`Suggestion`]: its interval is a tenth of both ends of the bottom.
    """
    from scipy.ndimage import label

    rates, values = np.asarray(lrs, np.float64), np.asarray(losses, np.float64)
    if rates.shape != values.shape or rates.ndim != 1:
        raise ValueError(f"lrs and losses have the shapes {rates.shape} and {values.shape}; give two of (num_readings,).")
    if not ((rates > 0).all() and (np.diff(rates) > 0).all()):
        raise must_be("lrs", rates, "above 0, each above the one before", "give the rates in the order of the test")
    finite = np.isfinite(values)
    end = len(values) if finite.all() else int(np.argmin(finite))
    if end < FEWEST:
        what = "not finite from the start" if end == 0 and len(values) else f"known at {end} rates only"
        return Suggestion(None, f"the loss is {what}; at least {FEWEST} readings are needed")
    x, is_truncated = np.log10(rates[:end]), end < len(finite)
    y, error, widths = smooth_as_needed(values[:end])
    best = int(np.argmin(y))
    if y[0] - y[best] <= max(_SMALLEST_FALL * abs(y[0]), _SIGNIFICANT * error):
        return _no_fall(rates[:end], y, _SIGNIFICANT * error)
    if best == len(y) - 1:
        at = _rate(x[-1])
        if is_truncated:
            return Suggestion(at / 10, f"a tenth of the last rate with a finite loss, {at:.3g}", (at / 100, at / 10))
        return Suggestion(None, f"the loss still falls at the highest rate, {at:.3g}; raise --end_lr to see its minimum")
    chance = 0.0 if widths == _FINEST else error  # the finest smoothing leaves no doubt
    runs, _ = label(y <= y[best] + max(0.05 * (y[0] - y[best]), chance))
    bottom = x[runs == runs[best]]
    low, high = bottom[0], bottom[-1]
    at = _rate((low + high) / 2)
    return Suggestion(at / 10, f"a tenth of the rate with the lowest loss, {at:.3g}", (_rate(low) / 10, _rate(high) / 10))


def combine(suggestions: Sequence[Suggestion]) -> Suggestion:
    """
    The suggestion of repeated tests: the median on a logarithmic scale, with the range of all rates and intervals; no
    rate unless more than half of the tests suggest one.
    """
    named = [suggestion for suggestion in suggestions if suggestion.lr is not None]
    if 2 * len(named) <= len(suggestions):
        without = [suggestion for suggestion in suggestions if suggestion.lr is None]
        return max(without, key=without.count) if without else Suggestion(None, "no test was done")
    if len(named) == 1:
        return named[0]
    rates = [suggestion.lr for suggestion in named if suggestion.lr is not None]
    ends = rates + [end for suggestion in named for end in (suggestion.interval or ())]
    reason = f"{named[0].reason.partition(',')[0]}, by the median of {counted(len(named), 'test')}"
    return Suggestion(_rate(float(np.median(np.log10(rates)))), reason, (min(ends), max(ends)))


def smooth_as_needed(losses: ArrayLike) -> tuple[np.ndarray, float, float]:
    """
    The curve, smoothed until its fall (from its start to its minimum) is significant; the standard error of this fall; and
    the number of smoothing widths per curve. A median of 3 removes spikes, and a Gaussian fine noise.

    A Gaussian over independent readings has the standard error `noise / sqrt(2 * sqrt(pi) * sigma)`; at an end, where the
    curve is mirrored, `sqrt(2)` times that. The noise changes with the rate, so it is estimated from nearby readings,
    without the single spikes that the median removes.
    """
    from scipy.ndimage import gaussian_filter1d, median_filter

    values, widths = np.asarray(losses, np.float64), float(_FINEST)
    near = max(8, len(values) // 8)
    middle = median_filter(values, 3, mode="nearest")
    off = np.abs(values - middle)

    def noise_from(first: int) -> float:
        nearby = slice(first, first + near)
        is_spike = off[nearby] / _SPIKE > np.quantile(off[nearby], 0.75)
        return noise_of(np.where(is_spike, middle[nearby], values[nearby]))

    while True:
        sigma = max(0.5, len(values) / widths)
        y = gaussian_filter1d(middle, sigma)
        best, inside = int(np.argmin(y)), 1 / (2 * math.sqrt(math.pi) * sigma)
        first = max(0, min(best + 2, len(values)) - near)
        at_best = 2 * inside if best > len(values) - 1 - sigma else inside
        error = math.hypot(noise_from(0) * math.sqrt(2 * inside), noise_from(first) * math.sqrt(at_best))
        if y[0] - y[best] > _CLEAR * error or widths <= _COARSEST:
            return y, error, widths
        widths /= 2


def _no_fall(rates: np.ndarray, y: np.ndarray, noise: float) -> Suggestion:
    smallest = _SMALLEST_FALL * abs(y[0])
    rises = " and rises" if y[-1] > y[0] + max(smallest, noise) else ""
    is_noise = bool(noise > smallest)
    least = f"by at least {100 * _SMALLEST_FALL:.0f} %"
    if is_noise:
        least = f"by more than the noise of independent losses, which can be {100 * noise / (abs(y[0]) or 1):.0f} % of it"
    remedy = "lower --start_lr" if rises else "raise --end_lr, use more updates or a larger batch"
    text = f"the loss does not fall{rises} between {rates[0]:.3g} and {rates[-1]:.3g} {least}; {remedy}"
    return Suggestion(None, f"{text}, or check data and model", is_noise=is_noise)


def _rate(log10: float) -> float:
    return float(10.0**log10)
