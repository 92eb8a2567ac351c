"""Statistics of studies against tables, hand-made cases and simulated studies whose truth is known."""

import functools
import gc
import itertools
import json
import math
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.words import counted
from diffusers_lrlab.evaluation.metrics import METRICS
from diffusers_lrlab.study.analysis import statistics
from diffusers_lrlab.study.analysis.findings import findings, number, p_value, signed, speedup_findings
from diffusers_lrlab.study.analysis.ranks import nemenyi_difference, rank_groups, ranks
from diffusers_lrlab.study.analysis.speedups import _noise, speedups, updates_to_reach
from diffusers_lrlab.study.analysis.statistics import (
    add_holm,
    bootstrap_interval,
    compare,
    paired,
    seeds_needed,
    t_interval,
)
from diffusers_lrlab.study.analysis.summary import _compare_speed, against_controls
from diffusers_lrlab.study.spec.reading import read_spec

LARGER_IS_BETTER = [name for name, metric in METRICS.items() if metric.better == "larger"]

KEYS = (
    "arm dataset metric n pairs mean std ci_low ci_high boot_low boot_high diff diff_low diff_high p p_adjusted effect_size "
    "seeds_needed"
)


@pytest.fixture(autouse=True, scope="module")
def _no_garbage():
    """statsmodels collects garbage whenever it corrects p values, 50 ms each time with all that tests have imported."""
    gc.freeze()
    yield
    gc.unfreeze()


def by_seed(*figures):
    """Figures of the seeds 0, 1, 2, ...; `None` for a run without one."""
    return {seed: value for seed, value in enumerate(figures) if value is not None}


def row_of(rows, arm, dataset="dino"):
    return next(row for row in rows if (row["arm"], row["dataset"]) == (arm, dataset))


def two_arms(figures, baseline, metric="kl", **options):
    """The row of arm "a" against the baseline "b" on one data set."""
    values = {"a": {"dino": by_seed(*figures)}, "b": {"dino": by_seed(*baseline)}}
    return row_of(compare(values, "b", metric, **options), "a")


def simulated(seed, num_arms=4, num_datasets=2, num_seeds=5, effect=0.0, spread=1.0):
    """A study whose arms 1, 2, ... differ from arm 0 by `effect`, with figures around 10 that share what a seed gives."""
    rng = np.random.default_rng(seed)
    shared = 10 + rng.normal(size=(1, num_datasets, num_seeds))
    figures = shared + spread * rng.normal(size=(num_arms, num_datasets, num_seeds)) / math.sqrt(2)
    figures[1:] += effect
    return {f"arm{i}": {f"set{j}": by_seed(*of_set) for j, of_set in enumerate(of_arm)} for i, of_arm in enumerate(figures)}


def within(hits, trials, probability, level=1e-4):
    """Whether so many hits are what chance gives, by an exact test."""
    return stats.binomtest(hits, trials, probability).pvalue > level


# --- Rows ---------------------------------------------------------------------------------------------------------------


def test_rows_have_the_keys_of_the_contract_for_each_arm_and_set():
    rows = compare(simulated(0), "arm0", "kl")
    assert [(row["arm"], row["dataset"]) for row in rows] == [(f"arm{i}", f"set{j}") for i in range(4) for j in range(2)]
    assert all(sorted(row) == sorted(KEYS.split()) for row in rows)
    assert all(sorted(row["seeds_needed"]) == ["1", "10", "5"] for row in rows)
    json.dumps(rows, allow_nan=False)


def test_the_baseline_is_not_compared_with_itself():
    row = row_of(compare(simulated(0), "arm0", "kl"), "arm0", "set0")
    assert (row["n"], row["pairs"]) == (5, 0)
    assert [row[key] for key in ("diff", "diff_low", "diff_high", "p", "p_adjusted", "effect_size")] == [None] * 6
    assert set(row["seeds_needed"].values()) == {None}
    assert None not in [row[key] for key in ("mean", "std", "ci_low", "ci_high", "boot_low", "boot_high")]


def test_mean_spread_and_interval_of_a_sample_by_hand():
    row = two_arms([1, 2, 3, 4, 5], [1, 2, 3, 4, 6])
    assert (row["mean"], row["std"]) == (3, pytest.approx(math.sqrt(2.5)))
    half = 2.776445 * math.sqrt(2.5 / 5)  # the quantile of t with 4 degrees of freedom, from a table
    assert (row["ci_low"], row["ci_high"]) == pytest.approx((3 - half, 3 + half), rel=1e-6)


