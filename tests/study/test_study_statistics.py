"""Rows of arms compared with a baseline: intervals, tests, seeds needed; and what simulated studies show of them."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.power import TTestPower
from tables import cases

from diffusers_lrlab.evaluation.metrics import METRICS
from diffusers_lrlab.study.analysis import statistics
from diffusers_lrlab.study.analysis.statistics import (
    add_holm,
    compare,
    detectable,
    paired,
    seeds_needed,
)
from diffusers_lrlab.study.analysis.summary import findings

KEYS = "arm dataset metric n pairs mean std ci_low ci_high diff diff_low diff_high p p_adjusted effect_size seeds_needed"


def by_seed(*figures):
    """Figures of the seeds 0, 1, 2, ...; `None` for a run without one."""
    return {seed: value for seed, value in enumerate(figures) if value is not None}


def two_arms(figures, baseline, metric="kl", **options):
    """The row of arm "a" against the baseline "b" on one data set."""
    values = {"a": {"dino": by_seed(*figures)}, "b": {"dino": by_seed(*baseline)}}
    (row,) = (row for row in compare(values, "b", metric, **options) if row["arm"] == "a")
    return row


def simulated(seed, num_arms=4, num_datasets=2, num_seeds=5, effect=0.0, spread=1.0):
    """A study whose arms 1, 2, ... differ from arm 0 by `effect`, with figures around 10 that share what a seed gives."""
    rng = np.random.default_rng(seed)
    shared = 10 + rng.normal(size=(1, num_datasets, num_seeds))
    figures = shared + spread * rng.normal(size=(num_arms, num_datasets, num_seeds)) / math.sqrt(2)
    figures[1:] += effect
    return {f"arm{i}": {f"set{j}": by_seed(*of_set) for j, of_set in enumerate(of_arm)} for i, of_arm in enumerate(figures)}


# --- Rows ---------------------------------------------------------------------------------------------------------------


def test_rows_have_the_keys_of_the_contract_for_each_arm_and_set():
    rows = compare(simulated(3, effect=-1.5), "arm0", "kl")
    assert [(row["arm"], row["dataset"]) for row in rows] == [(f"arm{i}", f"set{j}") for i in range(4) for j in range(2)]
    assert all(sorted(row) == sorted(KEYS.split()) for row in rows)
    json.dumps(rows, allow_nan=False)
    baseline, *_ = rows  # which is not compared with itself
    assert {baseline[key] for key in ("diff", "diff_low", "diff_high", "p", "p_adjusted", "effect_size")} == {None}
    assert {*baseline["seeds_needed"].values()} == {None}
    assert None not in [baseline[key] for key in ("mean", "std", "ci_low", "ci_high")]
    tested = [row for row in rows if row["p"] is not None]
    smallest = min(tested, key=lambda row: row["p"])
    assert smallest["p_adjusted"] == pytest.approx(len(tested) * smallest["p"])  # one family, of six


def test_mean_spread_and_interval_of_a_sample_by_hand():
    row = two_arms([1, 2, 3, 4, 5], [1, 2, 3, 4, 6])
    assert (row["mean"], row["std"]) == (3, pytest.approx(math.sqrt(2.5)))
    half = 2.776445 * math.sqrt(2.5 / 5)  # the quantile of t with 4 degrees of freedom, from a table
    assert (row["ci_low"], row["ci_high"]) == pytest.approx((3 - half, 3 + half), rel=1e-6)
    row = two_arms([1.0, 2.0], [1.5, 3.0])
    assert row["p"] == pytest.approx(2 / math.pi * math.atan(1 / 3), rel=1e-9)  # t = -3 with 1 degree, in closed form
    assert row["effect_size"] is None


def test_students_own_example_of_pairs():
    """Hours of sleep that two drugs gave ten patients more (Student 1908), as every textbook has it."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    result = paired(first, second)
    assert result[:4] == pytest.approx((-1.58, -2.4598858, -0.7001142, 0.00283289), rel=1e-5)
    assert result.std == pytest.approx(1.229995, rel=1e-6)
    # J(9) = 0.9139 in tables of Hedges' correction
    assert result.effect_size == pytest.approx(-1.58 / 1.229995 * 0.9139, rel=1e-3)


