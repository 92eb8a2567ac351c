"""Arms against a baseline, seed by seed: spread, intervals, tests, the number of seeds needed, and power."""

import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

Values = Mapping[str, Mapping[str, Mapping[int, float]]]  # arm -> data set -> seed -> value

LEVEL = 0.05  # of every test, and one minus the confidence of every interval
POWER = 0.8
PERCENTS = (1, 5, 10)
FEW_SEEDS = 5  # a paired test of fewer detects large differences only

_ROUNDING = 1e-12  # a spread or a difference below this share of the values is rounding
_SURE_WITH_THREE = 3.5  # d_z from which three seeds have the power; statsmodels' solver fails for large ones
_HOPELESS = 1e-6  # d_z that would take 10^13 seeds, where the solver fails too


class Paired(NamedTuple):
    """Statistics of paired differences; `None` for what cannot be computed. `std` is that of the differences."""

    diff: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    effect_size: float | None = None
    std: float | None = None


def compare(values: Values, baseline: str, metric: str) -> list[dict[str, Any]]:
    """
    Compares all arms with the baseline by one metric on all data sets, paired by seed.

    Seeds that only one of the two has count for its mean, but not for the difference. All comparisons of this call that
    have a p-value are one family of Holm's correction, so adjusted values depend on the arms and data sets in it; nothing
    else does.

    `values[arm][dataset][seed]` are finite; runs without a value, such as those that diverged, are left out. Rows have the
    keys arm, dataset, metric, n (values), pairs (seeds shared with the baseline), mean, std, ci_low, ci_high, diff (arm
    minus baseline), diff_low, diff_high, p, p_adjusted, effect_size and seeds_needed (a `dict` from percents, as text). They
    are `None` if they cannot be computed: differences of the baseline itself, spreads of one value, intervals and effects
    without a spread.
    """
    rows = []
    for arm, of_arm in values.items():
        for dataset in datasets_of(values):
            own, other = of_arm.get(dataset, {}), values[baseline].get(dataset, {})
            sample = sorted_values(own)
            shared = sorted(own.keys() & other.keys()) if arm != baseline else []
            diff, diff_low, diff_high, p, effect_size, std = paired(
                [own[seed] for seed in shared], [other[seed] for seed in shared]
            )
            low, high = t_interval(sample)
            row = {"arm": arm, "dataset": dataset, "metric": metric, "n": len(sample), "pairs": len(shared)}
            row |= {"mean": float(sample.mean()) if len(sample) else None, "std": _spread(sample)}
            row |= {"ci_low": low, "ci_high": high}
            row |= {"diff": diff, "diff_low": diff_low, "diff_high": diff_high, "p": p, "effect_size": effect_size}
            reference = float(sorted_values(other).mean()) if std else 0.0
            needed = {str(percent): seeds_needed(percent / 100 * reference / std) if std else None for percent in PERCENTS}
            rows.append(row | {"seeds_needed": needed})
    add_holm(rows)
    return rows