def test_students_own_example_of_pairs():
    """Hours of sleep that two drugs gave ten patients more (Student 1908), as every textbook has it."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    result = paired(first, second)
    assert result[:4] == pytest.approx((-1.58, -2.4598858, -0.7001142, 0.00283289), rel=1e-5)
    assert result.std == pytest.approx(1.229995, rel=1e-6)
    # J(9) = 0.9139 in tables of Hedges' correction
    assert result.effect_size == pytest.approx(-1.58 / 1.229995 * 0.9139, rel=1e-3)


@cases("n", [3, 5, 8, 20])
def test_pairs_agree_with_a_test_of_the_differences(n):
    a, b = np.random.default_rng(n).normal(size=(2, n))
    one = stats.ttest_1samp(a - b, 0)
    assert paired(a, b)[:4] == pytest.approx(((a - b).mean(), *one.confidence_interval(), one.pvalue))


@cases(
    ("figures", "baseline", "n", "pairs", "diff"),
    [
        ([1, 2, 3, 4, 5], [2, 3, 4, 5, 7], 5, 5, -1.2),
        ([1, None, 3, 4, 5], [2, 3, 4, 5, 7], 4, 4, -1.25),
        ([1, 2, 3, 4, 5], [2, None, 4, None, 8], 5, 3, -5 / 3),
        ([1, None, 3, None, 5], [None, 2, 4, 6, 9], 3, 2, -2.5),
        ([1, 2, None, None], [None, None, 3, 4], 2, 0, None),
        ([None, None], [1, 2], 0, 0, None),
        ([1, 2], [None, None], 2, 0, None),
        ([3], [1, 2], 1, 1, 2),
        ([3, None], [None, 2], 1, 0, None),
        ([], [], 0, 0, None),
    ],
)
def test_seeds_that_one_of_them_lacks_count_for_the_mean_alone(figures, baseline, n, pairs, diff):
    row = two_arms(figures, baseline)
    mean = np.mean([value for value in figures if value is not None]) if n else None
    assert (row["n"], row["pairs"], row["mean"]) == (n, pairs, mean)
    assert row["diff"] == (None if diff is None else pytest.approx(diff))
    assert (row["p"] is None) == (pairs < 2)


def test_a_set_that_an_arm_has_not_run_gives_an_empty_row():
    rows = compare({"a": {"dino": by_seed(1, 2)}, "b": {"moons": by_seed(1, 2)}}, "b", "kl")
    assert [(row["arm"], row["dataset"], row["n"]) for row in rows] == [
        ("a", "dino", 2), ("a", "moons", 0), ("b", "dino", 0), ("b", "moons", 2),
    ]  # fmt: skip
    assert all(row["diff"] is row["p"] is row["p_adjusted"] is None for row in rows)


def test_one_seed_has_a_mean_and_a_difference_and_no_more():
    row = two_arms([1.0], [1.5])
    assert (row["mean"], row["diff"]) == (1.0, -0.5)
    rest = set(KEYS.split()) - {"arm", "dataset", "metric", "n", "pairs", "mean", "diff", "seeds_needed"}
    assert {row[key] for key in rest} | set(row["seeds_needed"].values()) == {None}


def test_two_seeds_have_intervals_of_t_but_no_bootstrap_and_no_corrected_effect():
    row = two_arms([1.0, 2.0], [1.5, 3.0])
    half = 12.7062 * 0.25  # the quantile of t with 1 degree of freedom, times the standard error
    assert (row["diff_low"], row["diff_high"]) == pytest.approx((-0.75 - half, -0.75 + half), rel=1e-5)
    assert row["p"] == pytest.approx(2 / math.pi * math.atan(1 / 3), rel=1e-9)  # t = -3, in closed form
    assert row["boot_low"] is row["effect_size"] is None
    assert row["seeds_needed"]["5"] > 3


# --- No spread ----------------------------------------------------------------------------------------------------------


@cases("value", [0.0, 1.0, -3.5, 1e-30, 1e30, 0.1, 1 / 3])
@cases("n", [2, 3, 5, 7])
def test_equal_pairs_of_equal_values(value, n):
    row = two_arms([value] * n, [value] * n)
    assert (row["std"], row["diff"], row["p"], row["p_adjusted"]) == (0, 0, 1, 1)
    empty = ("ci_low", "ci_high", "boot_low", "boot_high", "diff_low", "diff_high", "effect_size")
    assert {row[key] for key in empty} | set(row["seeds_needed"].values()) == {None}


def test_equal_pairs_of_different_values():
    row = two_arms([1, 2, 3], [1, 2, 3])
    assert (row["diff"], row["p"], row["effect_size"], row["diff_low"]) == (0, 1, None, None)
    assert row["ci_low"] < 2 < row["ci_high"]


@cases("n", [2, 3, 5, 6, 10])
@cases("shift", [0.1, -7.0, 1e-5, 1e9])
def test_a_constant_difference_has_the_p_of_a_sign_test(n, shift):
    """Also where the differences differ in their last digits, as those of 0.1 do."""
    baseline = np.random.default_rng(n).uniform(1, 2, n)
    row = two_arms(baseline + shift, baseline)
    assert row["p"] == stats.binomtest(0, n).pvalue == 2 ** (1 - n)
    assert row["diff"] == pytest.approx(shift, rel=1e-9)
    assert row["diff_low"] is row["effect_size"] is row["seeds_needed"]["5"] is None


@pytest.mark.parametrize("relative", [1e-6, 1e-9, 1e-11])
def test_a_small_spread_is_still_a_spread(relative):
    noise = np.array([1.0, -1.0, 0.5, 0.0, -0.5])
    row = two_arms(1 + relative * noise, np.ones(5))
    assert row["std"] == pytest.approx(relative * noise.std(ddof=1), rel=1e-3)
    assert row["p"] == pytest.approx(1, abs=1e-3)


def test_ties_in_some_pairs_are_no_trouble():
    row = two_arms([1, 2, 3, 4], [1, 2, 3, 5])
    assert (row["diff"], row["p"]) == (-0.25, pytest.approx(stats.t.sf(1, 3) * 2))


# --- What is refused ----------------------------------------------------------------------------------------------------


@cases("value", [math.nan, math.inf, -math.inf, np.float32("nan"), None, "0.3"])
@cases("function", [lambda values: compare(values, "b", "kl"), lambda values: ranks(values, "kl")])
def test_figures_that_are_no_finite_numbers_are_refused(function, value):
    values = {"a": {"dino": {0: 1.0, 7: value}}, "b": {"dino": by_seed(1.0)}}
    with pytest.raises(LabError, match=r"kl of arm 'a' on 'dino' with seed 7 is .*leave out runs that diverged"):
        function(values)


@cases("function", [lambda values, name: compare(values, name, "kl"), speedups])
@cases(("name", "hint"), [("constan", "Did you mean 'constant'"), ("zzz", "Arms: a, constant")])
def test_a_baseline_that_is_no_arm_is_told(function, name, hint):
    with pytest.raises(LabError, match=f"The baseline '{name}' is not an arm.*{hint}"):
        function({"a": {}, "constant": {}}, name)


def test_nothing_gives_nothing():
    assert compare({"b": {}}, "b", "kl") == speedups({"b": {}}, "b") == findings([], "kl", "b") == []


# --- Holm ---------------------------------------------------------------------------------------------------------------


@cases(
    ("p", "adjusted"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.04], [0.04]),
        ([0.03, 0.03], [0.06, 0.06]),
        ([0.01, None, 0.02], [0.02, None, 0.02]),
        ([0.5, 0.9, 0.0], [1.0, 1.0, 0.0]),
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
        ([None, None], [None, None]),
        ([0.012, 0.02, 0.013, 0.049, 0.001], [0.048, 0.048, 0.048, 0.049, 0.005]),
        ([], []),
    ],
)
def test_holm_by_hand(p, adjusted):
    rows = [{"p": value} for value in p]
    add_holm(rows)
    assert [row["p_adjusted"] for row in rows] == [None if value is None else pytest.approx(value) for value in adjusted]


def test_the_family_is_every_comparison_of_the_metric():
    rows = [row for row in compare(simulated(3, effect=-1.5), "arm0", "kl") if row["p"] is not None]
    assert len(rows) == 6
    smallest = min(rows, key=lambda row: row["p"])
    assert smallest["p_adjusted"] == pytest.approx(6 * smallest["p"])


# --- Seeds that would be needed -----------------------------------------------------------------------------------------


@cases(
    ("effect_size", "seeds"),
    # The first four are in Cohen's and everybody's tables of paired t tests.
    [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10), (1.5, 6), (2.0, 5), (3.0, 4), (3.5, 3), (5, 3), (8.1, 3), (1e3, 3)]
    + [(1e9, 3), (math.inf, 3), (-0.5, 34), (0.01, 78491), (1e-6, 7848860509329), (1e-7, None), (0, None), (math.nan, None)],
)
def test_seeds_needed_for_effects(effect_size, seeds):
    assert seeds_needed(effect_size) == seeds
    assert seeds is None or isinstance(seeds_needed(effect_size), int)


@given(st.floats(0.05, 3.4))
@settings(max_examples=40, deadline=None)
def test_so_many_seeds_have_the_power_and_one_less_has_not(effect_size):
    def power(n):
        critical = stats.t.ppf(0.975, n - 1)
        return stats.nct.sf(critical, n - 1, effect_size * math.sqrt(n)) + stats.nct.cdf(
            -critical, n - 1, effect_size * math.sqrt(n)
        )

    needed = seeds_needed(effect_size)
    assert power(needed) >= 0.8 - 1e-6
    assert needed == 3 or power(needed - 1) < 0.8 + 1e-6


def test_seeds_come_from_the_spread_of_differences_and_the_mean_of_the_baseline():
    row = two_arms([11, 9, 10, 12, 10], [10, 10, 10, 10, 10])
    std = np.std([1, -1, 0, 2, 0], ddof=1)
    assert row["seeds_needed"] == {str(percent): seeds_needed(percent / 10 / std) for percent in (1, 5, 10)}
    assert row["seeds_needed"]["1"] > row["seeds_needed"]["5"] > row["seeds_needed"]["10"]
    assert two_arms([-11, -9, -10, -12, -10], [-10] * 5)["seeds_needed"] == row["seeds_needed"]
    assert set(two_arms([1, -1, 2], [0, 0, 0])["seeds_needed"].values()) == {None}  # no percent of nothing


def test_so_many_seeds_see_the_difference_that_they_were_asked_for():
    """The spread is known here: a pilot of 4,000 seeds."""
    row = row_of(compare(simulated(1, 2, 1, 4000), "arm0", "kl", num_resamples=0), "arm1", "set0")
    needed, reps = row["seeds_needed"]["5"], 3000
    differences = np.random.default_rng(2).normal(0.05 * 10, 1, (reps, needed))
    hits = int((stats.ttest_1samp(differences, 0, axis=1).pvalue < 0.05).sum())
    assert 30 <= needed <= 38
    assert 0.76 < hits / reps < 0.84


@pytest.mark.parametrize("effect_size", [0.25, 0.5, 1.0])
def test_a_spread_from_five_seeds_promises_too_much_as_the_docstring_says(effect_size):
    estimates = np.sqrt(stats.chi2.ppf((np.arange(60) + 0.5) / 60, 4) / 4)
    needed = np.array([seeds_needed(effect_size / estimate) for estimate in estimates])
    shift = effect_size * np.sqrt(needed)
    power = stats.nct.sf(stats.t.ppf(0.975, needed - 1), needed - 1, shift)
    assert 0.66 < power.mean() < 0.75


# --- Simulated studies --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_studies_without_an_effect_find_something_in_five_of_a_hundred_at_most(monkeypatch):
    """Holm keeps the family-wise rate below 5 %; the comparisons share a baseline, so it is a little below."""
    monkeypatch.setattr(statistics, "seeds_needed", lambda effect_size: None)  # which takes most of the time
    reps = 400
    studies = [compare(simulated(seed), "arm0", "kl", num_resamples=0) for seed in range(reps)]
    found = sum(any(row["p"] is not None and row["p_adjusted"] < 0.05 for row in rows) for rows in studies)
    told = sum(any(verdict.is_difference for verdict in findings(rows, "kl", "arm0")) for rows in studies)
    assert found == told
    assert stats.binomtest(found, reps, 0.05, "greater").pvalue > 1e-3
    assert found / reps > 0.01
    single = sum(row["p"] < 0.05 for rows in studies for row in rows if (row["arm"], row["dataset"]) == ("arm1", "set0"))
    assert within(single, reps, 0.05)


def test_studies_with_a_large_effect_find_it():
    rows = [row for seed in range(20) for row in compare(simulated(seed, num_seeds=10, effect=-3), "arm0", "kl", 0)]
    others = [row for row in rows if row["arm"] != "arm0"]
    assert all(row["p_adjusted"] < 0.05 and row["diff"] < 0 for row in others)


@cases("n", [2, 3, 5, 10])
def test_t_intervals_cover_the_mean_and_the_difference(n):
    reps = 1000
    samples = np.random.default_rng(n).normal(3, 2, (reps, 2, n))
    means = [t_interval(sample) for sample, _ in samples]
    differences = [paired(*pair) for pair in samples]
    assert within(sum(low <= 3 <= high for low, high in means), reps, 0.95)
    assert within(sum(result.low <= 0 <= result.high for result in differences), reps, 0.95)


@pytest.mark.slow
@cases(("n", "coverage"), [(3, 0.73), (5, 0.84), (10, 0.91), (20, 0.93)])
def test_the_bootstrap_covers_less_than_it_is_called_as_its_docstring_says(n, coverage):
    reps = 1200
    samples = np.random.default_rng(n).normal(size=(reps, n))
    hits = sum(low <= 0 <= high for low, high in (bootstrap_interval(sample, 499) for sample in samples))
    assert hits / reps == pytest.approx(coverage, abs=0.035)
    assert f"{100 * coverage:.0f} %" in bootstrap_interval.__doc__


@pytest.mark.parametrize("n", [3, 5, 10])
def test_hedges_correction_makes_the_effect_size_right_on_average(n):
    samples = np.random.default_rng(n).normal(1, 1, (1500, n))
    sizes = np.array([paired(sample, np.zeros(n)).effect_size for sample in samples])
    tolerance = 4 * sizes.std() / math.sqrt(len(sizes))
    assert sizes.mean() == pytest.approx(1, abs=tolerance)


def test_the_bootstrap_is_the_same_each_time_and_none_where_there_is_nothing_to_draw():
    sample = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    assert bootstrap_interval(sample) == bootstrap_interval(sample)
    low, high = bootstrap_interval(sample)
    assert 1 < low < sample.mean() < high < 16
    assert high - sample.mean() > sample.mean() - low  # it shows the skew, as t cannot
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for nothing in ([], [1.0], [1.0, 2.0], [0.1, 0.1, 0.1]):
            assert bootstrap_interval(np.array(nothing)) == (None, None)
        assert bootstrap_interval(sample, 0) == (None, None)


# --- Invariants ---------------------------------------------------------------------------------------------------------

figures = st.floats(-100, 100).map(lambda value: round(value, 3))
of_sets = st.dictionaries(
    st.sampled_from(["dino", "moons", "rings"]), st.dictionaries(st.integers(0, 6), figures, max_size=6)
)
studies = st.fixed_dictionaries({"base": of_sets, "one": of_sets}, optional={"two": of_sets})
few = settings(max_examples=40, deadline=None)


def without(row, *keys):
    return {key: value for key, value in row.items() if key not in keys}


def reversed_order(tree):
    return {key: reversed_order(tree[key]) for key in reversed(tree)} if isinstance(tree, dict) else tree


@given(studies)
@few
def test_rows_are_json_without_nan_and_make_sense(values):
    rows = compare(values, "base", "kl", num_resamples=50)
    json.dumps(rows, allow_nan=False)
    for row in rows:
        assert row["ci_low"] is None or row["ci_low"] <= row["mean"] <= row["ci_high"]
        assert row["diff_low"] is None or row["diff_low"] <= row["diff"] <= row["diff_high"]
        assert row["p"] is None or 0 <= row["p"] <= row["p_adjusted"] <= 1
        assert row["effect_size"] is None or row["effect_size"] * row["diff"] >= 0
        assert row["diff_low"] is None or (row["p"] < 0.05) == (row["diff_low"] > 0 or row["diff_high"] < 0)


@given(studies)
@few
def test_the_order_in_which_runs_are_read_does_not_matter(values):
    key = ("arm", "dataset")
    rows, other = (compare(order, "base", "kl", num_resamples=20) for order in (values, reversed_order(values)))
    assert sorted(rows, key=lambda row: [row[name] for name in key]) == sorted(
        other, key=lambda row: [row[name] for name in key]
    )
    first, second = (ranks(order, "kl") for order in (values, reversed_order(values)))
    assert first["mean_ranks"] == second["mean_ranks"]
    assert first["p"] == second["p"]
    assert first["groups"] == second["groups"]


@given(studies, of_sets)
@few
def test_more_sets_change_no_figure_but_the_adjusted_ones(values, more):
    extra = {arm: {**of_arm, **{f"new {name}": more[name] for name in more}} for arm, of_arm in values.items()}
    rows = {(row["arm"], row["dataset"]): row for row in compare(extra, "base", "kl", num_resamples=20)}
    for row in compare(values, "base", "kl", num_resamples=20):
        assert without(rows[row["arm"], row["dataset"]], "p_adjusted") == without(row, "p_adjusted")


@given(studies, st.integers(-20, 20))
@few
def test_a_scale_of_the_metric_scales_figures_and_leaves_tests(values, exponent):
    """By powers of two, which are exact."""
    factor = 2.0**exponent
    scaled = {
        arm: {name: {seed: factor * x for seed, x in runs.items()} for name, runs in of_arm.items()}
        for arm, of_arm in values.items()
    }
    pairs = zip(*(compare(which, "base", "kl", num_resamples=20) for which in (values, scaled)), strict=True)
    for row, other in pairs:
        for key in ("mean", "std", "ci_low", "ci_high", "boot_low", "boot_high", "diff", "diff_low", "diff_high"):
            assert other[key] == (None if row[key] is None else pytest.approx(factor * row[key], rel=1e-9, abs=0))
        for key in ("n", "pairs", "p", "p_adjusted", "effect_size"):
            assert other[key] == (None if row[key] is None else pytest.approx(row[key], rel=1e-9))
        assert other["seeds_needed"] == row["seeds_needed"]


@given(studies)
@few
def test_swapping_arm_and_baseline_turns_the_signs(values):
    forth, back = (
        {(row["arm"], row["dataset"]): row for row in compare(values, baseline, "kl", num_resamples=0)}
        for baseline in ("base", "one")
    )
    for (arm, dataset), row in forth.items():
        if arm == "one":
            other = back["base", dataset]
            assert row["p"] == other["p"]
            assert row["diff"] == (None if other["diff"] is None else -other["diff"])
            assert row["diff_low"] == (None if other["diff_high"] is None else pytest.approx(-other["diff_high"], rel=1e-9))


@given(studies, st.sampled_from(["kl", "coverage"]), st.floats(0, 30))
@few
def test_words_and_rows_agree(values, metric, effect):
    values = {**values, "one": {**values["one"], "far": by_seed(effect, effect + 0.1, effect + 0.3)}}
    values["base"] = {**values["base"], "far": by_seed(10, 10, 10.1)}
    rows = [row for row in compare(values, "base", metric, num_resamples=0) if row["arm"] != "base"]
    for row, verdict in zip(rows, findings(compare(values, "base", metric, 0), metric, "base"), strict=True):
        text = verdict.sentence
        significant = row["p"] is not None and row["p_adjusted"] < 0.05
        good = significant and (row["diff"] > 0) == (metric == "coverage")
        assert verdict.is_difference == significant
        assert (verdict.word == "better") == good
        assert (verdict.arm, verdict.dataset) == (row["arm"], row["dataset"])
        assert (verdict.difference, verdict.low, verdict.p) == (row["diff"], row["diff_low"], row["p_adjusted"])
        assert (" is better than " in text) == good
        assert (" is worse than " in text) == (significant and not good)
        assert re.search("does not differ|only one seed|cannot be compared|have the same", text) is None or not significant
        assert "None" not in text
        assert "nan" not in text


# --- Sentences ----------------------------------------------------------------------------------------------------------

FIGURES, BASELINE = [0.33, 0.35, 0.34, 0.36, 0.32], [0.40, 0.42, 0.42, 0.41, 0.40]


def sentence(figures, baseline, metric="kl", **counts):
    """The sentence about "cosine" beside "constant" on dino; `counts` of runs that diverged by arm."""
    values = {"cosine": {"dino": by_seed(*figures)}, "constant": {"dino": by_seed(*baseline)}}
    rows = [{**row, "diverged": counts.get(row["arm"], 0)} for row in compare(values, "constant", metric)]
    (verdict,) = findings(rows, metric, "constant")
    return verdict.sentence


@cases(
    ("figures", "baseline", "counts", "text"),
    [
        (
            FIGURES, BASELINE, {},
            "cosine is better than constant on dino in kl: 0.34 instead of 0.41 (difference -0.07, 95 % interval -0.0852 to "
            "-0.0548, adjusted p = 0.00022, 5 seeds).",
        ),
        (
            BASELINE, FIGURES, {},
            "cosine is worse than constant on dino in kl: 0.41 instead of 0.34 (difference +0.07, 95 % interval +0.0548 to "
            "+0.0852, adjusted p = 0.00022, 5 seeds).",
        ),
        (
            [1.0, 1.2, 0.9], [1.1, 1.0, 1.0], {},
            "cosine does not differ significantly from constant on dino (difference 0, 95 % interval -0.43 to +0.43, "
            "adjusted p = 1, 3 seeds); about 25 seeds would show a difference of 10 %.",
        ),
        (
            [1.0], [1.5], {},
            "cosine and constant share only one seed on dino (difference -0.5): a test takes two.",
        ),
        (
            [None, None], [1.5, 1.4], {"cosine": 2},
            "cosine has no kl on dino, so cosine cannot be compared with constant there. 2 of 2 runs of cosine diverged.",
        ),
        (
            [1.5, 1.4], [None, None], {"constant": 1},
            "constant has no kl on dino, so cosine cannot be compared with constant there. 1 of 1 run of constant diverged.",
        ),
        (
            [1.5, None], [None, 1.5], {},
            "cosine and constant share no seed on dino, so they cannot be compared there.",
        ),
        ([1, 2, 3], [1, 2, 3], {}, "cosine and constant have the same kl on dino with all 3 seeds."),
        ([1, 2], [1, 2], {}, "cosine and constant have the same kl on dino with both seeds."),
        (
            [2, 3, 4, 5, 6], [1, 2, 3, 4, 5], {},
            "cosine does not differ significantly from constant on dino (difference +1, the same each time, adjusted "
            "p = 0.062, 5 seeds).",
        ),
        (
            [2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6], {},
            "cosine is worse than constant on dino in kl: 4.5 instead of 3.5 (difference +1, the same each time, adjusted "
            "p = 0.031, 6 seeds).",
        ),
        (
            [None, *FIGURES], [0.9, *BASELINE], {"cosine": 1},
            "cosine is better than constant on dino in kl: 0.34 instead of 0.492 (difference over shared seeds -0.07, 95 % "
            "interval -0.0852 to -0.0548, adjusted p = 0.00022, 5 seeds). 1 of 6 runs of cosine diverged.",
        ),
        (
            FIGURES, BASELINE, {"cosine": 2, "constant": 1},
            "cosine is better than constant on dino in kl: 0.34 instead of 0.41 (difference -0.07, 95 % interval -0.0852 to "
            "-0.0548, adjusted p = 0.00022, 5 seeds). 2 of 7 runs of cosine diverged. 1 of 6 runs of constant diverged.",
        ),
    ],
)  # fmt: skip
def test_sentences(figures, baseline, counts, text):
    assert sentence(figures, baseline, **counts) == text


@cases("metric", ["kl", "energy_distance", "validation_loss", *LARGER_IS_BETTER])
def test_better_follows_the_direction_of_the_metric(metric):
    word = "worse" if metric in LARGER_IS_BETTER else "better"
    assert sentence(FIGURES, BASELINE, metric).startswith(f"cosine is {word} than constant on dino in {metric}: 0.34")


def test_sentences_are_about_one_metric_and_may_call_it_by_another_name():
    values = {"cosine": {"dino": by_seed(*FIGURES)}, "constant": {"dino": by_seed(*BASELINE)}}
    rows = compare(values, "constant", "kl") + compare(values, "constant", "coverage")
    assert len(findings(rows, "kl", "constant")) == len(findings(rows, "coverage", "constant")) == 1
    assert "dino in KL divergence: 0.34" in findings(rows, "kl", "constant", label="KL divergence")[0].sentence


def test_sharpness_is_no_merit():
    values = {"a": {"dino": {0: 1.0, 1: 1.1, 2: 1.2}}, "b": {"dino": {0: 2.0, 1: 2.1, 2: 2.2001}}}
    (verdict,) = findings(compare(values, "b", "sharpness"), "sharpness", "b")
    assert verdict.word == "lower"
    assert verdict.sentence.startswith("a is lower than b on dino in sharpness: ")


@cases(
    ("needed", "hint"),
    [
        ({"1": 100, "5": 50, "10": 20}, "; about 20 seeds would show a difference of 10 %"),
        (
            {"1": 100, "5": 50, "10": 5},
            "; a difference of 10 % would probably have been seen in a single test, about 50 seeds would show one of 5 %",
        ),
        ({"1": 5, "5": 3, "10": 3}, "; a difference of 1 % would probably have been seen in a single test"),
        ({"1": None, "5": None, "10": None}, ""),
    ],
)
def test_what_so_many_seeds_could_see(needed, hint):
    """What is asked for is more than there is, or it is said that there was enough."""
    row = {"arm": "a", "dataset": "dino", "metric": "kl", "n": 5, "pairs": 5, "mean": 1.0, "diff": 0.1, "diff_low": -0.1}
    row |= {"diff_high": 0.3, "p": 0.3, "p_adjusted": 0.6, "seeds_needed": needed}
    baseline = {**row, "arm": "b"}
    (verdict,) = findings([row, baseline], "kl", "b")
    sentence = verdict.sentence
    assert sentence.endswith(f"(difference +0.1, 95 % interval -0.1 to +0.3, adjusted p = 0.6, 5 seeds){hint}.")


@cases(
    ("p", "text"),
    [(0.0499999, "p = 0.0499999"), (0.05, "p = 0.05"), (0.0496, "p = 0.0496"), (0.049, "p = 0.049"), (0, "p < 0.0001")]
    + [(0.003, "p = 0.003"), (1, "p = 1"), (0.99e-4, "p < 0.0001"), (1e-4, "p = 0.0001"), (0.000123, "p = 0.00012")],
)
def test_p_values_in_words(p, text):
    assert p_value(p) == text


def test_numbers_in_words():
    assert [number(x) for x in (0.34, 1 / 3, 12345.0, 0)] == ["0.34", "0.333", "1.23e+04", "0"]
    assert [signed(x) for x in (0.07, -0.07, 0)] == ["+0.07", "-0.07", "0"]


# --- Ranks --------------------------------------------------------------------------------------------------------------


def table(**columns):
    """Figures of arms over data sets, one seed each."""
    return {arm: {f"set{i}": {0: value} for i, value in enumerate(column)} for arm, column in columns.items()}


@cases(
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


@cases(
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


@cases(
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


def test_ranks_without_an_effect_are_told_apart_at_the_stated_rate():
    rng, reps, p = np.random.default_rng(0), 300, []
    for _ in range(reps):
        p.append(ranks(table(**dict(zip("abcd", rng.normal(size=(4, 12)), strict=True))), "kl")["p"])
    assert within(sum(value < 0.05 for value in p), reps, 0.05)


# --- Updates that are needed --------------------------------------------------------------------------------------------


@cases(
    ("updates", "quality", "target", "needed"),
    [
        ([0, 100, 200], [4, 2, 1], 2, 100),
        ([0, 100, 200], [4, 2, 1], 3, 50),
        ([0, 100, 200], [4, 2, 1], 1, 200),
        ([0, 100, 200], [4, 2, 1], 1.25, 175),
        ([0, 100, 200], [4, 2, 1], 4, 0),
        ([10, 100, 200], [4, 2, 1], 5, 10),
        ([0, 100, 200], [4, 2, 1], 0.5, None),
        ([0, 100, 300, 400], [4, 2, 3, 1], 2, 100),
        ([0, 100, 300, 400], [4, 2, 3, 1], 1.5, 375),
        ([0, 100, 200, 300], [4, 4, 2, 2], 3, 150),
        ([0, 100, 200], [4, math.nan, 1], 2, 200),
        ([0, 100, 200], [math.inf, 2, 1], 3, 100),
        ([0, 100, 200], [4, -math.inf, math.nan], 3, None),
        ([0, 100], [math.nan, math.nan], 3, None),
        ([50], [1], 1, 50),
        ([], [], 1, None),
    ],
)
def test_the_first_crossing(updates, quality, target, needed):
    assert updates_to_reach(updates, quality, target) == needed


@cases(
    ("updates", "quality", "part"),
    [
        ([0, 1], [1], r"updates have shape \(2,\), quality \(1,\)"),
        ([[0, 1]], [[1, 2]], r"shape \(1, 2\)"),
        ([0, 1, 1], [3, 2, 1], r"these are \[0. 1. 1.\]"),
        ([1, 0], [3, 2], "increase from 0"),
        ([-1, 0], [3, 2], "increase from 0"),
        ([0, math.nan], [3, 2], "increase from 0"),
    ],
)
def test_what_is_no_curve_is_told(updates, quality, part):
    with pytest.raises(LabError, match=part):
        updates_to_reach(updates, quality, 1)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.floats(-5, 5))
@few
def test_crossings_are_on_the_curve_and_nothing_before_them_is(quality, target):
    updates = np.arange(len(quality)) * 100.0
    needed = updates_to_reach(updates, quality, target)
    assert (needed is None) == (min(quality) > target)
    if needed is not None:
        assert np.all(np.array(quality)[updates < needed - 1e-6] > target)
        assert np.interp(needed, updates, quality) <= target + 1e-6


UPDATES = np.arange(0, 1001, 100)


def falling(rate, length=1000):
    """A quality that falls linearly from 10 at a rate per 100 updates."""
    at = UPDATES[UPDATES <= length]
    return at, 10 - rate * at / 100


def speedup_row(arm, baseline):
    return row_of(speedups({"a": {"dino": arm}, "b": {"dino": baseline}}, "b"), "a")


def test_a_control_that_explains_all_of_it_is_told_from_one_that_explains_nothing():
    """An arm that is twice as fast by its learning rate alone: as fast as that control, twice as fast as the other."""
    rng = np.random.default_rng(1)

    def runs(slope):
        return {"dino": {seed: falling(slope * rng.uniform(0.97, 1.03)) for seed in range(5)}}

    curves = {"both": runs(2), "rate": runs(2), "momentum": runs(1)}
    rows, verdicts = against_controls(
        [("both", "rate"), ("both", "momentum")],
        lambda arm, control: speedups({control: curves[control], arm: curves[arm]}, control, common=True),
        functools.partial(speedup_findings, common=True),
    )
    assert [(row["arm"], row["control"], row["n"]) for row in rows] == [("both", "rate", 5), ("both", "momentum", 5)]
    alike, faster = rows
    assert alike["ci_low"] < 1 < alike["ci_high"]
    assert faster["ci_low"] < 2 < faster["ci_high"]
    assert faster["p_adjusted"] == pytest.approx(2 * faster["p"])
    assert faster["p_adjusted"] < 0.001 < 0.05 < alike["p_adjusted"]
    sentences = [verdict.sentence for verdict in verdicts]
    assert [verdict.word for verdict in verdicts] == ["cannot tell", "faster"]
    assert sentences[0].startswith("both is not significantly faster or slower than rate to the quality that both reach on")
    assert sentences[1].startswith("both is faster than momentum to the quality that both reach on dino")


def noisy_course(rng, noise, length, speed=1.0):
    """Five runs that fall from 10, and are flat at their end if `length` is long; 50 evaluations, of independent noise."""
    at = np.linspace(20, 1000, 50)
    return {"dino": {s: (at, 10 * np.exp(-speed * at * length / 1000) + rng.normal(0, noise, 50)) for s in range(5)}}


COURSES = [(0.05, 0.05, 2, False), (0.1, 0.01, 7, False), (0.1, 0.01, 7, True), (0.01, 0.1, 2, True)]


@pytest.mark.slow
@cases(("noise", "other", "length", "common"), COURSES)
def test_alike_arms_are_told_apart_as_often_as_the_level_says(noise, other, length, common):
    """However much the evaluations of each scatter, and whether the run ends on a slope or on a plateau."""
    rng = np.random.default_rng(0)
    told = 0
    for _ in range(200):
        curves = {"a": noisy_course(rng, noise, length), "b": noisy_course(rng, other, length)}
        told += row_of(speedups(curves, "b", common), "a")["p"] < 0.05
    assert told / 200 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)  # three standard errors


@cases(("noise", "other", "length", "common"), COURSES)
def test_a_known_speed_up_is_found_and_covered(noise, other, length, common):
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(100):
        curves = {"a": noisy_course(rng, noise, length, speed=1.25), "b": noisy_course(rng, other, length)}
        rows.append(row_of(speedups(curves, "b", common), "a"))
    assert all(row["censored"] == 0 for row in rows)
    assert np.mean([row["speedup"] for row in rows]) == pytest.approx(1.25, abs=0.04)
    assert np.mean([row["ci_low"] <= 1.25 <= row["ci_high"] for row in rows]) >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / 100)
    assert np.mean([row["p"] < 0.05 and row["speedup"] > 1 for row in rows]) > 0.8


@pytest.mark.parametrize("evaluated", [True, False])
def test_an_arm_that_was_fast_until_it_diverged_is_not_called_fast(evaluated):
    """Whether it diverged before its first evaluation or after it had passed the others."""
    arms = {"base": {}, "control": {"lr_scheduler": "cosine"}, "hot": {"lr_scheduler": "rex", "controls": "control"}}
    options = {"arms": arms, "datasets": ["dino"], "base": {"max_train_steps": 1000, "lr_warmup_steps": 0}}
    spec = read_spec({**options, "speedup_metric": "validation_loss_ema"}, "study")
    results = []
    for arm, seed in itertools.product(arms, range(5)):
        diverged = arm == "hot" and seed < 4
        at, values = falling(3, 300) if diverged else falling(1 - seed / 100)
        quality = {"update": at.tolist(), "validation_loss_ema": values.tolist()}
        results.append(
            SimpleNamespace(
                arm=arm, dataset="dino", seed=seed, status="diverged" if diverged else "finished",
                curves={"quality": quality if evaluated or not diverged else {}}, record={"train": {"num_updates": 1000}},
            )
        )  # fmt: skip
    rows, of_controls, verdicts = _compare_speed(spec, results)
    for row in (row_of(rows, "hot"), row_of(of_controls, "hot")):
        assert (row["n"], row["censored"], row["ends_worse"], row["diverged"], row["ci_low"]) == (5, 4, 4, 4, None)
    told = "4 of 5 runs of hot never got there, 4 of them because they diverged."
    assert len([verdict for verdict in verdicts if verdict.sentence.endswith(told)]) == 2
    assert not any(verdict.arm == "hot" and verdict.word == "faster" for verdict in verdicts)
    for result in results:
        result.status = "diverged" if result.arm == "control" and result.seed < 2 else result.status
    _, of_controls, verdicts = _compare_speed(spec, results)
    assert row_of(of_controls, "hot")["n"] == 3
    assert verdicts[-1].sentence.endswith("2 of 5 runs of control diverged.")


def test_an_arm_that_comes_first_and_ends_worse_is_told_so():
    """It falls twice as fast to 4 and stays there; the control goes on to 0."""
    at = UPDATES
    early = {s: (at, np.maximum(10 - 2 * at / 100, 4 + 0.01 * s)) for s in range(5)}
    late = dict.fromkeys(range(5), (at, 10 - at / 100))
    rows = speedups({"early": {"dino": early}, "late": {"dino": late}}, "late", common=True)
    row = row_of(rows, "early")
    assert (row["n"], row["censored"], row["ends_worse"]) == (5, 0, 5)
    assert row["speedup"] == pytest.approx(2, rel=0.01)
    (verdict,) = speedup_findings(rows, "late", common=True)
    sentence = verdict.sentence
    assert sentence.startswith("early is faster than late to the quality that both reach on dino")
    assert sentence.endswith("It ends worse with 5 of them.")
    assert row_of(speedups({"early": {"dino": early}, "late": {"dino": late}}, "late"), "early")["censored"] == 5


def test_what_is_lost_again_was_not_reached():
    dip = (UPDATES, np.where(UPDATES == 300, 0.5, 10 - 0.5 * UPDATES / 100))
    row = speedup_row({0: dip}, {0: falling(0.8)})  # whose end is 2
    assert row["censored"] == 1


@pytest.mark.parametrize("common", [False, True])
def test_every_baseline_reaches_its_own_end_whatever_is_rounded(common):
    """Curves with flat parts: means of equal numbers are not always that number."""
    rng = np.random.default_rng(0)
    for length in range(1, 60):
        stairs = np.resize(np.repeat(rng.random(max(1, length // 3)), 6), length)
        flat = np.full(length, rng.random())
        at = np.arange(1, length + 1)
        for arm, baseline in ((stairs, flat), (flat, stairs), (stairs, stairs)):
            curves = {"a": {"dino": {0: (at, arm)}}, "b": {"dino": {0: (at, baseline)}}}
            assert row_of(speedups(curves, "b", common), "b")["censored"] == 0


def test_a_spike_makes_no_target_easier():
    at = np.arange(0, 1001, 20)
    plain, spiked = ({0: (at, np.where(at == spike, 1e6, 10 - at / 100))} for spike in (-1, 900))
    for arm, baseline in ((plain, spiked), (spiked, plain)):
        row = speedup_row(arm, baseline)
        assert (row["censored"], row["speedup"]) == (0, pytest.approx(1, rel=0.03))


def test_the_noise_of_a_curve_is_the_standard_deviation_of_an_evaluation():
    at = np.arange(20_000)
    values = 10 - at / 1000 + np.random.default_rng(0).normal(0, 0.3, len(at)) + 100 * (at % 500 == 0)
    assert _noise(values) == pytest.approx(0.3, rel=0.03)


def test_the_worse_of_two_ends_is_what_both_reach():
    """A slow arm never reaches the control's end, and always its own; which is called the control does not matter."""
    curves = {"a": {"dino": {0: falling(0.5), 1: falling(0.8)}}, "b": {"dino": {0: falling(1), 1: falling(1)}}}
    assert row_of(speedups(curves, "b"), "a")["censored"] == 2
    row, other = row_of(speedups(curves, "b", common=True), "a"), row_of(speedups(curves, "a", common=True), "b")
    assert (row["n"], row["censored"], row["updates_needed"]) == (2, 0, 1000)
    assert row["speedup"] == pytest.approx(np.sqrt(0.5 * 0.8))
    assert (other["speedup"], other["p"]) == pytest.approx((1 / row["speedup"], row["p"]))


