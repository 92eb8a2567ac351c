"""How much the tests of a study can show: its noise between seeds, and the smallest difference that is detectable."""

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from .findings import Row
from .statistics import LEVEL, POWER

_QUANTILES = 2000  # of the spread that seeds may have, by which the power is averaged


@cache
def detectable_effect(pairs: int, level: float, power: float = POWER) -> float | None:
    """
    The effect size d_z that a two-sided paired t test at `level` shows with this power; `None` for fewer than two pairs.

    The power is averaged over the distribution of the sample's spread, as statsmodels' `TTestPower` and scipy's noncentral t
    return NaN for few pairs and strict levels.
    """
    from scipy import optimize, stats

    if pairs < 2:
        return None
    freedom = pairs - 1
    shares = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    needed = stats.t.isf(level / 2, freedom) * np.sqrt(stats.chi2.ppf(shares, freedom) / freedom)

    def missed(effect: float) -> float:
        shift = effect * math.sqrt(pairs)
        return float(power - np.mean(stats.norm.sf(needed - shift) + stats.norm.cdf(-needed - shift)))

    high = 1.0
    while missed(high) > 0:
        high *= 2
    return float(optimize.brentq(missed, 0.0, high))


def num_tests(rows: Iterable[Row]) -> int:
    """The comparisons of a family of tests, which Holm's method adjusts for."""
    return sum(row["p"] is not None for row in rows)


def spread_of(low: float | None, high: float | None, pairs: int) -> float | None:
    """The standard deviation of paired differences, from the 95 % interval of their mean; `None` without one."""
    from scipy import stats

    if low is None or high is None or pairs < 2:
        return None
    return float((high - low) / 2 / stats.t.isf(LEVEL / 2, pairs - 1) * math.sqrt(pairs))


def detectable(low: float | None, high: float | None, pairs: int, tests: int) -> float | None:
    """
    The smallest true difference that the adjusted test shows with a probability of 80 %, in the unit of the interval.

    Holm's method tests the smallest p of a family at the level divided by the number of tests, and others less strictly, so
    this is an upper bound. It is as uncertain as the measured spread of the differences.
    """
    spread = spread_of(low, high, pairs)
    effect = detectable_effect(pairs, LEVEL / max(tests, 1))
    return None if spread is None or effect is None else spread * effect


def power_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """
    For each metric and data set: seeds, and over the arms the ranges of noise between seeds and of detectable differences.

    `noise_low` and `noise_high` are standard deviations between seeds as shares of the mean, `detectable_low` and
    `detectable_high` shares of the baseline's mean; `None` where nothing is known.
    """
    study, found = summary["study"], []
    for metric in dict.fromkeys(row["metric"] for row in summary["rows"]):
        of_metric = [row for row in summary["rows"] if row["metric"] == metric]
        tests = num_tests(of_metric)
        for dataset in study["datasets"]:
            rows = [row for row in of_metric if row["dataset"] == dataset]
            means = [row["mean"] for row in rows if row["arm"] == study["baseline"]]
            noise = [share(row["std"], row["mean"]) for row in rows]
            seen = [detectable(row["diff_low"], row["diff_high"], row["pairs"], tests) for row in rows]
            shares = [share(difference, mean) for difference in seen for mean in means]
            row = {"metric": metric, "dataset": dataset, "seeds": max((row["n"] for row in rows), default=0), "tests": tests}
            found.append({**row, **_range("noise", noise), **_range("detectable", shares)})
    return found


def share(value: float | None, mean: float | None) -> float | None:
    """A value as a share of a mean; `None` if that is unknown or 0."""
    return value / abs(mean) if value is not None and mean else None


def _range(name: str, values: list[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    return {f"{name}_low": min(known, default=None), f"{name}_high": max(known, default=None)}
