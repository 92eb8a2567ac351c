"""Distances between sets of points, against closed forms and slow twins."""

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from helpers import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tables import cases

from diffusers_lrlab.evaluation import distances
from diffusers_lrlab.evaluation.distances import density_and_coverage, energy_distance, knn_kl, sliced_wasserstein
from diffusers_lrlab.evaluation.metrics import METRICS, compare_samples

POINT_METRICS = ["kl", "energy_distance", "sliced_wasserstein", "density", "coverage"]
EVERY = [knn_kl, energy_distance, sliced_wasserstein, density_and_coverage]


def all_distances(first, second):
    return np.array([[math.dist(x, y) for y in second] for x in first])


def ball_radii(points, k):
    """The distance of each point to its k-th neighbour among the others."""
    between = all_distances(points, points)
    return np.array([sorted(np.delete(row, i))[k - 1] for i, row in enumerate(between)])


def with_value(points, row, value):
    changed = points.copy()
    changed[row, -1] = value
    return changed


@cases("metric", EVERY)
@cases(("which", "change", "part"), [
    (0, lambda points: with_value(points, 3, math.nan), "point 3 [1.0, nan] of the first set: must be"),
    (1, lambda points: with_value(points, 0, 1e39), "point 0 [1.0, 1e+39] of the second set: must be"),
    (0, lambda points: points[:, 0], "The first set has shape (20,)"),
    (1, lambda points: points[:0], "The second set has shape (0, 2)"),
    (1, lambda points: points[:, :1], "different dimensions: 2 and 1"),
])  # fmt: skip
def test_sets_that_are_no_points_are_told(metric, which, change, part):
    sets = [np.ones((20, 2)), np.ones((20, 2))]
    sets[which] = change(sets[which])
    with pytest.raises(ValueError, match=re.escape(part)):
        metric(*sets)


@cases("metric", EVERY)
def test_sets_are_of_any_kind_of_numbers_and_are_not_changed(metric):
    """A second call, whose part of the first set is known, gives the same."""
    first, second = (np.round(4 * normal(seed, 30)) for seed in (0, 1))
    copies = first.copy(), second.copy()
    value = metric(first, second)
    assert np.array_equal((first, second), copies)
    assert metric(first.astype(np.float32), second.astype(np.int32)) == value
    assert metric(first.tolist(), torch.from_numpy(second)) == value != metric(first + 0.5, second)


@pytest.mark.slow
@pytest.mark.parametrize("metric", EVERY)
@settings(deadline=None, max_examples=60, derandomize=True)
@given(data=st.data())
def test_every_finite_float32_gives_a_finite_number(metric, data):
    """Also subnormal and huge ones, and repeated ones."""
    dimension = data.draw(st.integers(1, 3))
    elements = st.one_of(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from([0.0, 1.0, -1.0]))
    first, second = (
        data.draw(arrays(np.float32, (data.draw(st.integers(6, 12)), dimension), elements=elements)) for _ in "ab"
    )
    assert np.isfinite(metric(first, second)).all()


# --- by nearest neighbours -------------------------------------------------------------------------------------------


def slow_knn_kl(real, generated, k=5):
    n, m, dimension = len(real), len(generated), real.shape[1]
    least = 2.0**-23 * np.abs(real).max()
    own = ball_radii(real, k)
    other = np.sort(all_distances(real, generated), axis=1)[:, k - 1]
    total = sum(math.log(max(nu, least) / max(rho, least)) for nu, rho in zip(other, own, strict=True))
    return (dimension / n * total + math.log(m / (n - 1))) / math.log(2)


@cases(("n", "m", "k", "dimension"), [(2, 1, 1, 1), (6, 5, 5, 2), (12, 50, 11, 3), (40, 40, 5, 4)])
def test_the_neighbour_estimate_is_the_formula(n, m, k, dimension):
    real, generated = normal(n, n, dimension), 2 * normal(m + 100, m, dimension) + 0.3
    assert knn_kl(real, generated, k) == pytest.approx(slow_knn_kl(real, generated, k), abs=1e-10)
    if k == 5:
        assert knn_kl(real, generated) == knn_kl(real, generated, k)