def test_a_run_that_diverged_has_no_end_that_another_could_reach():
    diverged = ([0, 100, 200], [10, 50, math.nan])
    curves = {"a": {"dino": {0: diverged, 1: falling(0.5)}}, "b": {"dino": {0: falling(1), 1: falling(1)}}}
    row = row_of(speedups(curves, "b", common=True), "a")
    assert (row["n"], row["censored"], row["ci_low"]) == (2, 1, None)
    assert row["speedup"] == pytest.approx(0.5**0.5)  # of the other run; this one counts as if it had just got there
    assert [row_of(speedups(curves, "a", common=True), "b")[key] for key in ("n", "censored")] == [1, 0]


def test_twice_the_slope_is_twice_as_fast():
    slopes = {0: 0.8, 1: 0.7, 2: 0.9}
    row = speedup_row({s: falling(2 * x) for s, x in slopes.items()}, {s: falling(x) for s, x in slopes.items()})
    assert (row["n"], row["censored"]) == (3, 0)
    assert (row["updates_needed"], row["speedup"]) == pytest.approx((500, 2))
    assert (row["ci_low"], row["p"]) == (None, 0.25)  # three times the same: no spread, and a sign test


def test_the_speedup_is_a_geometric_mean_with_the_interval_of_the_logarithm():
    factors = [1.25, 2.0, 2.5]
    row = speedup_row({s: falling(0.5 * x) for s, x in enumerate(factors)}, {s: falling(0.5) for s in range(3)})
    logs = np.log(factors)
    low, high = stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs))
    assert (row["speedup"], row["ci_low"], row["ci_high"]) == pytest.approx((np.exp(logs.mean()), np.exp(low), np.exp(high)))
    assert row["p"] == pytest.approx(stats.ttest_1samp(logs, 0).pvalue)
    assert row["updates_needed"] == pytest.approx(500)