@cases(
    ("figures", "baseline", "n", "pairs", "diff"),
    [
        ([1, 2, 3, 4, 5], [2, 3, 4, 5, 7], 5, 5, -1.2),
        ([1, 2, 3, 4, 5], [2, None, 4, None, 8], 5, 3, -5 / 3),
        ([1, None, 3, None, 5], [None, 2, 4, 6, 9], 3, 2, -2.5),
        ([1, 2], [None, None], 2, 0, None),
        ([3], [1, 2], 1, 1, 2),
        ([], [], 0, 0, None),
    ],
)
def test_seeds_that_one_of_them_lacks_count_for_the_mean_alone(figures, baseline, n, pairs, diff):
    row = two_arms(figures, baseline)
    mean = np.mean([value for value in figures if value is not None]) if n else None
    assert (row["n"], row["pairs"], row["mean"]) == (n, pairs, mean)
    assert row["diff"] == (None if diff is None else pytest.approx(diff))
    assert (row["p"] is None) == (pairs < 2)


# --- No spread ----------------------------------------------------------------------------------------------------------


@cases(("value", "n"), [(0.0, 2), (1e-30, 5), (0.1, 5)])
def test_equal_pairs_of_equal_values(value, n):
    row = two_arms([value] * n, [value] * n)
    assert (row["std"], row["diff"], row["p"], row["p_adjusted"]) == (0, 0, 1, 1)
    empty = ("ci_low", "ci_high", "diff_low", "diff_high", "effect_size")
    assert {row[key] for key in empty} | set(row["seeds_needed"].values()) == {None}


@cases(("n", "shift"), [(2, 0.1), (5, -7.0), (6, 1e-5), (10, 1e9)])
def test_a_constant_difference_has_the_p_of_a_sign_test(n, shift):
    """Also where the differences differ in their last digits, as those of 0.1 do."""
    baseline = np.random.default_rng(n).uniform(1, 2, n)
    row = two_arms(baseline + shift, baseline)
    assert row["p"] == stats.binomtest(0, n).pvalue == 2 ** (1 - n)
    assert row["diff"] == pytest.approx(shift, rel=1e-9)
    assert row["diff_low"] is row["effect_size"] is row["seeds_needed"]["5"] is None


# --- Holm ---------------------------------------------------------------------------------------------------------------


@cases(
    ("p", "adjusted"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.03, 0.03], [0.06, 0.06]),
        ([0.01, None, 0.02], [0.02, None, 0.02]),
        ([0.5, 0.9, 0.0], [1.0, 1.0, 0.0]),
        ([0.012, 0.02, 0.013, 0.049, 0.001], [0.048, 0.048, 0.048, 0.049, 0.005]),
    ],
)
def test_holm_by_hand(p, adjusted):
    rows = [{"p": value} for value in p]
    add_holm(rows)
    assert [row["p_adjusted"] for row in rows] == [None if value is None else pytest.approx(value) for value in adjusted]


# --- Seeds that would be needed -----------------------------------------------------------------------------------------


@cases(
    ("effect_size", "seeds"),
    # The first four are in Cohen's and everybody's tables of paired t tests.
    [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10), (3.0, 4), (3.5, 3), (1e9, 3), (math.inf, 3), (-0.5, 34)]
    + [(1e-6, 7848860509329), (1e-7, None), (0, None), (math.nan, None)],
)
def test_seeds_needed_for_effects(effect_size, seeds):
    assert seeds_needed(effect_size) == seeds
    assert seeds is None or isinstance(seeds_needed(effect_size), int)


def test_seeds_come_from_the_spread_of_differences_and_the_mean_of_the_baseline():
    row = two_arms([11, 9, 10, 12, 10], [10, 10, 10, 10, 10])
    std = np.std([1, -1, 0, 2, 0], ddof=1)
    assert row["seeds_needed"] == {str(percent): seeds_needed(percent / 10 / std) for percent in (1, 5, 10)}
    assert row["seeds_needed"]["1"] > row["seeds_needed"]["5"] > row["seeds_needed"]["10"]
    assert two_arms([-11, -9, -10, -12, -10], [-10] * 5)["seeds_needed"] == row["seeds_needed"]
    assert set(two_arms([1, -1, 2], [0, 0, 0])["seeds_needed"].values()) == {None}  # no percent of nothing


@cases("pairs", [5, 20])
@cases("tests", [1, 4])
def test_detectable_differences_are_those_of_statsmodels(pairs, tests):
    """From the interval of the mean difference, and by Holm's strictest level."""
    effect = TTestPower().solve_power(nobs=pairs, alpha=0.05 / tests, power=0.8)
    first, second = np.random.default_rng(0).normal(size=(2, pairs))
    result = paired(first, second)
    assert detectable(result.low, result.high, pairs, tests) == pytest.approx(result.std * effect, rel=2e-3)
    assert detectable(None, None, pairs, tests) is detectable(-1.0, 1.0, 1, tests) is None


