"""The laws of the loss: formulas against plain loops in float64, recovery from made-up losses, and the check."""

import math

import numpy as np
import pytest
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.forecast.law_check import LAST_VALUE, Check, check_input, check_laws, models_for
from diffusers_lrlab.forecast.law_fits import LossCurve, Model, fit_law
from diffusers_lrlab.forecast.loss_forecast import (
    Candidate,
    Predicted,
    extrapolations,
    make_forecaster,
    notes_of_extrapolation,
)
from diffusers_lrlab.forecast.loss_laws import LAWS, POWER_OF_UPDATES, RateSums, annealing_gains, bound_terms, decay_gains
from diffusers_lrlab.schedules.expected import lr_curve

LENGTH, WARMUP, PEAK = 200, 10, 2e-3
UPDATES = np.arange(5, LENGTH + 1, 5)
SCHEDULES = ("constant_with_warmup", "cosine", "warmup_stable_decay:num_decay_steps=0.3")


def rates_of(spec, length=LENGTH, peak=PEAK):
    return lr_curve(spec, peak, WARMUP, length)


# --- formulas ---------------------------------------------------------------------------------------------------------


def annealing_by_loop(lrs, memory):
    """S1 and S2 of arXiv 2408.11029 after each update."""
    keep, momentum, first, second, found = math.exp(-1 / memory), 0.0, 0.0, 0.0, []
    for index, lr in enumerate(lrs):
        momentum = keep * momentum + (lrs[index - 1] - lr if index else 0.0)
        first, second = first + lr, second + momentum
        found.append((first, second))
    return np.array(found).T


def decay_by_loop(lrs, b, c, scale):
    """The sum of arXiv 2503.12811 after each update."""
    found = []
    for end in range(1, len(lrs) + 1):
        total = 0.0
        for k in range(1, end):
            gain = 1 - (scale * lrs[k] ** -c * sum(lrs[k:end]) + 1) ** -b if lrs[k] else 1.0
            total += (lrs[k - 1] - lrs[k]) * gain
        found.append(total)
    return np.array(found)


def bound_by_loop(lrs):
    """The three terms of arXiv 2501.18965, theorem 1."""
    total, count = sum(lrs), len(lrs)
    third = sum(
        lrs[k] / sum(lrs[k + 1 :]) * sum(lr**2 for lr in lrs[k:]) / sum(lrs[k:]) for k in range(count - 1)
    )  # fmt: skip
    return 1 / (2 * total), sum(lr**2 for lr in lrs) / (2 * total), third / 2


def every_update(lrs, warmup=0):
    return RateSums.of(np.array(lrs), warmup, np.arange(1, len(lrs) + 1))


def test_published_vectors():
    """Worked by hand from the formulas."""
    sums = every_update([1, 1, 0.5, 0])
    np.testing.assert_allclose(sums.sums_at_peak, [1, 2, 2.5, 2.5])
    np.testing.assert_allclose(annealing_gains(sums, -1 / math.log(0.9)), [0, 0, 0.5, 1.45], atol=1e-15)
    sums = every_update([1, 1, 0.5, 0.25])
    losses = 1 + 0.5 * sums.sums**-0.5 - 0.3 * decay_gains(sums, b=0.5, c=0.4, scale=2)
    np.testing.assert_allclose(losses, [1.5, 1.353553, 1.264718, 1.218252], atol=1e-6)
    np.testing.assert_allclose(bound_terms(np.array([1, 1, 0.5])), [0.2, 0.45, 1.133333], atol=1e-6)