@cases(("mean", "scales", "other_mean", "other_scales"), [
    ([0], [1], [1], [2]), ([0, 0], [1, 1], [0, 0], [1, 1]), ([3, -2], [1, 0.5], [3.5, -2], [2, 1]),
    ([0, 0, 0], [1, 1, 1], [0, 0.5, 0], [1.5, 1, 1]),
])  # fmt: skip
def test_the_divergence_of_gaussians(mean, scales, other_mean, other_scales):
    """To 0.08 bits with 20,000 points."""
    real = mean + normal(0, 20_000, len(mean)) * scales
    generated = other_mean + normal(1, 20_000, len(mean)) * other_scales
    laws = (torch.distributions.Normal(*map(torch.tensor, law)) for law in ((mean, scales), (other_mean, other_scales)))
    expected = torch.distributions.kl_divergence(*laws).sum().item() / math.log(2)
    assert knn_kl(real, generated) == pytest.approx(expected, abs=0.08)


def test_repeated_points_have_the_least_distance():
    real, generated = normal(0, 40), normal(1, 40)
    real[20:], generated[20:] = real[0], real[0]
    assert knn_kl(real, generated) == pytest.approx(slow_knn_kl(real, generated), abs=1e-10)
    apart = knn_kl(np.ones((40, 2)), np.zeros((40, 2)))
    assert apart == pytest.approx(2 * (23 + 0.5) + math.log2(40 / 39), abs=1e-10)  # they are sqrt(2) apart


def test_a_sample_far_away_makes_nothing_better():
    """It says nothing about how exactly the points near the data are known."""
    real, generated = normal(0, 300), normal(1, 300)
    gone = with_value(generated, 0, 1e30)
    assert knn_kl(real, gone) == pytest.approx(knn_kl(real, generated), abs=0.1)
    assert knn_kl(real, generated * 1e20) > 100
    assert density_and_coverage(real, generated * 1e20) == (0, 0)