# --- Simulated studies --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_studies_without_an_effect_find_something_in_five_of_a_hundred_at_most(monkeypatch):
    """Holm keeps the family-wise rate below 5 %; the comparisons share a baseline, so it is a little below."""
    monkeypatch.setattr(statistics, "seeds_needed", lambda effect_size: None)  # which takes most of the time
    reps = 400
    studies = [compare(simulated(seed), "arm0", "kl") for seed in range(reps)]
    found = sum(any(row["p"] is not None and row["p_adjusted"] < 0.05 for row in rows) for rows in studies)
    told = sum(any(verdict.is_difference for verdict in findings(rows, "arm0")) for rows in studies)
    assert found == told
    assert stats.binomtest(found, reps, 0.05, "greater").pvalue > 1e-3
    assert found / reps > 0.01
    single = sum(row["p"] < 0.05 for rows in studies for row in rows if (row["arm"], row["dataset"]) == ("arm1", "set0"))
    assert stats.binomtest(single, reps, 0.05).pvalue > 1e-4


# --- Invariants ---------------------------------------------------------------------------------------------------------

figures = st.floats(-100, 100).map(lambda value: round(value, 3))
of_sets = st.dictionaries(
    st.sampled_from(["dino", "moons", "rings"]), st.dictionaries(st.integers(0, 6), figures, max_size=6)
)
studies = st.fixed_dictionaries({"base": of_sets, "one": of_sets}, optional={"two": of_sets})


@given(studies)
@settings(max_examples=40, deadline=None)
def test_rows_are_json_without_nan_and_make_sense(values):
    rows = compare(values, "base", "kl")
    json.dumps(rows, allow_nan=False)
    for row in rows:
        assert row["ci_low"] is None or row["ci_low"] <= row["mean"] <= row["ci_high"]
        assert row["diff_low"] is None or row["diff_low"] <= row["diff"] <= row["diff_high"]
        assert row["p"] is None or 0 <= row["p"] <= row["p_adjusted"] <= 1
        assert row["effect_size"] is None or row["effect_size"] * row["diff"] >= 0
        assert row["diff_low"] is None or (row["p"] < 0.05) == (row["diff_low"] > 0 or row["diff_high"] < 0)


# --- Verdicts -----------------------------------------------------------------------------------------------------------

FIGURES, BASELINE = [0.33, 0.35, 0.34, 0.36, 0.32], [0.40, 0.42, 0.42, 0.41, 0.40]


def verdict_of(figures, baseline, metric="kl", diverged=0):
    """The verdict on "cosine" beside "constant" on dino."""
    values = {"cosine": {"dino": by_seed(*figures)}, "constant": {"dino": by_seed(*baseline)}}
    rows = [{**row, "diverged": diverged} for row in compare(values, "constant", metric)]
    (verdict,) = findings(rows, "constant")
    row = next(row for row in rows if row["arm"] == "cosine")
    assert (verdict.arm, verdict.reference, verdict.dataset, verdict.metric) == ("cosine", "constant", "dino", metric)
    figures = verdict.difference, verdict.low, verdict.high, verdict.p
    assert figures == tuple(row[name] for name in ("diff", "diff_low", "diff_high", "p_adjusted"))
    return verdict


@cases(
    ("figures", "baseline", "diverged", "word"),
    [
        (FIGURES, BASELINE, 0, "better"),
        (BASELINE, FIGURES, 0, "worse"),
        ([None, *FIGURES], [0.9, *BASELINE], 1, "better"),
        ([1.0, 1.2, 0.9], [1.1, 1.0, 1.0], 0, "cannot tell"),
        ([1, 2, 3], [1, 2, 3], 0, "cannot tell"),
        ([2, 3, 4, 5, 6], [1, 2, 3, 4, 5], 0, "cannot tell"),  # a sign test of five
        ([2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6], 0, "worse"),
        ([1.0], [1.5], 0, None),
        ([1.5, None], [None, 1.5], 0, None),
        ([None, None], [1.5, 1.4], 2, "diverged"),
        ([None, None], [1.5, 1.4], 0, None),
    ],
)
def test_words(figures, baseline, diverged, word):
    verdict = verdict_of(figures, baseline, diverged=diverged)
    assert verdict.word == word
    assert verdict.is_difference is (word in ("better", "worse"))


@cases("name", [name for name, metric in METRICS.items() if metric.better != "neither"])
def test_better_follows_the_direction_of_the_metric(name):
    assert verdict_of(FIGURES, BASELINE, name).word == ("worse" if METRICS[name].better == "larger" else "better")