def test_the_baseline_has_updates_but_no_speedup_of_its_own():
    rows = speedups({"a": {"dino": {0: falling(1), 1: falling(2)}}, "b": {"dino": {0: falling(1), 1: falling(1)}}}, "b")
    row = row_of(rows, "b")
    assert (row["n"], row["censored"], row["updates_needed"]) == (2, 0, 1000)
    assert {row[key] for key in ("speedup", "ci_low", "ci_high", "p", "p_adjusted")} == {None}
    assert list(row) == "arm dataset n censored ends_worse updates_needed speedup ci_low ci_high p p_adjusted".split()


def test_runs_that_never_get_there_count_with_the_length_of_the_run():
    row = speedup_row({0: falling(0.5), 1: falling(2), 2: falling(0.4)}, {s: falling(1) for s in range(3)})
    assert (row["n"], row["censored"], row["updates_needed"]) == (3, 2, None)
    assert row["speedup"] == pytest.approx(2 ** (1 / 3))


def test_a_run_that_diverged_early_does_not_pass_for_a_fast_one():
    diverged = ([0, 100, 200], [10, 50, math.nan])
    row = speedup_row({0: diverged, 1: ([], [])}, {0: falling(1), 1: falling(1)})
    assert (row["n"], row["censored"], row["speedup"]) == (2, 2, None)