def datasets_of(values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Every data set that some arm has, in order of first appearance."""
    return list(dict.fromkeys(dataset for of_arm in values.values() for dataset in of_arm))


def paired(first: Iterable[float], second: Iterable[float]) -> Paired:
    """
    The differences `first - second` of pairs: mean, t interval, t test and effect size.

    Not Wilcoxon's test: with the usual five seeds its smallest p is 2 / 2^5 = 0.0625, so nothing could be significant at
    the level 0.05. If all differences are equal, t is undefined: equal pairs have p = 1, and a constant difference has the p
    of an exact sign test, 2 / 2^n, because a handful of seeds cannot justify p = 0. The effect size is Cohen's d_z with
    Hedges' correction, without which it is 25 % too large on average at five seeds; it needs three pairs.
    """
    from scipy import special, stats

    a, b = np.asarray(list(first), float), np.asarray(list(second), float)
    if not len(a):
        return Paired()
    differences = a - b
    diff, n, scale = float(differences.mean()), len(a), max(np.abs(a).max(), np.abs(b).max())
    diff = diff if abs(diff) > _ROUNDING * scale else 0.0
    std = _spread(differences, scale)
    if std is None:
        return Paired(diff)
    if std == 0:
        return Paired(diff, p=2.0 ** (1 - n) if diff else 1.0, std=0.0)
    test = stats.ttest_rel(a, b)
    low, high = test.confidence_interval(1 - LEVEL)
    # Hedges (1981), with the degrees of freedom of pairs: E[d_z] = d / correction.
    freedom = n - 1
    correction = math.exp(special.gammaln(freedom / 2) - special.gammaln((freedom - 1) / 2)) / math.sqrt(freedom / 2)
    return Paired(diff, float(low), float(high), float(test.pvalue), correction * diff / std if n > 2 else None, std)


def t_interval(sample: np.ndarray) -> tuple[float | None, float | None]:
    """The 95 % t interval of a mean; `None` for fewer than two values, or equal ones."""
    from scipy import stats

    std = _spread(sample)
    if not std:
        return None, None
    low, high = stats.t.interval(1 - LEVEL, len(sample) - 1, sample.mean(), std / math.sqrt(len(sample)))
    return float(low), float(high)


def seeds_needed(effect_size: float) -> int | None:
    """
    Pairs at which a two-sided paired t test at the level 0.05 detects a true effect of this d_z with power 0.8.

    At least three, since two hardly determine a spread; `None` below a d_z of 1e-6. This holds for a single comparison: with
    more, Holm's correction requires more seeds. A d_z from a measured spread is as uncertain as that spread: five seeds may
    measure anything from a third to five thirds of the true one (95 %), so the number they ask for has a power of about 0.7
    on average.
    """
    from statsmodels.stats.power import TTestPower

    effect_size = abs(effect_size)
    if not effect_size >= _HOPELESS:
        return None
    if effect_size >= _SURE_WITH_THREE:
        return 3
    return max(3, math.ceil(TTestPower().solve_power(effect_size, alpha=LEVEL, power=POWER, alternative="two-sided")))


def add_holm(rows: list[dict[str, Any]]) -> None:
    """Adds "p_adjusted" to every row, by Holm's method over those whose "p" is not `None`."""
    from statsmodels.stats.multitest import multipletests

    tested = [row for row in rows if row["p"] is not None]
    for row in rows:
        row["p_adjusted"] = None
    if tested:
        adjusted = multipletests([row["p"] for row in tested], LEVEL, method="holm")[1]
        for row, p in zip(tested, adjusted, strict=True):
            row["p_adjusted"] = float(p)


def sorted_values(of_set: Mapping[int, float]) -> np.ndarray:
    """The values by seed, so that sums do not depend on the order in which runs were read."""
    return np.array([of_set[seed] for seed in sorted(of_set)], dtype=float)


def _spread(sample: np.ndarray, scale: float | None = None) -> float | None:
    """The standard deviation (`ddof=1`), 0 if it is only rounding, `None` for fewer than two values."""
    if len(sample) < 2:
        return None
    std = float(sample.std(ddof=1))
    return std if std > _ROUNDING * (np.abs(sample).max() if scale is None else scale) else 0.0


# --- power: what the tests of a study can show -----------------------------------------------------------------------

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


def detectable(low: float | None, high: float | None, pairs: int, tests: int) -> float | None:
    """
    The smallest true difference that the adjusted test shows with a probability of 80 %, in the unit of the interval.

    It follows from the spread of the paired differences, and that from the 95 % interval of their mean. Holm's method tests
    the smallest p of a family at the level divided by the number of tests, and others less strictly, so this is an upper
    bound, as uncertain as the measured spread.
    """
    from scipy import stats

    effect = detectable_effect(pairs, LEVEL / max(tests, 1))
    if low is None or high is None or effect is None:
        return None
    return float((high - low) / 2 / stats.t.isf(LEVEL / 2, pairs - 1) * math.sqrt(pairs)) * effect


def power_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """
    For each metric and data set: seeds, and over the arms the ranges of noise between seeds and of detectable differences.

    `noise_low` and `noise_high` are standard deviations between seeds as shares of the mean, `detectable_low` and
    `detectable_high` shares of the baseline's mean; `None` where nothing is known.
    """
    study, found = summary["study"], []
    for metric in dict.fromkeys(row["metric"] for row in summary["rows"]):
        of_metric = [row for row in summary["rows"] if row["metric"] == metric]
        tests = sum(row["p"] is not None for row in of_metric)  # which Holm's method adjusts for
        for dataset in study["datasets"]:
            rows = [row for row in of_metric if row["dataset"] == dataset]
            means = [row["mean"] for row in rows if row["arm"] == study["baseline"]]
            noise = [_share(row["std"], row["mean"]) for row in rows]
            seen = [detectable(row["diff_low"], row["diff_high"], row["pairs"], tests) for row in rows]
            shares = [_share(difference, mean) for difference in seen for mean in means]
            row = {"metric": metric, "dataset": dataset, "seeds": max((row["n"] for row in rows), default=0), "tests": tests}
            found.append({**row, **_range("noise", noise), **_range("detectable", shares)})
    return found


def _share(value: float | None, mean: float | None) -> float | None:
    """A value as a share of a mean; `None` if that is unknown or 0."""
    return value / abs(mean) if value is not None and mean else None


def _range(name: str, values: list[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    return {f"{name}_low": min(known, default=None), f"{name}_high": max(known, default=None)}