@cases(("metric", "n", "m", "k", "expected"), [
    (knn_kl, 10, 20, 10, "k=10: must be a whole number in [1, 9], got 10. Hint: there are 10 real and 20 generated points"),
    (knn_kl, 20, 4, 5, "k=5: must be a whole number in [1, 4]"),
    (sliced_wasserstein, 20, 20, 0, "num_projections=0: must be a whole number in"),
    (density_and_coverage, 10, 20, 10, "k=10: must be a whole number in [1, 9], got 10. Hint: there are 10 real points"),
])  # fmt: skip
def test_neighbours_and_directions_that_are_not_there_are_told(metric, n, m, k, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        metric(normal(0, n), normal(1, m), k)


# --- energy distance -------------------------------------------------------------------------------------------------


@cases(("n", "m", "dimension"), [(2, 2, 1), (9, 4, 3), (3, 20, 2)])
def test_the_energy_distance_is_the_formula(monkeypatch, n, m, dimension):
    first, second = normal(n, n, dimension), 2 * normal(m, m, dimension) + 1
    expected = 2 * all_distances(first, second).mean()
    expected -= all_distances(first, first).mean() + all_distances(second, second).mean()
    assert energy_distance(first, second) == pytest.approx(expected, abs=1e-12)
    assert energy_distance(second, first) == pytest.approx(expected, abs=1e-12)
    monkeypatch.setattr(distances, "_BLOCK_PAIRS", 7)  # a part at a time
    assert energy_distance(first, second) == pytest.approx(expected, abs=1e-12)


def test_the_energy_distance_of_equal_sets_is_0_and_never_negative():
    points, rng = normal(0, 50, 3), np.random.default_rng(0)
    assert energy_distance(points, points.copy()) == 0
    values = [energy_distance(points := rng.normal(size=(7, 2)), rng.permutation(points)) for _ in range(100)]
    assert 0 <= min(values) <= max(values) < 1e-12


# --- sliced Wasserstein distance -------------------------------------------------------------------------------------


def line_distance(first, second):
    """The square of W_2 of numbers, by repeating them until there are as many."""
    size = math.lcm(len(first), len(second))
    repeated = [np.sort(np.repeat(numbers, size // len(numbers))) for numbers in (first, second)]
    return (np.abs(repeated[0] - repeated[1]) ** 2).mean()


@cases(("n", "m"), [(1, 1), (1, 6), (7, 7), (49, 50)])
def test_the_sliced_distance_of_numbers_is_exact(n, m):
    first, second = normal(n, n, 1), 2 * normal(m + 1000, m, 1) + 1
    value = sliced_wasserstein(first, second, num_projections=3)
    assert value == pytest.approx(math.sqrt(line_distance(first[:, 0], second[:, 0])), rel=1e-10)


@cases(("n", "m", "num"), [(8, 8, 1), (12, 9, 5), (5, 30, 128)])
def test_the_sliced_distance_of_planes_is_the_mean_over_half_a_turn(n, m, num):
    first, second = normal(n, n), 2 * normal(m + 1000, m) + 1
    angles = [(i + 0.5) / num * math.pi for i in range(num)]
    powers = [line_distance(*((points * [math.cos(a), math.sin(a)]).sum(1) for points in (first, second))) for a in angles]
    assert sliced_wasserstein(first, second, num) == pytest.approx(math.sqrt(np.mean(powers)), rel=1e-10)


@cases(("dimension", "num", "tolerance"), [(2, 2, 1e-9), (2, 129, 1e-9), (3, 5000, 0.03), (5, 5000, 0.03)])
def test_a_translate_is_as_far_as_it_was_moved_in_each_direction(dimension, num, tolerance):
    """The squares of cosines have a mean of one over the dimension."""
    points, vector = normal(0, 30, dimension), normal(1, 1, dimension)[0]
    value = sliced_wasserstein(points, points[::-1] + vector, num_projections=num)
    assert value == pytest.approx(np.linalg.norm(vector) / math.sqrt(dimension), rel=tolerance)
    assert value == sliced_wasserstein(points, points[::-1] + vector, num_projections=num, seed=0)
    assert (value == sliced_wasserstein(points, points[::-1] + vector, num_projections=num, seed=1)) is (dimension == 2)


# --- density and coverage --------------------------------------------------------------------------------------------


@cases(("n", "m", "k", "dimension"), [(2, 1, 1, 1), (20, 20, 5, 2), (8, 60, 7, 4)])
def test_density_and_coverage_are_the_formulas(n, m, k, dimension):
    real, generated = normal(n, n, dimension), 1.5 * normal(m + 1000, m, dimension)
    inside = all_distances(real, generated) <= ball_radii(real, k)[:, None]
    expected = inside.sum() / (k * m), inside.any(axis=1).mean()
    assert density_and_coverage(real, generated, k) == pytest.approx(expected, abs=1e-12)


def test_balls_are_closed_and_hold_what_is_the_same():
    """So a copy of the real points is in k + 1 balls each on average, however distances are rounded."""
    assert density_and_coverage(normal(0, 100), normal(0, 100)) == pytest.approx((6 / 5, 1), abs=1e-12)
    real = np.repeat([[0.0, 0.0], [1.0, 0.0]], 6, axis=0)
    for place, expected in ((0.0, (6 / 5, 0.5)), (1e-8, (6 / 5, 0.5)), (1e-4, (0, 0))):
        assert density_and_coverage(real, np.array([[place, 0.0]])) == expected


# --- all figures -----------------------------------------------------------------------------------------------------


@cases(("num_real", "num_generated", "found"), [(5, 100, []), (0, 10, []), (6, 6, POINT_METRICS), (50, 6, POINT_METRICS)])
def test_metrics_are_those_that_the_numbers_allow(num_real, num_generated, found):
    """And what one would compute; the number of real points is that of generated ones where that matters."""
    real, generated = normal(0, num_real), 1 + normal(1, num_generated)
    results = compare_samples(real, generated)
    assert list(results) == found
    if found:
        figures = [metric(real, generated) for metric in (knn_kl, energy_distance, sliced_wasserstein)]
        assert [*results.values()] == [*figures, *density_and_coverage(real[:num_generated], generated)]


def test_metrics_are_given_the_first_points(monkeypatch):
    def first_rows(real, generated):
        assert (real[:, 0] == np.arange(len(real))).all()
        assert (generated[:, 0] == np.arange(len(generated))).all()
        return len(real) + len(generated) / 100_000

    for name in POINT_METRICS:
        monkeypatch.setitem(METRICS, name, dataclasses.replace(METRICS[name], function=first_rows))
    real, generated = (np.repeat(np.arange(num, dtype=float)[:, None], 2, axis=1) for num in (9000, 7000))
    every, equal = 9000 + 7000 / 100_000, 7000 + 7000 / 100_000
    expected = {"kl": every, "energy_distance": 5000 + 5000 / 100_000, "sliced_wasserstein": every}
    expected |= {"density": equal, "coverage": equal}
    assert compare_samples(real, generated, progress="figures") == expected