def test_an_early_crossing_of_the_baseline_itself_counts_for_it():
    noisy = (np.array([0, 100, 200, 300]), np.array([4, 1, 3, 2]))
    row = speedup_row({0: noisy}, {0: noisy})
    assert (row["n"], row["ends_worse"], row["speedup"], row["p"]) == (1, 0, 1, None)


def test_a_target_that_is_reached_without_training_tells_nothing():
    flat = (UPDATES, np.full(11, 10.0))
    row = speedup_row({0: flat, 1: falling(2)}, {0: flat, 1: falling(1)})
    assert (row["n"], row["speedup"]) == (1, 2)


@pytest.mark.parametrize("broken", [([0, 100], [10, math.nan]), ([], [])])
def test_a_baseline_without_a_final_quality_sets_no_target(broken):
    row = speedup_row({0: falling(1), 1: falling(2)}, {0: broken, 1: falling(1)})
    assert (row["n"], row["speedup"]) == (1, 2)


def test_only_shared_seeds_are_paired():
    row = speedup_row({1: falling(2), 5: falling(3)}, {0: falling(1), 1: falling(1)})
    assert (row["n"], row["speedup"]) == (1, 2)
    empty = speedup_row({5: falling(3)}, {0: falling(1)})
    assert (empty["n"], empty["censored"]) == (0, 0)
    assert {empty[key] for key in ("updates_needed", "speedup", "ci_low", "p", "p_adjusted")} == {None}


