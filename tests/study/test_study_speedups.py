"""Updates that arms need for a quality, and speed-ups."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats
from tables import cases
from values_of_studies import row_of

from diffusers_lrlab.study.analysis.speedups import speedups, updates_to_reach
from diffusers_lrlab.study.analysis.summary import _compare_speed, against_controls, findings
from diffusers_lrlab.study.spec.reading import read_spec

# --- Updates that are needed --------------------------------------------------------------------------------------------


@cases(
    ("updates", "quality", "target", "needed"),
    [
        ([0, 100, 200], [4, 2, 1], 2, 100),
        ([0, 100, 200], [4, 2, 1], 1.25, 175),
        ([10, 100, 200], [4, 2, 1], 5, 10),
        ([0, 100, 200], [4, 2, 1], 0.5, None),
        ([0, 100, 300, 400], [4, 2, 3, 1], 1.5, 375),
        ([0, 100, 200, 300], [4, 4, 2, 2], 3, 150),
        ([0, 100, 200], [4, math.nan, 1], 2, 200),
        ([0, 100, 200], [4, -math.inf, math.nan], 3, None),
        ([], [], 1, None),
    ],
)
def test_the_first_crossing(updates, quality, target, needed):
    assert updates_to_reach(updates, quality, target) == needed


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
    )
    assert [(row["arm"], row["control"], row["n"]) for row in rows] == [("both", "rate", 5), ("both", "momentum", 5)]
    alike, faster = rows
    assert alike["ci_low"] < 1 < alike["ci_high"]
    assert faster["ci_low"] < 2 < faster["ci_high"]
    assert faster["p_adjusted"] == pytest.approx(2 * faster["p"])
    assert faster["p_adjusted"] < 0.001 < 0.05 < alike["p_adjusted"]
    assert [(verdict.reference, verdict.word) for verdict in verdicts] == [("rate", "cannot tell"), ("momentum", "faster")]


def noisy_course(rng, noise, length, speed=1.0):
    """Five runs that fall from 10, and are flat at their end if `length` is long; 50 evaluations, of independent noise."""
    at = np.linspace(20, 1000, 50)
    return {"dino": {s: (at, 10 * np.exp(-speed * at * length / 1000) + rng.normal(0, noise, 50)) for s in range(5)}}


COURSES = [(0.05, 0.05, 2, False), (0.1, 0.01, 7, True)]


@pytest.mark.slow
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
    assert not any(verdict.arm == "hot" and verdict.word == "faster" for verdict in verdicts)
    for result in results:
        result.status = "diverged" if result.arm == "control" and result.seed < 2 else result.status
    _, of_controls, _ = _compare_speed(spec, results)
    assert row_of(of_controls, "hot")["n"] == 3


def test_an_arm_that_comes_first_and_ends_worse_is_told_so():
    """It falls twice as fast to 4 and stays there; the control goes on to 0."""
    at = UPDATES
    early = {s: (at, np.maximum(10 - 2 * at / 100, 4 + 0.01 * s)) for s in range(5)}
    late = dict.fromkeys(range(5), (at, 10 - at / 100))
    rows = speedups({"early": {"dino": early}, "late": {"dino": late}}, "late", common=True)
    row = row_of(rows, "early")
    assert (row["n"], row["censored"], row["ends_worse"]) == (5, 0, 5)
    assert row["speedup"] == pytest.approx(2, rel=0.01)
    assert [verdict.word for verdict in findings(rows, "late")] == ["faster"]
    assert row_of(speedups({"early": {"dino": early}, "late": {"dino": late}}, "late"), "early")["censored"] == 5


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


def test_the_worse_of_two_ends_is_what_both_reach():
    """A slow arm never reaches the control's end, and always its own; which is called the control does not matter."""
    curves = {"a": {"dino": {0: falling(0.5), 1: falling(0.8)}}, "b": {"dino": {0: falling(1), 1: falling(1)}}}
    assert row_of(speedups(curves, "b"), "a")["censored"] == 2
    row, other = row_of(speedups(curves, "b", common=True), "a"), row_of(speedups(curves, "a", common=True), "b")
    assert (row["n"], row["censored"], row["updates_needed"]) == (2, 0, 1000)
    assert row["speedup"] == pytest.approx(np.sqrt(0.5 * 0.8))
    assert (other["speedup"], other["p"]) == pytest.approx((1 / row["speedup"], row["p"]))


SLOPES = {0: 0.8, 1: 0.7, 2: 0.9}
FLAT = (UPDATES, np.full(11, 10.0))
DIP = (UPDATES, np.where(UPDATES == 300, 0.5, 10 - 0.5 * UPDATES / 100))
SPIKED, PLAIN = (
    {0: (at, np.where(at == spike, 1e6, 10 - at / 100))} for at in [np.arange(0, 1001, 20)] for spike in (900, -1)
)


@cases(
    ("arm", "baseline", "n", "censored", "speedup"),
    [
        ({s: falling(2 * x) for s, x in SLOPES.items()}, {s: falling(x) for s, x in SLOPES.items()}, 3, 0, 2),
        ({0: falling(0.5), 1: falling(2), 2: falling(0.4)}, {s: falling(1) for s in range(3)}, 3, 2, 2 ** (1 / 3)),
        ({1: falling(2), 5: falling(3)}, {0: falling(1), 1: falling(1)}, 1, 0, 2),  # shared seeds only
        ({5: falling(3)}, {0: falling(1)}, 0, 0, None),
        ({0: FLAT, 1: falling(2)}, {0: FLAT, 1: falling(1)}, 1, 0, 2),  # the first target is reached without training
        ({0: falling(1), 1: falling(2)}, {0: ([0, 100], [10, math.nan]), 1: falling(1)}, 1, 0, 2),  # or there is none
        ({0: falling(1), 1: falling(2)}, {0: ([], []), 1: falling(1)}, 1, 0, 2),
        ({0: DIP}, {0: falling(0.8)}, 1, 1, None),  # lost again, so not reached
        (PLAIN, SPIKED, 1, 0, pytest.approx(1, rel=0.03)),
        (SPIKED, PLAIN, 1, 0, pytest.approx(1, rel=0.03)),
        ({0: ([0, 100, 200], [10, 50, math.nan]), 1: falling(0.5)}, {0: falling(1), 1: falling(1)}, 2, 2, None),
    ],
)
def test_pairs_by_hand(arm, baseline, n, censored, speedup):
    row = speedup_row(arm, baseline)
    assert (row["n"], row["censored"]) == (n, censored)
    assert row["speedup"] == (pytest.approx(speedup) if isinstance(speedup, float) else speedup)
    assert (row["ci_low"] is None) == (n < 2 or censored > 0 or speedup == 2)  # three times the same has no spread


def test_the_speedup_is_a_geometric_mean_with_the_interval_of_the_logarithm():
    factors = [1.25, 2.0, 2.5]
    row = speedup_row({s: falling(0.5 * x) for s, x in enumerate(factors)}, {s: falling(0.5) for s in range(3)})
    logs = np.log(factors)
    low, high = stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs))
    assert (row["speedup"], row["ci_low"], row["ci_high"]) == pytest.approx((np.exp(logs.mean()), np.exp(low), np.exp(high)))
    assert row["p"] == pytest.approx(stats.ttest_1samp(logs, 0).pvalue)
    assert row["updates_needed"] == pytest.approx(500)


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