@cases("spec", ["cosine", "rex", "exponential", "cosine_with_restarts:num_cycles=2", "step:step_size=30,gamma=0.5"])
def test_formulas_equal_plain_loops(spec):
    lrs = lr_curve(spec, 1.0, 0, 120)
    sums = every_update(lrs)
    first, second = annealing_by_loop(lrs, 7.0)
    np.testing.assert_allclose(sums.sums_at_peak, first, rtol=1e-12)
    np.testing.assert_allclose(annealing_gains(sums, 7.0), second, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(decay_gains(sums, 0.7, 0.3, 2.0), decay_by_loop(lrs, 0.7, 0.3, 2.0), rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(bound_terms(lrs), bound_by_loop(lrs[lrs > 0]), rtol=1e-12)


def test_a_rate_of_zero_gives_no_warning():
    with np.errstate(all="raise"):
        sums = every_update([1.0, 0.5, 0.0, 0.0])
        assert decay_gains(sums, 0.5, 0.4, 2.0)[-1] == pytest.approx(0.5 * (1 - (2 * 0.5**0.6 + 1) ** -0.5) + 0.5)
        assert np.isfinite(annealing_gains(sums, 0.5)).all()


def test_warmup_is_no_rise_of_the_rate():
    sums = every_update([0.0, 0.5, 1.0, 1.0], warmup=2)
    assert not sums.drops.size
    np.testing.assert_allclose(sums.sums_at_peak, [1, 2, 3, 4])
    np.testing.assert_allclose(sums.sums, [0, 0.5, 1.5, 2.5])


def test_joined_drops_of_a_long_run_change_little():
    lrs = lr_curve("cosine", 1.0, 0, 20_000)
    sums = RateSums.of(lrs, 0, np.array([5000, 12_000, 20_000]), length=20_000.0)
    assert len(sums.drops) <= 256
    second = annealing_by_loop(lrs, 2000.0)[1][[4999, 11_999, 19_999]] / 20_000
    np.testing.assert_allclose(annealing_gains(sums, 0.1), second, rtol=1e-3)
    terms = bound_terms(lrs)
    np.testing.assert_allclose(sums.bounds[-1], [20_000 * terms[0], terms[1] + terms[2]], rtol=0.01)


# --- fits -------------------------------------------------------------------------------------------------------------

TRUE = {
    "annealing": ({"L0": 0.3, "A": 0.1, "C": 0.2}, {"a": 0.6, "memory": 0.04}),
    "multi-power": ({"L0": 0.3, "A": 0.1, "B": 0.08}, {"a": 0.6, "b": 0.5, "c": 0.3, "scale": 20.0}),
    "bound": ({"L0": 0.2, "D^2": 0.05, "G^2": 0.1}, {}),
}


def made_up(law, spec, length=LENGTH, peak=PEAK, noise=0.0, seed=0):
    """A curve that follows a law exactly, but for noise."""
    coefficients, shape = TRUE[law]
    lrs, updates = rates_of(spec, length, peak), UPDATES[UPDATES > WARMUP] * length // LENGTH
    sums = RateSums.of(lrs, WARMUP, updates, PEAK, LENGTH)
    columns = np.concatenate([np.ones((len(updates), 1)), LAWS[law].columns(sums, shape)], axis=1)
    losses = columns @ np.array([*coefficients.values()])
    losses *= np.exp(noise * np.random.default_rng(seed).normal(size=len(losses)))
    return LossCurve(spec, lrs, WARMUP, updates, losses)


@cases("law", [*LAWS])
def test_a_law_is_recovered_from_losses_that_follow_it(law):
    curves = [made_up(law, spec) for spec in SCHEDULES]
    fit = fit_law(LAWS[law], curves)
    if law != "multi-power":  # whose b, c and scale are nearly exchangeable
        assert fit.coefficients == pytest.approx(TRUE[law][0], rel=1e-3)
        assert fit.shape == pytest.approx(TRUE[law][1], rel=1e-3)
    unseen = made_up(law, "exponential", 2 * LENGTH, PEAK / 2)
    predicted = fit.predict(unseen.lrs, WARMUP, unseen.updates)
    np.testing.assert_allclose(predicted, unseen.losses, rtol=1e-4)


def test_a_law_above_a_floor_never_predicts_less():
    curves = [made_up("annealing", spec) for spec in SCHEDULES]
    floor = 0.99 * min(curve.losses.min() for curve in curves)
    fit = Model(LAWS["annealing"], with_floor=True).fit(curves, floor)
    long = rates_of("linear", 100 * LENGTH)
    assert fit.predict(long, WARMUP, np.array([100 * LENGTH]))[0] >= floor


def test_parts_of_the_noise_levels_have_laws_of_their_own():
    curves = []
    for spec in SCHEDULES:
        parts = np.stack([made_up(law, spec).losses for law in ("annealing", "bound")], axis=1)
        one = made_up("bound", spec)
        curves.append(LossCurve(spec, one.lrs, WARMUP, one.updates, parts.mean(axis=1), parts))
    models, _ = models_for(curves, np.array([0.01, 0.02]), "annealing")
    assert [model.name for model in models][-1] == "annealing, above the floor, by noise level"
    models, notes = models_for(curves, np.array([0.01, 10.0]) / 20, "annealing")
    assert [model.name for model in models][-1] == "annealing, above the floor"
    assert notes == [
        "The floor of the loss at each noise level is not known, so laws by noise level are fitted without one."
    ]
    fitted = models[1].fit(curves, None)
    assert len(fitted.fits) == 2
    whole = np.mean([fit_law(LAWS["annealing"], [curve.part(i) for curve in curves]).predict(
        curves[0].lrs, WARMUP, curves[0].updates) for i in (0, 1)], axis=0)  # fmt: skip
    np.testing.assert_allclose(fitted.predict(curves[0].lrs, WARMUP, curves[0].updates), whole)


# --- the check --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_law_that_holds_passes_its_check():
    check = check_laws([made_up("annealing", spec) for spec in SCHEDULES], None)
    assert check.best.name == "annealing"
    assert check.is_passed
    assert check.error < 1e-3
    assert check.naive[LAST_VALUE].mean() > 0.01
    assert "is used" in check.describe()


def test_one_schedule_is_checked_on_its_later_losses():
    check = check_laws([made_up("annealing", "cosine")], None)
    assert len(check.errors[check.best]) == 2
    assert "what came before" in check.held_out
    assert check.notes == (
        "multi-power needs 2 schedules to fit.",
        "With fewer than 3 schedules none is left out, so the check does not cover other schedules.",
    )


def test_losses_after_a_long_warm_up_are_checked():
    """A warm-up over most of the run leaves no losses in its first 60 %."""
    late = np.arange(141, LENGTH + 1, 5)
    curve = LossCurve("constant", lr_curve("constant_with_warmup", PEAK, 140, LENGTH), 140, late, 1 + 1 / late)
    check = check_laws([curve], None, "bound")
    assert np.isfinite(check.error)
    assert check.naive[LAST_VALUE][1] == pytest.approx(
        np.mean([(1 + 1 / late[9]) / (1 + 1 / each) - 1 for each in late[10:]])
    )


def test_noise_passes_no_check():
    """Losses that do not depend on the schedule, and wander: the last value is hard to beat."""
    rng, curves = np.random.default_rng(0), []
    for spec in SCHEDULES:
        walk = 1 + 0.02 * np.cumsum(rng.normal(size=len(UPDATES)))
        curves.append(LossCurve(spec, rates_of(spec), WARMUP, UPDATES, walk))
    forecaster = make_forecaster([{0: curve} for curve in curves], None)
    assert not forecaster.check.is_passed
    text = forecaster.check.describe()
    assert "No forecast" in text
    for name in (*LAWS, LAST_VALUE, POWER_OF_UPDATES.name):
        assert name in text or name == "multi-power"
    with pytest.raises(LabError, match="No forecast"):
        forecaster.predict(Candidate("rex", rates_of("rex"), WARMUP))


def test_a_law_is_not_judged_by_the_errors_that_chose_it():
    first, second = Model(LAWS["annealing"]), Model(LAWS["bound"])
    naive = {LAST_VALUE: np.array([0.2, 0.2])}
    # Each is good where it would be chosen for the other trial: choosing by all trials would report 0.1.
    check = Check("losses", {first: np.array([0.0, 0.3]), second: np.array([0.3, 0.1])}, naive)
    assert check.best is first
    assert check.error == pytest.approx(0.3)
    assert not check.is_passed


@cases(
    "curves, law, message",
    [
        ([made_up("bound", "cosine").where(np.arange(38) == 5)], None, "must have 10 validation losses or more .*got 1;"),
        ([made_up("bound", "cosine")], "multi-power", "--law multi-power: must be fitted to 2 schedules or more, got 1"),
        ([made_up("bound", "cosine")], "anealing", "--law anealing: must be one of .* Did you mean 'annealing'"),
    ],
)
def test_wrong_input(curves, law, message):
    with pytest.raises(LabError, match=message):
        check_laws(curves, None, law)


def test_enough_points_are_enough():
    check_input([made_up("bound", "cosine").where(np.arange(38) < 10)], None)


def test_a_floor_that_is_not_below_the_losses_is_left_out_and_said():
    curves = [made_up("bound", spec) for spec in SCHEDULES]
    models, notes = models_for(curves, 10.0, None)
    assert not any(model.with_floor for model in models)
    lowest = min(curve.losses.min() for curve in curves)
    assert notes == [f"The floor, 10, is not below all losses ({lowest:.6g}), so no law is fitted above it."]


# --- the forecast -----------------------------------------------------------------------------------------------------


def test_intervals_are_over_seeds():
    schedules = [{seed: made_up("annealing", spec, noise=0.002, seed=seed) for seed in range(3)} for spec in SCHEDULES]
    forecaster = make_forecaster(schedules, None, "annealing")
    found = forecaster.predict(Candidate("rex", rates_of("rex"), WARMUP))
    finals = [one.predict(rates_of("rex"), WARMUP, np.array([LENGTH]))[0] for one in forecaster.by_seed]
    half = 4.302653 * np.std(finals, ddof=1) / math.sqrt(3)
    assert found.interval == pytest.approx((found.final - half, found.final + half))
    assert found.interval[0] < made_up("annealing", "rex").losses[-1] < found.interval[1]
    one = make_forecaster([{0: of_seeds[0]} for of_seeds in schedules], None, "annealing")
    assert one.predict(Candidate("rex", rates_of("rex"), WARMUP)).interval is None


@cases(
    "spec, length, peak, expected",
    [
        ("rex", LENGTH, PEAK, []),
        ("rex", 2 * LENGTH, PEAK, ["2 times as long as the longest run"]),
        ("rex", LENGTH // 2, PEAK, ["0.5 times as long as the shortest run"]),
        ("rex", LENGTH, 2 * PEAK, ["peak 0.004, while the runs have 0.002"]),
        ("cosine_with_restarts:num_cycles=2", LENGTH, PEAK, ["rises again, which no run does"]),
    ],
)
def test_extrapolation_is_named(spec, length, peak, expected):
    curves = [made_up("bound", one) for one in SCHEDULES]
    assert extrapolations(Candidate(spec, rates_of(spec, length, peak), WARMUP), curves) == expected
    only_constant = extrapolations(Candidate("cosine", rates_of("cosine"), WARMUP), curves[:1])
    assert only_constant == ["falls to 0% of the peak, the runs to 100%"]


def test_schedules_that_extrapolate_alike_share_a_sentence():
    def predicted(label, *beyond):
        return Predicted(Candidate(label, np.ones(2), 0), np.arange(2), np.ones(2), None, [*beyond])

    longer = "2 times as long as the longest run"
    rex, step, linear = predicted("rex", longer), predicted("step", longer), predicted("linear")
    ending = f"which the check does not cover: {longer}."
    assert notes_of_extrapolation([rex, linear]) == [f"rex extrapolates, {ending}"]
    assert notes_of_extrapolation([rex, step]) == [f"All 2 schedules extrapolate, {ending}"]
    assert notes_of_extrapolation([rex, step, linear]) == [f"rex, step extrapolate, {ending}"]
    assert notes_of_extrapolation([linear]) == []