def test_curves_of_nothing_but_their_start_are_left_out():
    rows = speedups({"a": {"dino": {0: ([0], [9.0])}}, "b": {"dino": {0: ([0], [5.0]), 1: ([0], [1.0])}}}, "b")
    assert [row["n"] for row in rows] == [0, 0]


def noisy_curves(rng, factors, num_seeds, noise=0.02):
    """Curves 10 exp(-t / 400 * factor) + 1 with noise at each evaluation, of one arm per factor."""
    at = np.arange(0, 2001, 100)
    return {
        arm: {
            "dino": {
                seed: (at, 1 + 10 * np.exp(-at * factor / 400) + noise * rng.normal(size=len(at)))
                for seed in range(num_seeds)
            }
        }
        for arm, factor in factors.items()
    }


def test_intervals_of_speedups_cover_the_true_one():
    """Straight curves, on which interpolation is exact, whose slopes vary from seed to seed."""
    rng, reps, hits = np.random.default_rng(0), 200, 0
    for _ in range(reps):
        slopes = 0.5 * np.exp(0.2 * rng.normal(size=5))
        factors = 1.5 * np.exp(0.1 * rng.normal(size=5))
        row = speedup_row(
            {seed: falling(slope * factor) for seed, (slope, factor) in enumerate(zip(slopes, factors, strict=True))},
            {seed: falling(slope) for seed, slope in enumerate(slopes)},
        )
        hits += row["ci_low"] <= 1.5 <= row["ci_high"]
    assert within(hits, reps, 0.95)


