"""Ranks of arms over data sets, with a critical difference.

Ranks follow Demšar, Statistical Comparisons of Classifiers over Multiple Data Sets, JMLR 7, 2006.
"""

import math
from typing import Any

import numpy as np

from ...core.words import counted
from ...evaluation.metrics import better_of
from .statistics import LEVEL, Values, check_values, datasets_of, sorted_values


def ranks(values: Values, metric: str) -> dict[str, Any]:
    """
    The mean rank of each arm, 1 for the best, with data sets as blocks.

    Arms are ranked by their means over seeds; ties share their mean rank. A data set on which some arm has no value is left
    out, since the ranks of the others would not be comparable. Friedman's p comes from the chi-squared limit, which is rough
    below about ten data sets: read it with the adjusted tests.

    The result has the keys metric, mean_ranks (a `dict` of arms, best first), datasets (those used), left_out, statistic, p,
    critical_difference, groups (lists of two or more arms, best first, whose mean ranks differ by no more than the critical
    difference; none contains another) and reason. With fewer than three arms or two data sets, statistic, p,
    critical_difference and groups are `None` and the reason says why; else it is `None`.

    Raises:
        `LabError`: for values that are not finite.
    """
    from scipy import stats

    check_values(values, metric)
    arms, every = sorted(values), datasets_of(values)
    used = [dataset for dataset in every if all(values[arm].get(dataset) for arm in arms)]
    left_out = [dataset for dataset in every if dataset not in used]
    result: dict[str, Any] = {"metric": metric, "mean_ranks": {}, "datasets": used, "left_out": left_out}
    result |= dict.fromkeys(("statistic", "p", "critical_difference", "groups", "reason"))
    if used:
        # Sorted, so that the order in which runs were read changes no last digit.
        means = np.array([[sorted_values(values[arm][dataset]).mean() for arm in arms] for dataset in sorted(used)])
        order = stats.rankdata(-means if better_of(metric) == "larger" else means, axis=1)
        mean_ranks = dict(zip(arms, order.mean(axis=0).tolist(), strict=True))
        result["mean_ranks"] = dict(sorted(mean_ranks.items(), key=lambda item: item[1]))
    if len(arms) < 3 or len(used) < 2:
        result["reason"] = (
            f"Ranks are tested with three arms and two data sets at least; here are {counted(len(arms), 'arm')} with "
            f"values on {counted(len(used), 'common data set')}."
        )
        return result
    if np.all(order == order[0, 0]):
        result["statistic"], result["p"] = 0.0, 1.0  # all arms tie everywhere; scipy would divide by zero
    else:
        result["statistic"], result["p"] = map(float, stats.friedmanchisquare(*order.T))
    result["critical_difference"] = nemenyi_difference(len(arms), len(used))
    result["groups"] = rank_groups(result["mean_ranks"], result["critical_difference"])
    return result


def nemenyi_difference(num_arms: int, num_datasets: int) -> float:
    """
    The smallest difference of two mean ranks that is significant in Nemenyi's test at the level 0.05.

    It is q sqrt(k (k + 1) / (6 N)) for k arms and N data sets, q being the quantile of the studentized range over sqrt(2).
    """
    from scipy import stats

    q = stats.studentized_range.ppf(1 - LEVEL, num_arms, math.inf) / math.sqrt(2)
    return float(q * math.sqrt(num_arms * (num_arms + 1) / (6 * num_datasets)))


def rank_groups(mean_ranks: dict[str, float], critical_difference: float) -> list[list[str]]:
    """The largest groups of two or more arms, best first, that differ by no more than the critical difference."""
    ordered = sorted(mean_ranks.items(), key=lambda item: item[1])
    groups: list[list[str]] = []
    last_end = 0
    for start, (_, best) in enumerate(ordered):
        # Ranks are multiples of 1 / (2 N): an excess of rounding is none.
        end = sum(rank - best <= critical_difference + 1e-9 for _, rank in ordered)
        if end - start > 1 and end > last_end:
            groups.append([arm for arm, _ in ordered[start:end]])
            last_end = end
    return groups
