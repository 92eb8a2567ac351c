"""How much sooner an arm reaches the quality that the baseline ends with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import LabError, did_you_mean
from .statistics import add_holm, datasets_of, paired

Runs = Mapping[int, tuple[ArrayLike, ArrayLike]]  # seed -> updates, quality
Curves = Mapping[str, Mapping[str, Runs]]  # arm -> data set -> runs


def speedups(curves: Curves, baseline: str, common: bool = False) -> list[dict[str, Any]]:
    """
    How many times as fast as the baseline each arm reaches the baseline's final quality.

    The target is the last quality of the baseline's run; smaller is better. Runs of arm and baseline are paired by seed, and
    the speed-up of a pair is the updates that the *baseline* needed until it first reached the target over those that the
    arm needed. The first crossing counts for both, so that noise of the evaluation favours neither. Over seeds this is a
    geometric mean, with the t interval and the paired t test of the logarithm (see `paired`), and Holm over all arms and
    data sets.

    A run that never gets there is censored. It counts with the number of updates that the longer of the pair has made,
    the most favourable one for runs of one length; so where "censored" is not 0, the speed-up is an upper bound, without an
    interval, and where all are censored there is none. (Not with its own number, or a run that diverges early would pass
    for a fast one.) An upper bound above 1 says nothing, and then p is 1. Pairs are left out where the baseline's last
    quality is not finite and where the target is reached before the first update.

    Args:
        curves (`dict`): `curves[arm][dataset][seed]` is a pair of arrays: updates, which increase, and the quality after
            them. Runs that diverged are in it with what they have; qualities that are not finite reach nothing.
        baseline (`str`): The arm that sets the target.
        common (`bool`, *optional*, defaults to `False`): The target is the worse of the last qualities of a pair, which both
            reach. Which of two came first is told without censoring then; the baseline's quality is another question.

    Returns:
        `list[dict]`: one row for each arm and data set, with the keys arm, dataset, n (pairs), censored (runs of this arm),
        updates_needed (median over the runs, `None` where half of them or more never get there), speedup, ci_low, ci_high,
        p and p_adjusted; `None` for what cannot be computed and for the baseline's own.

    Raises:
        `LabError`: for a baseline that is no arm, and arrays that are no curve.
    """
    if baseline not in curves:
        raise LabError(
            f"The baseline {baseline!r} is none of the arms {', '.join(map(repr, curves))}.{did_you_mean(baseline, curves)}"
        )
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
    The updates at which a curve first reaches `target`, linearly between evaluations; `None` if it never does.

    Args:
        updates (`ArrayLike`): `(num_evaluations,)`, not negative, increasing.
        quality (`ArrayLike`): `(num_evaluations,)`; what is not finite reaches nothing.
        target (`float`): The quality to reach; smaller is better.

    Raises:
        `LabError`: for arrays that are no curve.
    """
    at, values = _curve(updates, quality)
    reached = np.flatnonzero(np.isfinite(values) & (values <= target))
    if not len(reached):
        return None
    first = int(reached[0])
    if first == 0 or not math.isfinite(values[first - 1]):
        return float(at[first])
    share = (values[first - 1] - target) / (values[first - 1] - values[first])
    return float(at[first - 1] + share * (at[first] - at[first - 1]))


def _curve(updates: ArrayLike, quality: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    at, values = np.asarray(updates, float), np.asarray(quality, float)
    if at.ndim != 1 or at.shape != values.shape:
        raise LabError(f"A curve is two rows of one length; the updates have shape {at.shape}, the quality {values.shape}.")
    if not np.all(np.isfinite(at)) or np.any(at < 0) or np.any(np.diff(at) <= 0):
        raise LabError(f"The updates of a curve increase from 0 or more; these are {np.array2string(at, threshold=8)}.")
    return at, values


def _ends(runs: Runs) -> dict[int, float]:
    """The last quality by seed, where it is a number."""
    ends = {seed: float(_curve(*runs[seed])[1][-1]) for seed in sorted(runs) if np.size(runs[seed][1])}
    return {seed: end for seed, end in ends.items() if math.isfinite(end)}


def _speedup(runs: Runs, references: Runs, common: bool) -> dict[str, Any]:
    """A row's figures, from the curves of an arm and of the baseline by seed."""
    goals, own_ends = _ends(references), _ends(runs)
    if common:
        goals = {seed: max(goal, own_ends.get(seed, goal)) for seed, goal in goals.items()}
    needed, logs, reference_logs = [], [], []
    for seed, goal in goals.items():
        if seed not in runs:
            continue
        own, other = (updates_to_reach(pair[seed][0], pair[seed][1], goal) for pair in (runs, references))
        longest = max(float(np.max(np.asarray(pair[seed][0]), initial=0)) for pair in (runs, references))
        assert other is not None  # the baseline reaches its own end, and what is worse
        if 0 in (own, other, longest):
            continue
        needed.append(math.inf if own is None else own)
        logs.append(math.log(own or longest))
        reference_logs.append(math.log(other))
    log = paired(reference_logs, logs)
    censored = sum(map(math.isinf, needed))
    # The true numbers of runs that never got there could make an upper bound above 1 anything.
    untold = log.p is not None and censored and (log.diff or 0) > 0
    median = float(np.median(needed)) if needed else math.inf
    return {
        "n": len(needed),
        "censored": censored,
        "updates_needed": median if math.isfinite(median) else None,
        "speedup": None if log.diff is None or censored == len(needed) else math.exp(log.diff),
        "ci_low": None if log.low is None or censored else math.exp(log.low),
        "ci_high": None if log.high is None or censored else math.exp(log.high),
        "p": 1.0 if untold else log.p,
    }