@pytest.mark.parametrize(("noise", "num_seeds"), [(1e-3, 8), (0.02, 3)])
def test_noisy_curves_of_equal_arms_are_seldom_told_apart(noise, num_seeds):
    """Without p = 1 for bounds that say nothing, the first of these studies would find an effect in 29 of a hundred."""
    rng, reps = np.random.default_rng(1), 150
    rows = [row_of(speedups(noisy_curves(rng, {"a": 1.0, "b": 1.0}, num_seeds, noise), "b"), "a") for _ in range(reps)]
    assert stats.binomtest(sum(row["p"] < 0.05 for row in rows), reps, 0.05, "greater").pvalue > 1e-3
    assert np.mean([math.log(row["speedup"]) for row in rows if row["speedup"]]) == pytest.approx(0, abs=0.02)


def test_an_upper_bound_above_one_says_nothing():
    """Nine runs are twice as fast and one never gets there: it might have needed any number of updates."""
    baseline = {seed: falling(1 + seed / 100) for seed in range(10)}
    arm = {seed: falling(2) for seed in range(9)}
    fast = speedup_row({**arm, 9: falling(2)}, baseline)
    row = speedup_row({**arm, 9: falling(0.9)}, baseline)
    assert fast["p"] < 1e-9
    assert (row["censored"], row["p"], row["p_adjusted"]) == (1, 1, 1)
    assert fast["ci_low"] is not None
    assert (row["ci_low"], row["ci_high"]) == (None, None)
    assert row["speedup"] > 1.8


