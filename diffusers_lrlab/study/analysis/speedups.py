"""How fast curves fall: how many times as fast as others they reach a quality, and whether they still fall at the end."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .statistics import add_holm, datasets_of, paired

Runs = Mapping[int, tuple[ArrayLike, ArrayLike]]  # seed -> updates, quality
Curves = Mapping[str, Mapping[str, Runs]]  # arm -> data set -> runs

_END = 0.1  # share of the evaluations whose mean is the final quality
_NOISES = 2.0  # standard deviations of an evaluation between a final quality and its target
_NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


def speedups(curves: Curves, baseline: str, common: bool = False) -> list[dict[str, Any]]:
    """
    How many times as fast as the baseline each arm reaches the baseline's final quality; smaller quality is better.

    docs/concepts/studies.md explains the method. The speed-up of a pair of runs with one seed is the number of updates that
    the *baseline* needs to reach the target, divided by the number that the arm needs. Over seeds, it is a geometric mean,
    with the t interval and the paired t test of the logarithm (see `paired`), and Holm's method over all rows.

    The target is the mean of the last tenth of the baseline's evaluations, plus two standard deviations of the evaluation
    noise of the noisier run. With `common`, it is the final quality of the worse run of each pair. Curves are denoised
    first, by a running median of three and isotonic regression: otherwise, the arm with the noisier evaluations would be
    faster by its noise alone. Pairs without a target, or with one that is reached before the first update, are omitted.

    A run that never reaches the target, or diverged, is censored: it counts with the number of updates of the longer run of
    the pair, so the speed-up is an upper bound without an interval; one above 1 proves nothing, so its p is 1.

    `curves[arm][dataset][seed]` is a pair of arrays: increasing updates, and the quality after them. The last one of a run
    that diverged is not finite. A row for each arm and data set has the keys arm, dataset, n (pairs), censored (runs of this
    arm), ends_worse (pairs in which it does, or diverged), updates_needed (median over the runs), speedup, ci_low, ci_high,
    p and p_adjusted; `None` for what cannot be computed and for the baseline itself.
    """
    rows = []
    for arm, of_arm in curves.items():
        for dataset in datasets_of(curves):
            references = curves[baseline].get(dataset, {})
            row = {"arm": arm, "dataset": dataset, **_speedup(of_arm.get(dataset, {}), references, common)}
            if arm == baseline:
                row |= dict.fromkeys(("speedup", "ci_low", "ci_high", "p"))
            rows.append(row)
    add_holm(rows)
    return rows


def updates_to_reach(updates: ArrayLike, quality: ArrayLike, target: float) -> float | None:
    """
    The update at which a curve first reaches `target`, interpolated linearly between evaluations; `None` if it never does.

    Smaller quality is better; values that are not finite are skipped.
    """
    at, values = np.asarray(updates, float), np.asarray(quality, float)
    reached = np.flatnonzero(np.isfinite(values) & (values <= target))
    if not len(reached):
        return None
    first = int(reached[0])
    if first == 0 or not math.isfinite(values[first - 1]):
        return float(at[first])
    share = (values[first - 1] - target) / (values[first - 1] - values[first])
    return float(at[first - 1] + share * (at[first] - at[first - 1]))


class _Denoised(NamedTuple):
    """A curve without evaluation noise, its final quality (NaN if it diverged), that noise, and its number of updates."""

    updates: np.ndarray
    fit: np.ndarray
    end: float
    noise: float
    length: float


def _denoised(updates: ArrayLike, quality: ArrayLike) -> _Denoised:
    from scipy.ndimage import median_filter
    from scipy.optimize import isotonic_regression

    at, values = np.asarray(updates, float), np.asarray(quality, float)
    length, finite = float(at.max(initial=0)), np.isfinite(values)
    if not len(values) or not finite[-1]:
        return _Denoised(at[:0], values[:0], math.nan, 0.0, length)
    at, values = at[finite], values[finite]
    noise, values = _noise(values), median_filter(values, 3, mode="nearest")
    fit = isotonic_regression(values, increasing=False).x
    # But for rounding, no mean of last values is below the last value of the fit.
    end = max(float(values[-max(1, int(_END * len(values))) :].mean()), float(fit[-1]))
    return _Denoised(at, fit, end, noise, length)


def _noise(values: np.ndarray) -> float:
    """
    The standard deviation of an evaluation relative to its neighbours, over the second half of a curve.

    From second differences, in which a straight line vanishes, and their median, which ignores single spikes.
    """
    bends = np.diff(values[len(values) // 2 :], 2)
    return _NORMAL * float(np.median(np.abs(bends))) / math.sqrt(6) if len(bends) else 0.0


def _speedup(runs: Runs, references: Runs, common: bool) -> dict[str, Any]:
    needed, logs, reference_logs, ends_worse = [], [], [], 0
    for seed in sorted(runs.keys() & references.keys()):
        own, other = _denoised(*runs[seed]), _denoised(*references[seed])
        if not math.isfinite(other.end):
            continue
        is_worse = not own.end <= other.end
        end = own.end if common and own.end > other.end else other.end
        target = end + _NOISES * max(own.noise, other.noise)
        own_updates, other_updates = (updates_to_reach(curve.updates, curve.fit, target) for curve in (own, other))
        longest = max(own.length, other.length)
        # The reference always reaches its own target, as the last value of its fit is no higher than its final quality.
        if own_updates == 0 or not other_updates or not longest:
            continue
        ends_worse += is_worse
        needed.append(math.inf if own_updates is None else own_updates)
        logs.append(math.log(own_updates or longest))
        reference_logs.append(math.log(other_updates))
    log = paired(reference_logs, logs)
    censored = sum(map(math.isinf, needed))
    # The true speed-up below an upper bound above 1 could be on either side of 1.
    proves_nothing = log.p is not None and censored and (log.diff or 0) > 0
    median = float(np.median(needed)) if needed else math.inf
    return {
        "n": len(needed),
        "censored": censored,
        "ends_worse": ends_worse,
        "updates_needed": median if math.isfinite(median) else None,
        "speedup": None if log.diff is None or censored == len(needed) else math.exp(log.diff),
        "ci_low": None if log.low is None or censored else math.exp(log.low),
        "ci_high": None if log.high is None or censored else math.exp(log.high),
        "p": 1.0 if proves_nothing else log.p,
    }


# --- the end of a curve ----------------------------------------------------------------------------------------------

LAST_PART = 0.2  # of the updates of a run
# Share of a curve's range. exp(-t / T) falls by 4 % in the last fifth of 3 T, and by 2 % in that of 4 T.
STILL_FALLING = 0.03
_FEWEST_POINTS = 3  # for a slope with a standard error


def has_end(updates: np.ndarray) -> bool:
    """Whether the last part of a curve has enough points to tell a fall from noise."""
    return len(updates) > 0 and int(_is_last(updates).sum()) >= _FEWEST_POINTS


def still_falling(updates: np.ndarray, values: np.ndarray) -> bool:
    """
    Whether a curve falls over its last part by more than `STILL_FALLING` of its range, and by more than its noise.

    Both arrays are `(num,)`, finite, and of a curve that [`has_end`]. The fall is that of the regression line through the
    last part, whose slope must be two standard errors below 0.
    """
    from scipy import stats

    last = _is_last(updates)
    line = stats.linregress(updates[last], values[last])
    fall = -line.slope * np.ptp(updates[last])
    return bool(line.slope < -2 * line.stderr and fall > STILL_FALLING * np.ptp(values))


def _is_last(updates: np.ndarray) -> np.ndarray:
    return updates >= (1 - LAST_PART) * updates[-1]
