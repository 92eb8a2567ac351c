"""Ranks of arms over data sets."""

import math

import numpy as np
import pytest
from tables import rows
from values_of_studies import within

from diffusers_lrlab.core.words import counted
from diffusers_lrlab.study.analysis.ranks import nemenyi_difference, rank_groups, ranks

# --- Ranks --------------------------------------------------------------------------------------------------------------


def table(**columns):
    """Figures of arms over data sets, one seed each."""
    return {arm: {f"set{i}": {0: value} for i, value in enumerate(column)} for arm, column in columns.items()}


@rows(
    ("num_arms", "q"),
    # Table 5(a) of Demšar (2006)
    [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (6, 2.850), (7, 2.949), (8, 3.031), (9, 3.102), (10, 3.164)],
)
def test_critical_differences_come_from_the_published_table(num_arms, q):
    expected = q * math.sqrt(num_arms * (num_arms + 1) / (6 * 12))
    assert nemenyi_difference(num_arms, 12) == pytest.approx(expected, abs=1e-3)


def test_the_critical_difference_of_demsars_example():
    assert nemenyi_difference(4, 14) == pytest.approx(1.25, abs=0.005)


def test_friedman_by_hand():
    """Ranks (1, 2, 3) in every one of four sets: 12 N / (k (k + 1)) (sum of squares - k (k + 1)^2 / 4) = 8."""
    result = ranks(table(a=[1, 2, 3, 4], b=[2, 3, 4, 5], c=[3, 4, 5, 6]), "kl")
    assert result["mean_ranks"] == {"a": 1, "b": 2, "c": 3}
    assert (result["statistic"], result["p"]) == pytest.approx((8, math.exp(-4)))
    assert result["critical_difference"] == pytest.approx(2.343 * math.sqrt(12 / 24), abs=1e-3)
    assert result["groups"] == [["a", "b"], ["b", "c"]]
    assert result["reason"] is None


@pytest.mark.parametrize(("metric", "best"), [("kl", "a"), ("coverage", "c")])
def test_the_best_has_rank_one_in_the_direction_of_the_metric(metric, best):
    result = ranks(table(a=[1, 1], b=[2, 2], c=[3, 3]), metric)
    assert next(iter(result["mean_ranks"])) == best
    assert result["mean_ranks"][best] == 1


def test_ties_share_their_rank():
    result = ranks(table(a=[1, 1, 1], b=[1, 2, 2], c=[2, 2, 3]), "kl")
    assert result["mean_ranks"] == pytest.approx({"a": 3.5 / 3, "b": 6 / 3, "c": 8.5 / 3})


def test_arms_that_tie_everywhere_do_not_differ():
    result = ranks(table(a=[1, 2], b=[1, 2], c=[1, 2]), "kl")
    assert (result["statistic"], result["p"], result["groups"]) == (0, 1, [["a", "b", "c"]])


def test_ranks_are_of_means_over_seeds():
    values = table(a=[5, 5], b=[4, 4], c=[9, 9])
    values["a"] = {name: {0: 5, 1: 1} for name in values["a"]}
    assert ranks(values, "kl")["mean_ranks"] == {"a": 1, "b": 2, "c": 3}


def test_a_set_on_which_an_arm_has_nothing_is_left_out():
    values = table(a=[1, 1, 3], b=[2, 2, 2], c=[3, 3, 1])
    values["c"]["set2"] = {}
    result = ranks(values, "kl")
    assert (result["datasets"], result["left_out"]) == (["set0", "set1"], ["set2"])
    assert result["mean_ranks"] == {"a": 1, "b": 2, "c": 3}


@rows(
    ("values", "arms", "sets"),
    [
        (table(a=[1, 2], b=[2, 1]), 2, 2),
        (table(a=[1], b=[2], c=[3]), 3, 1),
        (table(a=[], b=[], c=[]), 3, 0),
        ({}, 0, 0),
        ({"a": {"dino": {0: 1.0}}, "b": {"moons": {0: 1.0}}, "c": {}}, 3, 0),
    ],
)
def test_too_few_to_rank_gives_the_reason(values, arms, sets):
    result = ranks(values, "kl")
    assert [result[key] for key in ("statistic", "p", "critical_difference", "groups")] == [None] * 4
    assert f"here are {counted(arms, 'arm')} with values on {counted(sets, 'common data set')}" in result["reason"]
    assert len(result["mean_ranks"]) == (arms if sets else 0)


@rows(
    ("mean_ranks", "difference", "groups"),
    [
        ([1, 2, 3, 4], 1.0, ["ab", "bc", "cd"]),
        ([1, 2, 3, 4], 0.9, []),
        ([1, 2, 3, 4], 2.5, ["abc", "bcd"]),
        ([1, 2, 3, 4], 3.0, ["abcd"]),
        ([1, 1.5, 3.5, 4], 1.0, ["ab", "cd"]),
        ([1, 1.2, 1.3, 4], 1.0, ["abc"]),
        ([2.5, 2.5, 2.5, 2.5], 0.0, ["abcd"]),
        ([1, 4, 4.5, 8], 1.0, ["bc"]),
        ([4, 3, 2, 1], 1.0, ["dc", "cb", "ba"]),
    ],
)
def test_groups_are_the_largest_within_the_difference(mean_ranks, difference, groups):
    found = rank_groups(dict(zip("abcd", mean_ranks, strict=True)), difference)
    assert ["".join(group) for group in found] == groups


@pytest.mark.slow
def test_ranks_without_an_effect_are_told_apart_at_the_stated_rate():
    rng, reps, p = np.random.default_rng(0), 300, []
    for _ in range(reps):
        p.append(ranks(table(**dict(zip("abcd", rng.normal(size=(4, 12)), strict=True))), "kl")["p"])
    assert within(sum(value < 0.05 for value in p), reps, 0.05)