def test_an_upper_bound_below_one_is_tested_as_it_is():
    noisy = (UPDATES, np.where(UPDATES >= 300, 1.0, 5.0))
    arm = {seed: falling(0.9 + seed / 1000) for seed in range(5)}  # they end at 1 or a little below
    row = speedup_row({**arm, 5: falling(0.5)}, dict.fromkeys(range(6), noisy))
    assert (row["censored"], row["speedup"] < 0.5, row["p"] < 1e-3) == (1, True, True)


# --- Sentences about speed ----------------------------------------------------------------------------------------------


@cases(
    ("figures", "text"),
    [
        (
            (5, 0, 1.8, 1.5, 2.1, 0.003),
            "a is faster than b to its final quality on dino (1.8 times as fast, 95 % interval 1.5 to 2.1, adjusted "
            "p = 0.003, 5 seeds).",
        ),
        (
            (5, 2, 0.8, 0.7, 0.9, 0.003),
            "a is slower than b to its final quality on dino (at most 0.8 times as fast, 95 % interval 0.7 to 0.9, adjusted "
            "p = 0.003, 5 seeds). 2 of 5 runs of a never got there.",
        ),
        (
            (5, 1, 1.8, 1.5, 2.1, 1.0),
            "a is not significantly faster or slower than b to its final quality on dino (at most 1.8 times as fast, 95 % "
            "interval 1.5 to 2.1, adjusted p = 1, 5 seeds). 1 of 5 runs of a never got there.",
        ),
        (
            (5, 0, 0.9, 0.7, 1.3, 0.2),
            "a is not significantly faster or slower than b to its final quality on dino (0.9 times as fast, 95 % interval "
            "0.7 to 1.3, adjusted p = 0.2, 5 seeds).",
        ),
        (
            (1, 0, 1.1, None, None, None),
            "a and b share only one seed on dino (1.1 times as fast): a test takes two.",
        ),
        ((1, 1, 1.1, None, None, None), "a never reached the final quality of b on dino, in 1 run."),
        ((0, 0, None, None, None, None), "a and b have no runs on dino that could be compared by the updates they need."),
    ],
)  # fmt: skip
def test_sentences_about_speed(figures, text):
    keys = ("n", "censored", "speedup", "ci_low", "ci_high", "p_adjusted")
    rows = [{"arm": "a", "dataset": "dino", **dict(zip(keys, figures, strict=True))}, {"arm": "b", "dataset": "dino"}]
    assert [verdict.sentence for verdict in speedup_findings(rows, "b")] == [text]


def test_sentences_about_speed_come_from_rows():
    rng = np.random.default_rng(0)
    rows = speedups(noisy_curves(rng, {"fast": 2.0, "base": 1.0, "slow": 0.5}, 5, 1e-3), "base")
    fast, slow = speedup_findings(rows, "base")
    assert (fast.word, slow.word) == ("faster", "never as good")
    assert slow.sentence == "slow never reached the final quality of base on dino, in 5 runs."
