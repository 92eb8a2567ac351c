"""Distances between sets of points, and densities of models, against closed forms and slow twins."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from diffusers import DDPMScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tables import cases

from diffusers_lrlab.data.densities import mixture_log_prob
from diffusers_lrlab.evaluation import distances
from diffusers_lrlab.evaluation.distances import (
    density_and_coverage,
    energy_distance,
    exact_wasserstein,
    median_bandwidth,
    sliced_wasserstein,
    squared_mmd,
)
from diffusers_lrlab.evaluation.evaluate import compare_samples
from diffusers_lrlab.evaluation.kl import histogram_kl, knn_kl
from diffusers_lrlab.evaluation.likelihood import NUM_STEPS, _NoisePrediction, exact_kl, log_likelihood
from diffusers_lrlab.evaluation.metrics import METRICS
from diffusers_lrlab.objective.ddpm import DDPM
from diffusers_lrlab.study.runs.stops import StudyInterrupted

POINT_METRICS = [name for name, metric in METRICS.items() if metric.of == "samples"]


def normal(seed, n, dimension=2):
    return np.random.default_rng(seed).normal(size=(n, dimension))


def all_distances(first, second):
    return np.array([[math.sqrt(sum((x - y) ** 2)) for y in second] for x in first])


def ball_radii(points, k):
    """The distance of each point to its k-th neighbour among the others."""
    between = all_distances(points, points)
    return np.array([sorted(np.delete(row, i))[k - 1] for i, row in enumerate(between)])


SETS_OF_EVERY_METRIC = {
    "knn_kl": knn_kl,
    "histogram_kl": histogram_kl,
    "energy_distance": energy_distance,
    "squared_mmd": squared_mmd,
    "sliced_wasserstein": sliced_wasserstein,
    "exact_wasserstein": exact_wasserstein,
    "density_and_coverage": density_and_coverage,
}
every_metric = pytest.mark.parametrize("metric", SETS_OF_EVERY_METRIC.values(), ids=SETS_OF_EVERY_METRIC)


def with_value(points, row, value):
    changed = points.copy()
    changed[row, -1] = value
    return changed


@every_metric
@cases("which", [0, 1])
@cases(
    ("change", "part"),
    [
        (lambda points: with_value(points, 3, math.nan), "Point 3 of the {} set is [ 1. nan]"),
        (lambda points: with_value(points, 7, math.inf), "Point 7 of the {} set is [ 1. inf]"),
        (lambda points: with_value(points, 0, -math.inf), "Point 0 of the {} set is [  1. -inf]"),
        (lambda points: points[:, 0], "The {} set has shape (20,)"),
        (lambda points: points[None], "The {} set has shape (1, 20, 2)"),
        (lambda points: points[:0], "The {} set has shape (0, 2)"),
        (lambda points: points[:, :0], "The {} set has shape (20, 0)"),
    ],
)
def test_sets_that_are_no_points_are_told(metric, which, change, part):
    sets = [np.ones((20, 2)), np.ones((20, 2))]
    sets[which] = change(sets[which])
    with pytest.raises(ValueError) as told:  # noqa: PT011
        metric(*sets)
    assert part.format(("first", "second")[which]) in str(told.value)


@every_metric
def test_sets_of_different_dimensions_are_told(metric):
    with pytest.raises(ValueError, match="3 and 2 dimensions"):
        metric(normal(0, 20, 3), normal(1, 20, 2))


@every_metric
def test_sets_are_not_changed_and_kinds_of_numbers_do_not_matter(metric):
    first, second = (np.round(4 * normal(seed, 30)) for seed in (0, 1))
    copies = first.copy(), second.copy()
    value = metric(first, second)
    assert np.array_equal(first, copies[0])
    assert np.array_equal(second, copies[1])
    assert metric(first.astype(np.float32), second.astype(np.int32)) == value
    assert metric(first.tolist(), torch.from_numpy(second)) == value


@every_metric
@cases("scale", [1e155, 1e307])
def test_coordinates_whose_squares_overflow_give_a_number_or_are_refused(metric, scale):
    """Finite in float64, so `as_points` lets them pass."""
    try:
        value = metric(scale * normal(0, 30), scale * normal(1, 30))
    except ValueError:
        return
    assert np.isfinite(value).all()
    expected = metric(normal(0, 30), normal(1, 30))
    grows = metric in (energy_distance, sliced_wasserstein, exact_wasserstein)
    assert value == pytest.approx(scale * expected if grows else expected, rel=1e-6)


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@every_metric
@settings(deadline=None, max_examples=60, derandomize=True)
@given(data=st.data())
def test_every_finite_float32_gives_a_finite_number(metric, data):
    """Also subnormal and huge ones, and repeated ones."""
    dimension = data.draw(st.integers(1, 3))
    num = data.draw(st.integers(6, 12))
    others = num if metric is exact_wasserstein else data.draw(st.integers(5, 12))
    elements = st.one_of(FLOATS, st.sampled_from([0.0, 1.0, -1.0]))
    first, second = (data.draw(arrays(np.float32, (n, dimension), elements=elements)) for n in (num, others))
    options = {"bandwidth": 1.0} if metric is squared_mmd else {}
    assert np.isfinite(metric(first, second, **options)).all()


# --- by nearest neighbours -------------------------------------------------------------------------------------------


def slow_knn_kl(real, generated, k=5):
    n, m, dimension = len(real), len(generated), real.shape[1]
    least = 2.0**-23 * np.abs(real).max()
    own = ball_radii(real, k)
    other = np.sort(all_distances(real, generated), axis=1)[:, k - 1]
    total = sum(math.log(max(nu, least) / max(rho, least)) for nu, rho in zip(other, own, strict=True))
    return (dimension / n * total + math.log(m / (n - 1))) / math.log(2)


@cases("dimension", [1, 2, 3, 4])
@cases(("n", "m", "k"), [(2, 1, 1), (6, 5, 5), (30, 11, 3), (12, 50, 11), (40, 40, 5)])
def test_the_neighbour_estimate_is_the_formula(n, m, k, dimension):
    real, generated = normal(n, n, dimension), 2 * normal(m + 100, m, dimension) + 0.3
    assert knn_kl(real, generated, k) == pytest.approx(slow_knn_kl(real, generated, k), abs=1e-10)


def test_five_neighbours_are_the_default():
    real, generated = normal(0, 30), normal(1, 40)
    assert knn_kl(real, generated) == knn_kl(real, generated, k=5)


def gaussian_kl(mean, scales, other_mean, other_scales):
    """In bits, of Gaussians with independent coordinates."""
    mean, scales, other_mean, other_scales = map(np.asarray, (mean, scales, other_mean, other_scales))
    squares = (scales**2 + (mean - other_mean) ** 2) / other_scales**2
    return float((squares - 1 + 2 * np.log(other_scales / scales)).sum() / 2 / math.log(2))


@cases(
    ("mean", "scales", "other_mean", "other_scales"),
    [
        ([0], [1], [0], [1]),
        ([0], [1], [1], [2]),
        ([0, 0], [1, 1], [0, 0], [1, 1]),
        ([0, 0], [1, 1], [1, 0], [1, 1]),
        ([0, 0], [1, 1], [0, 0], [2, 2]),
        ([0, 0], [1.2, 1.2], [0, 0], [1, 1]),
        ([3, -2], [1, 0.5], [3.5, -2], [2, 1]),
        ([0, 0, 0], [1, 1, 1], [0, 0.5, 0], [1.5, 1, 1]),
    ],
)
def test_the_divergence_of_gaussians(mean, scales, other_mean, other_scales):
    """To 0.08 bits with 20,000 points."""
    real = mean + normal(0, 20_000, len(mean)) * scales
    generated = other_mean + normal(1, 20_000, len(mean)) * other_scales
    assert knn_kl(real, generated) == pytest.approx(gaussian_kl(mean, scales, other_mean, other_scales), abs=0.08)


def test_real_points_come_first():
    """KL(wide || narrow) is 0.27 bits more than KL(narrow || wide), and its estimate, though too small, is more too."""
    narrow, wide = normal(0, 20_000), 1.5 * normal(1, 20_000)
    there, back = gaussian_kl([0, 0], [1, 1], [0, 0], [1.5, 1.5]), gaussian_kl([0, 0], [1.5, 1.5], [0, 0], [1, 1])
    assert back - there > 0.25
    assert knn_kl(narrow, wide) == pytest.approx(there, abs=0.05)
    assert there + 0.08 < knn_kl(wide, narrow) < back


@cases(("inner", "outer"), [((1, 1), (2, 2)), ((1, 2), (4, 3)), ((1,), (8,)), ((2, 3), (2, 3))])
def test_the_divergence_of_boxes_is_the_ratio_of_their_areas(inner, outer):
    rng = np.random.default_rng(0)
    real = rng.uniform(-0.5, 0.5, (20_000, len(inner))) * inner
    generated = rng.uniform(-0.5, 0.5, (20_000, len(inner))) * outer
    assert knn_kl(real, generated) == pytest.approx(math.log2(math.prod(outer) / math.prod(inner)), abs=0.08)


def test_sets_of_different_sizes_estimate_the_same():
    """The sizes are in the formula."""
    for n, m in [(2000, 20_000), (20_000, 2000)]:
        assert knn_kl(normal(2, n), normal(3, m)) == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_the_neighbour_estimate_does_not_see_rotation_shift_and_scale(dimension):
    real, generated = normal(0, 200, dimension), 1.3 * normal(1, 150, dimension)
    rotation = np.linalg.qr(normal(2, dimension, dimension))[0]
    expected = knn_kl(real, generated)
    for scale, shift in [(1, 0), (1e-12, 0), (1e12, 0), (3, 5), (0.1, -2)]:
        moved = [points @ rotation * scale + shift for points in (real, generated)]
        assert knn_kl(*moved) == pytest.approx(expected, abs=1e-9)


def test_the_order_of_points_does_not_matter():
    real, generated = normal(0, 200), normal(1, 150)
    rng = np.random.default_rng(0)
    assert knn_kl(rng.permutation(real), rng.permutation(generated)) == pytest.approx(knn_kl(real, generated), abs=1e-12)


def test_points_that_are_all_equal_differ_by_their_numbers():
    n, m = 30, 45
    for value in (0.0, 1.0, 1e30):
        points = np.full((n, 2), value)
        assert knn_kl(points, np.full((m, 2), value)) == pytest.approx(math.log2(m / (n - 1)), abs=1e-12)


def test_half_of_the_points_repeated_is_the_formula_with_its_least_distance():
    real, generated = normal(0, 40), normal(1, 40)
    real[20:], generated[20:] = real[0], real[0]
    assert knn_kl(real, generated) == pytest.approx(slow_knn_kl(real, generated), abs=1e-10)
    assert math.isfinite(knn_kl(real, generated))
    apart = knn_kl(np.ones((40, 2)), np.zeros((40, 2)))
    assert apart == pytest.approx(2 * (23 + 0.5) + math.log2(40 / 39), abs=1e-10)  # they are sqrt(2) apart


def test_a_sample_far_away_makes_nothing_better():
    """It says nothing about how exactly the points near the data are known."""
    real, generated = normal(0, 300), normal(1, 300)
    gone = generated.copy()
    gone[0] = 1e30
    assert knn_kl(real, gone) == pytest.approx(knn_kl(real, generated), abs=0.1)
    assert knn_kl(real, generated * 1e20) > 100
    density, coverage = density_and_coverage(real, generated * 1e20)
    assert (density, coverage) == (0, 0)


def test_a_copy_of_the_real_points_is_nearer_than_they_are_to_each_other():
    """A point of the copy lies on each, so the k-th neighbour there is the k-1-th here."""
    real = normal(0, 100)
    ratios = ball_radii(real, 4) / ball_radii(real, 5)
    assert knn_kl(real, real.copy()) == pytest.approx(2 * np.log2(ratios).mean() + math.log2(100 / 99), abs=1e-10)
    assert knn_kl(real, real.copy(), k=1) < -30


@cases(
    ("n", "m", "k", "parts"),
    [
        (10, 20, 10, ["k=10", "10 real", "20 generated", "[1, 9]"]),
        (10, 20, 0, ["k=0", "[1, 9]"]),
        (10, 20, -3, ["k=-3"]),
        (20, 4, 5, ["k=5", "20 real", "4 generated", "[1, 4]"]),
        (5, 5, 5, ["k=5", "[1, 4]"]),
        (20, 20, 2.5, ["2.5"]),
    ],
)
def test_a_neighbour_that_is_not_there_is_told(n, m, k, parts):
    with pytest.raises(ValueError) as told:  # noqa: PT011
        knn_kl(normal(0, n), normal(1, m), k)
    for part in parts:
        assert part in str(told.value)


# --- by histograms ---------------------------------------------------------------------------------------------------


def slow_histogram_kl(real, generated, bins, lowest, highest):
    def shares(points):
        counts = np.full((bins,) * points.shape[1], 0.5)
        for point in points:
            cell = []
            for x, low, high in zip(point, lowest, highest, strict=True):
                edges = np.linspace(low, high, bins + 1)
                cell.append(int(sum(x >= edge for edge in edges[1:-1])))
            counts[tuple(cell)] += 1
        return counts / counts.sum()

    p, q = shares(real), shares(generated)
    return sum(x * math.log2(x / y) for x, y in zip(p.flat, q.flat, strict=True))


@cases(("dimension", "bins"), [(1, 1), (1, 7), (2, 6), (3, 4)])
@cases("limits", [None, 0.7, 9])
def test_the_histogram_estimate_is_the_formula(dimension, bins, limits):
    """Also with points outside the grid, on any side."""
    real, generated = normal(0, 60, dimension), 2 * normal(1, 90, dimension)
    edges = (real.min(axis=0), real.max(axis=0)) if limits is None else np.array([-1.0, 1.1])[:, None] * [limits] * dimension
    edges = [np.broadcast_to(edge, dimension) for edge in edges]
    value = histogram_kl(real, generated, bins, None if limits is None else tuple(edges))
    assert value == pytest.approx(slow_histogram_kl(real, generated, bins, *edges), abs=1e-10)


@cases("same", [np.zeros((20, 2)), np.array([[1.0, 2.0]]), normal(0, 300), normal(1, 300, 1)])
def test_histograms_of_equal_sets_do_not_differ(same):
    assert histogram_kl(same, same[::-1]) == 0


def test_histograms_of_different_sizes_are_not_negative():
    rng = np.random.default_rng(0)
    for _ in range(50):
        n, m, dimension, bins = rng.integers(1, [40, 40, 3, 9]) + [0, 0, 1, 0]
        value = histogram_kl(rng.normal(size=(n, dimension)), rng.normal(size=(m, dimension)), int(bins))
        assert -1e-12 <= value < 20


def test_histograms_see_nothing_finer_than_a_cell_and_nothing_beyond_the_grid():
    limits = (np.zeros(2), np.ones(2))
    real = np.array([[0.01, 0.01], [0.99, 0.99]])
    generated = np.array([[0.09, 0.05], [0.91, 1.0]])
    assert histogram_kl(real, generated, 10, limits) == 0
    assert histogram_kl(real, 1e6 * (generated - 0.5), 10, limits) == 0
    assert histogram_kl(real, generated, 100, limits) > 0


def test_the_grid_is_that_of_the_real_points():
    real, generated = normal(0, 50), 3 * normal(1, 50)
    limits = (real.min(axis=0), real.max(axis=0))
    assert histogram_kl(real, generated) == histogram_kl(real, generated, 50, limits)
    assert histogram_kl(real, generated) == histogram_kl(real, generated, 50, tuple(limit.tolist() for limit in limits))


def test_histograms_of_many_points_have_the_divergence_of_their_cells():
    """A left half with 3/4 of the points, against one with 1/4."""
    rng = np.random.default_rng(0)
    real = rng.uniform(size=(200_000, 1)) + (rng.uniform(size=(200_000, 1)) < 0.25)
    generated = rng.uniform(size=(200_000, 1)) + (rng.uniform(size=(200_000, 1)) < 0.75)
    value = histogram_kl(real, generated, 4, (np.array([0]), np.array([2])))
    assert value == pytest.approx(0.75 * math.log2(3) - 0.25 * math.log2(3), abs=0.02)


@cases(("bins", "dimension", "most"), [(0, 2, 3162), (-1, 1, 10**7), (3163, 2, 3162), (10**7 + 1, 1, 10**7), (216, 3, 215)])
def test_numbers_of_cells_that_cannot_be_are_told(bins, dimension, most):
    with pytest.raises(ValueError, match=rf"bins={bins}: must be a whole number in \[1, {most}\]"):
        histogram_kl(normal(0, 20, dimension), normal(1, 20, dimension), bins)


def test_as_many_cells_as_are_offered_are_taken():
    assert math.isfinite(histogram_kl(normal(0, 20), normal(1, 20), 3162))


@cases(
    "limits",
    [
        (np.array([3, 3]), np.array([-3, -3])),
        (np.array([math.nan, -3]), np.array([3, 3])),
        (np.array([-3, -3]), np.array([math.inf, 3])),
        (np.array([-3, -3, -3]), np.array([3, 3, 3])),
    ],
    ids=["swapped", "nan", "inf", "three"],
)
def test_limits_that_are_no_grid_are_told(limits):
    with pytest.raises(ValueError, match="limits"):
        histogram_kl(normal(0, 20), normal(1, 20), limits=limits)


# --- energy distance and MMD -----------------------------------------------------------------------------------------

SIZES = cases(("n", "m", "dimension"), [(2, 2, 1), (7, 7, 2), (9, 4, 3), (3, 20, 2), (15, 16, 5)])


@SIZES
def test_the_energy_distance_is_the_formula(n, m, dimension):
    first, second = normal(n, n, dimension), 2 * normal(m, m, dimension) + 1
    expected = 2 * all_distances(first, second).mean()
    expected -= all_distances(first, first).mean() + all_distances(second, second).mean()
    assert energy_distance(first, second) == pytest.approx(expected, abs=1e-12)
    assert energy_distance(second, first) == pytest.approx(expected, abs=1e-12)


@SIZES
@cases("bandwidth", [None, 0.3, 2])
def test_the_mmd_is_the_formula(n, m, dimension, bandwidth):
    first, second = normal(n, n, dimension), 2 * normal(m, m, dimension) + 1
    pairs = [math.dist(x, y) for x, y in itertools.combinations(first, 2)]
    h = np.median(pairs) if bandwidth is None else bandwidth
    value = sum(
        np.mean([math.exp(-(math.dist(x, y) ** 2) / (2 * h**2)) for x, y in itertools.permutations(points, 2)])
        for points in (first, second)
    )
    value -= 2 * np.mean([math.exp(-(math.dist(x, y) ** 2) / (2 * h**2)) for x in first for y in second])
    assert squared_mmd(first, second, bandwidth) == pytest.approx(value, abs=1e-12)
    if bandwidth is not None:
        assert squared_mmd(second, first, bandwidth) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("distance", [0.5, 3, 1e6])
def test_point_masses_are_twice_their_distance_apart(distance):
    direction = np.array([0.6, 0.8])
    first, second = np.ones((5, 2)), np.ones((3, 2)) + distance * direction
    assert energy_distance(first, second) == pytest.approx(2 * distance, rel=1e-9)
    assert exact_wasserstein(first[:3], second) == pytest.approx(distance, rel=1e-9)


def test_sets_without_overlap_have_the_largest_mmd():
    first, second = np.zeros((5, 2)), np.full((4, 2), 100.0)
    assert squared_mmd(first, second, 1.0) == pytest.approx(2, abs=1e-12)
    near = squared_mmd(normal(0, 50), 1e4 + normal(1, 60), 1.0)
    within = [squared_mmd(normal(seed, n), 1e4 + np.array([[0, 0], [0, 1e3]]), 1.0) for seed, n in ((0, 50), (1, 60))]
    assert near == pytest.approx(sum(within), abs=1e-12)


def test_the_energy_distance_of_equal_sets_is_0():
    points = normal(0, 50, 3)
    assert energy_distance(points, points.copy()) == 0
    assert energy_distance(np.repeat(points, 3, axis=0), points) == pytest.approx(0, abs=1e-12)


def test_the_energy_distance_of_reordered_sets_is_not_negative():
    rng = np.random.default_rng(0)
    values = [energy_distance(points := rng.normal(size=(7, 2)), rng.permutation(points)) for _ in range(100)]
    assert max(values) < 1e-12
    assert min(values) >= 0


def mean_and_error(values):
    return np.mean(values), np.std(values, ddof=1) / math.sqrt(len(values))


@cases(("n", "m", "shift", "scale"), [(5, 5, 0, 1), (4, 9, 0, 1), (6, 3, 1.5, 1), (5, 8, 0.5, 2)])
def test_the_mean_of_energy_distances_of_small_sets(n, m, shift, scale):
    """Normal numbers in one dimension; pairs of a point with itself make it too large by a known amount."""

    def mean_distance(mean, variance):
        return scipy.stats.foldnorm.mean(mean / math.sqrt(variance), scale=math.sqrt(variance))

    rng = np.random.default_rng(0)
    values = [energy_distance(rng.normal(size=(n, 1)), shift + scale * rng.normal(size=(m, 1))) for _ in range(1500)]
    expected = 2 * mean_distance(shift, 1 + scale**2)
    expected -= (n - 1) / n * mean_distance(0, 2) + (m - 1) / m * mean_distance(0, 2 * scale**2)
    if (n, shift, scale) == (m, 0, 1):
        assert expected == pytest.approx(2 * (2 / math.sqrt(math.pi)) / n)  # 2 E|X - X'| / n
    mean, error = mean_and_error(values)
    assert error < 0.05
    assert mean == pytest.approx(expected, abs=4 * error)


@cases(("n", "m", "shift", "scale", "dimension"), [(2, 2, 0, 1, 2), (4, 7, 0, 1, 1), (3, 2, 1.5, 1, 2), (6, 5, 0.5, 2, 3)])
def test_the_mmd_of_small_sets_has_no_bias(n, m, shift, scale, dimension):
    """The mean over draws is that of the distributions, which Gaussians have in closed form: 0 for equal ones."""
    h = 1.3

    def mean_kernel(mean, variance):
        total = h**2 + variance
        return (h**2 / total) ** (dimension / 2) * math.exp(-dimension * mean**2 / (2 * total))

    rng = np.random.default_rng(0)
    draws = [(rng.normal(size=(n, dimension)), shift + scale * rng.normal(size=(m, dimension))) for _ in range(1500)]
    mean, error = mean_and_error([squared_mmd(first, second, h) for first, second in draws])
    expected = mean_kernel(0, 2) + mean_kernel(0, 2 * scale**2) - 2 * mean_kernel(shift, 1 + scale**2)
    assert error < 0.03
    assert mean == pytest.approx(expected, abs=4 * error)


def test_the_mmd_does_not_see_a_common_shift_rotation_and_scale():
    first, second = normal(0, 40), 1 + normal(1, 30)
    rotation = np.linalg.qr(normal(2, 2))[0]
    moved = [1e3 * points @ rotation - 77 for points in (first, second)]
    assert squared_mmd(*moved) == pytest.approx(squared_mmd(first, second), abs=1e-9)
    assert energy_distance(*moved) == pytest.approx(1e3 * energy_distance(first, second), rel=1e-9)


@cases("num", [10, 1999, 2000, 2001, 3000, 3999, 4000, 5001])
def test_the_width_of_the_kernel_is_that_of_the_whole_set(num):
    """Evenly spaced points in order: half of the pairs are less than 1 - 1 / sqrt(2) apart."""
    points = np.linspace(0, 1, num)[:, None]
    assert median_bandwidth(points) == pytest.approx(1 - 1 / math.sqrt(2), abs=0.06 if num == 10 else 0.01)


def test_the_width_of_the_kernel_is_of_distances_that_are_none():
    assert median_bandwidth(np.ones((1, 2))) == median_bandwidth(np.ones((9, 2))) == 1
    assert median_bandwidth(np.array([[0, 0], [3, 4]])) == 5


@cases("bandwidth", [0, -1.0, math.nan, math.inf])
def test_a_bandwidth_that_is_none_is_told(bandwidth):
    with pytest.raises(ValueError, match=f"bandwidth(=| must be .*){bandwidth}"):
        squared_mmd(normal(0, 5), normal(1, 5), bandwidth)


def test_equal_points_have_a_width_by_definition():
    assert 0 < squared_mmd(np.ones((5, 2)), normal(1, 5)) <= 2
    assert squared_mmd(np.ones((5, 2)), np.ones((7, 2))) == 0


@cases(("bandwidth", "expected"), [(1e-170, 0), (1e170, 0), (1e-100, 0), (1e100, 0)])
def test_a_bandwidth_may_be_any_number_above_0(bandwidth, expected):
    """A narrow one sees points in nothing but themselves, a wide one sees no difference."""
    assert squared_mmd(normal(0, 5), normal(1, 5), bandwidth) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("n", "m"), [(1, 5), (5, 1)])
def test_the_mmd_takes_two_points_at_least(n, m):
    with pytest.raises(ValueError, match=r"shape \(1, 2\).*at least 2 points"):
        squared_mmd(normal(0, n), normal(1, m), 1.0)


@cases("pairs", [1, 7, 50, 61, 10**9])
def test_parts_at_a_time_give_the_same(monkeypatch, pairs):
    first, second = normal(0, 40), normal(1, 25)
    expected = energy_distance(first, second), squared_mmd(first, second)
    monkeypatch.setattr(distances, "_BLOCK_PAIRS", pairs)
    assert (energy_distance(first, second), squared_mmd(first, second)) == pytest.approx(expected, abs=1e-12)


# --- Wasserstein distances -------------------------------------------------------------------------------------------


def line_distance(first, second):
    """The square of W_2 of numbers, by repeating them until there are as many."""
    size = math.lcm(len(first), len(second))
    repeated = [np.sort(np.repeat(numbers, size // len(numbers))) for numbers in (first, second)]
    return (np.abs(repeated[0] - repeated[1]) ** 2).mean()


@cases(("n", "m"), [(1, 1), (1, 6), (7, 7), (6, 4), (49, 50), (97, 89), (3, 300)])
def test_the_sliced_distance_of_numbers_is_exact(n, m):
    first, second = normal(n, n, 1), 2 * normal(m + 1000, m, 1) + 1
    value = sliced_wasserstein(first, second, num_projections=3)
    assert value == pytest.approx(math.sqrt(line_distance(first[:, 0], second[:, 0])), rel=1e-10)


@cases(("n", "m", "num"), [(8, 8, 1), (8, 8, 16), (12, 9, 5), (5, 30, 128)])
def test_the_sliced_distance_of_planes_is_the_mean_over_half_a_turn(n, m, num):
    first, second = normal(n, n), 2 * normal(m + 1000, m) + 1
    angles = [(i + 0.5) / num * math.pi for i in range(num)]
    powers = [line_distance(*((points * [math.cos(a), math.sin(a)]).sum(1) for points in (first, second))) for a in angles]
    assert sliced_wasserstein(first, second, num) == pytest.approx(math.sqrt(np.mean(powers)), rel=1e-10)


@cases("dimension", [1, 2, 3])
def test_a_translate_is_as_far_as_it_was_moved(dimension):
    points, vector = normal(0, 40, dimension), 2 * normal(1, 1, dimension)[0]
    moved = np.random.default_rng(3).permutation(points + vector)
    assert exact_wasserstein(points, moved) == pytest.approx(np.linalg.norm(vector), rel=1e-9)


@cases("num", [2, 3, 128, 129])
def test_the_sliced_distance_of_a_translate_in_the_plane(num):
    """The squares of cosines have a mean of one half over evenly spread directions."""
    vector = np.array([1.2, -0.7])
    points = normal(0, 30)
    value = sliced_wasserstein(points, points[::-1] + vector, num_projections=num)
    assert value == pytest.approx(np.linalg.norm(vector) / math.sqrt(2), rel=1e-9)


@pytest.mark.parametrize("dimension", [3, 5])
def test_the_sliced_distance_of_a_translate_in_space(dimension):
    points, vector = normal(0, 10, dimension), normal(1, 1, dimension)[0]
    value = sliced_wasserstein(points, points + vector, num_projections=5000)
    assert value == pytest.approx(np.linalg.norm(vector) / math.sqrt(dimension), rel=0.03)
    assert value == sliced_wasserstein(points, points + vector, num_projections=5000, seed=0)
    assert value != sliced_wasserstein(points, points + vector, num_projections=5000, seed=1)


@cases(("mean", "scale"), [(0, 1), (2, 1), (0, 3), (-1, 0.5)])
def test_the_distance_of_gaussian_numbers(mean, scale):
    first, second = normal(0, 20_000, 1), mean + scale * normal(1, 15_000, 1)
    expected = math.hypot(mean, scale - 1)
    assert sliced_wasserstein(first, second, num_projections=1) == pytest.approx(expected, abs=0.05)


@cases("dimension", [1, 2, 3])
def test_the_exact_distance_is_that_of_the_best_assignment(dimension):
    for num in (1, 2, 6):
        first, second = normal(num, num, dimension), 2 * normal(num + 50, num, dimension)
        costs = all_distances(first, second) ** 2
        best = min(np.mean([costs[i, j] for i, j in enumerate(order)]) for order in itertools.permutations(range(num)))
        assert exact_wasserstein(first, second) == pytest.approx(math.sqrt(best), rel=1e-10)
        assert exact_wasserstein(second, first) == pytest.approx(math.sqrt(best), rel=1e-10)


def test_the_exact_distance_of_numbers_is_that_in_order():
    first, second = normal(0, 80, 1), 2 * normal(1, 80, 1)
    assert exact_wasserstein(first, second) == pytest.approx(sliced_wasserstein(first, second), rel=1e-10)


def test_the_sliced_distance_is_symmetric_and_less_than_the_exact_one():
    first, second = normal(0, 60), 1 + 2 * normal(1, 60)
    value = sliced_wasserstein(first, second)
    assert 0 < value < exact_wasserstein(first, second)
    assert value == pytest.approx(sliced_wasserstein(second, first), rel=1e-12)


@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_equal_sets_have_no_distance(dimension):
    points = normal(0, 50, dimension)
    assert sliced_wasserstein(points, points.copy()) == 0
    assert exact_wasserstein(points, points.copy()) == 0
    assert sliced_wasserstein(points, points[::-1]) == pytest.approx(0, abs=1e-12)
    assert exact_wasserstein(points, points[::-1]) == pytest.approx(0, abs=1e-12)
    assert sliced_wasserstein(points, np.repeat(points, 7, axis=0)) == pytest.approx(0, abs=1e-12)


@cases("distance", [sliced_wasserstein, exact_wasserstein])
@cases("scale", [1e-3, 10])
def test_distances_grow_with_the_scale(distance, scale):
    first, second = normal(0, 20), 1 + normal(1, 20)
    assert distance(scale * first, scale * second) == pytest.approx(scale * distance(first, second), rel=1e-6)


@pytest.mark.parametrize("num", [0, -4])
def test_a_number_of_directions_that_is_none_is_told(num):
    with pytest.raises(ValueError, match=f"num_projections={num}: must be a whole number"):
        sliced_wasserstein(normal(0, 5), normal(1, 5), num_projections=num)


@pytest.mark.parametrize(("n", "m"), [(5, 6), (5001, 5001)])
def test_sizes_that_have_no_assignment_are_told(n, m):
    with pytest.raises(ValueError, match=f"5000 at most; got {n} and {m}"):
        exact_wasserstein(normal(0, n), normal(1, m))


# --- density and coverage --------------------------------------------------------------------------------------------


@cases(("n", "m", "k"), [(2, 1, 1), (20, 20, 5), (20, 7, 3), (8, 60, 7)])
@cases("dimension", [1, 2, 4])
def test_density_and_coverage_are_the_formulas(n, m, k, dimension):
    real, generated = normal(n, n, dimension), 1.5 * normal(m + 1000, m, dimension)
    inside = all_distances(real, generated) <= ball_radii(real, k)[:, None]
    expected = inside.sum() / (k * m), inside.any(axis=1).mean()
    assert density_and_coverage(real, generated, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("n", "m", "k"), [(20, 20, 5), (30, 10, 2), (10, 40, 1)])
def test_density_and_coverage_of_one_distribution(n, m, k):
    """Density is 1 on average; a ball is missed where all m come after the k-th of the n - 1 others."""
    values = np.array([density_and_coverage(normal(s, n), normal(s + 10_000, m), k) for s in range(300)])
    missed = math.prod((n - 1 - i) / (n + m - 1 - i) for i in range(k))
    for column, expected in zip(values.T, (1, 1 - missed), strict=True):
        mean, error = mean_and_error(column)
        assert error < 0.03
        assert mean == pytest.approx(expected, abs=4 * error)


def test_a_ball_holds_the_neighbour_that_it_reaches_to():
    """So a copy of the real points is in k + 1 balls each on average, however distances are rounded."""
    for seed in range(5):
        real = normal(seed, 100)
        assert density_and_coverage(real, real.copy()) == pytest.approx((6 / 5, 1), abs=1e-12)


def test_samples_of_a_peak_cover_little():
    """Density is the integral of their density where balls are small, so it is 1 for them too."""
    real = normal(0, 5000)
    density, coverage = density_and_coverage(real, 0.5 * normal(1, 5000))
    assert density == pytest.approx(1, abs=0.05)
    assert coverage < 0.7
    assert density_and_coverage(real, 0.01 * normal(2, 5000))[1] < 0.01
    assert density_and_coverage(real, real + 100) == (0, 0)


def test_repeated_real_points_have_balls_that_hold_what_is_the_same():
    real = np.repeat([[0.0, 0.0], [1.0, 0.0]], 6, axis=0)
    assert density_and_coverage(real, np.array([[0.0, 0.0]])) == (6 / 5, 0.5)
    assert density_and_coverage(real, np.array([[1e-8, 0.0]])) == (6 / 5, 0.5)
    assert density_and_coverage(real, np.array([[1e-4, 0.0]])) == (0, 0)


@cases("k", [0, 10, -1, 2.5])
def test_a_ball_without_a_neighbour_is_told(k):
    with pytest.raises(
        ValueError,
        match=rf"k={k}: must be .*\[1, 9\], got {k}. Hint: there are 10 real points|must be a whole number, got {k}",
    ):
        density_and_coverage(normal(0, 10), normal(1, 20), k)


# --- densities of models ---------------------------------------------------------------------------------------------

PREDICTION_TYPES = ["epsilon", "sample", "v_prediction"]
BETA_SCHEDULES = ["linear", "squaredcos_cap_v2"]
every_prediction = cases("prediction_type", PREDICTION_TYPES)
every_schedule = cases("beta_schedule", BETA_SCHEDULES)


def make_scheduler(beta_schedule="squaredcos_cap_v2", prediction_type="epsilon", timesteps=1000):
    return DDPMScheduler(timesteps, beta_schedule=beta_schedule, prediction_type=prediction_type)


def log_noise_levels(scheduler):
    alphas = scheduler.alphas_cumprod.double().numpy()
    return np.log((1 - alphas) / alphas) / 2


class OptimalModel:
    """What a perfect model of a mixture of Gaussians predicts; between timesteps it interpolates the log of sigma."""

    def __init__(self, scheduler, means, scales, dtype=torch.float64):
        self.dtype, self.scheduler = dtype, scheduler
        self.means, self.variances = torch.tensor(means, dtype=dtype), torch.tensor(scales, dtype=dtype) ** 2
        self.levels, self.calls = log_noise_levels(scheduler), []

    def __call__(self, noisy, timesteps):
        assert noisy.dtype == self.dtype
        assert timesteps.shape == (len(noisy),)
        assert (timesteps >= 0).all()
        assert (timesteps <= len(self.levels) - 1).all()
        self.calls.append((len(noisy), float(timesteps[0])))
        sigma = torch.from_numpy(np.exp(np.interp(timesteps.double().numpy(), np.arange(len(self.levels)), self.levels)))[
            :, None
        ]
        sigma = sigma.to(self.dtype)
        scaled = noisy * (1 + sigma**2).sqrt()
        variances = self.variances + sigma**2
        offsets = scaled[:, None] - self.means
        shares = torch.softmax(-(offsets**2 / variances[:, None]).sum(-1) / 2, dim=1)[..., None]
        noise = sigma * (shares * offsets).sum(1) / variances
        points = scaled - sigma * noise
        prediction = {
            "epsilon": noise,
            "sample": points,
            "v_prediction": (noise - sigma * points) / (1 + sigma**2).sqrt(),
        }[self.scheduler.config.prediction_type]
        return SimpleNamespace(sample=prediction)


def pushed_gaussian(levels, mean, scales):
    """Mean and standard deviation of what the exact ODE makes of N(0, 1 + sigma ** 2) at the last level."""
    first, last = np.exp(levels[0]), np.exp(levels[-1])
    shrink = np.sqrt((np.square(scales) + first**2) / (np.square(scales) + last**2))
    return np.asarray(mean) * (1 - shrink), shrink * math.sqrt(1 + last**2)


WIDE_GAUSSIAN = ([0.0, 0.0], [2.0, 2.0])
GAUSSIANS = [([0.0], [1.0]), ([1.5], [0.3]), ([0.7, -1.2], [0.5, 2.0]), ([0.0, 0.4, -3.0], [1.0, 0.1, 0.6])]


def log_likelihoods(beta_schedule, prediction_type, mean, scales, steps, timesteps=1000):
    """Of a perfect model of a Gaussian by the ODE in so many steps, one row each; and the exact ones."""
    scheduler = make_scheduler(beta_schedule, prediction_type, timesteps)
    model = OptimalModel(scheduler, [mean], scales)
    points = mean + 1.5 * normal(0, 50, len(mean)) * scales
    pushed_mean, pushed_scales = pushed_gaussian(model.levels, mean, scales)
    exact = scipy.stats.norm.logpdf(points, pushed_mean, pushed_scales).sum(axis=1)
    # What the model was made for, but for the first and the last noise, which are less in 100 timesteps.
    assert timesteps < 1000 or np.abs(exact - scipy.stats.norm.logpdf(points, mean, scales).sum(axis=1)).max() < 0.3
    logs = [log_likelihood(model, DDPM(scheduler), torch.from_numpy(points), num_steps) for num_steps in steps]
    assert all(values.shape == (50,) and values.dtype == torch.float64 for values in logs)
    return torch.stack(logs).numpy(), exact


@pytest.mark.slow
@every_prediction
@every_schedule
@cases(("mean", "scales"), [GAUSSIANS[1], GAUSSIANS[3]])
def test_the_density_is_that_of_the_pushed_gaussian(mean, scales, prediction_type, beta_schedule):
    (logs,), exact = log_likelihoods(beta_schedule, prediction_type, mean, scales, [200])
    np.testing.assert_allclose(logs, exact, atol=1e-4)


def test_points_start_as_standard_normal_ones_where_signal_is_left():
    """At the last level of this schedule the noise has but 1.4 times the size of the signal."""
    scheduler = DDPMScheduler(1000, beta_end=0.002)
    model = OptimalModel(scheduler, [[0.7, -1.2]], [0.5, 2.0])
    assert math.exp(model.levels[-1]) == pytest.approx(1.4, abs=0.1)
    points = normal(0, 50)
    pushed_mean, pushed_scales = pushed_gaussian(model.levels, [0.7, -1.2], [0.5, 2.0])
    exact = scipy.stats.norm.logpdf(points, pushed_mean, pushed_scales).sum(axis=1)
    np.testing.assert_allclose(log_likelihood(model, DDPM(scheduler), torch.from_numpy(points), 200), exact, atol=3e-3)


@cases("timesteps", [100, 1000])
@every_schedule
@cases(("mean", "scales"), [*GAUSSIANS, WIDE_GAUSSIAN])
def test_the_default_number_of_steps_is_enough(mean, scales, beta_schedule, timesteps):
    """The mean, which is in the divergence of the model, is right to a thousandth of a nat."""
    (logs,), exact = log_likelihoods(beta_schedule, "epsilon", mean, scales, [NUM_STEPS], timesteps)
    assert logs.mean() == pytest.approx(exact.mean(), abs=1e-3)


@every_schedule
def test_twice_the_steps_have_a_sixteenth_of_the_error(beta_schedule):
    logs, exact = log_likelihoods(beta_schedule, "v_prediction", *GAUSSIANS[2], [40, 80], 1000)
    errors = np.abs(logs - exact).mean(axis=1)
    assert errors[0] / errors[1] == pytest.approx(16, rel=0.4)


@cases("num_steps", [10, 20, NUM_STEPS])
@every_schedule
def test_the_error_of_the_divergence_covers_the_bias_of_the_steps(beta_schedule, num_steps):
    """A perfect model of the data leaves next to no spread of the points: nearly all of the error is the bias."""
    (of_model, half_steps), exact = log_likelihoods(beta_schedule, "epsilon", *GAUSSIANS[1], [num_steps, num_steps // 2])
    mean, error = exact_kl(exact, of_model, half_steps[:20])
    assert abs(mean) < 2 * error
    _, error_of_points = exact_kl(exact, of_model)
    assert error >= error_of_points


def test_noise_of_the_steps_is_not_taken_for_a_bias():
    """What halving the steps changes by chance, with a mean of 0, is in the spread of the points."""
    rows = list(np.random.default_rng(0).normal(size=(200, 3, 1000)))
    alone = np.mean([exact_kl(data, model)[1] for data, model, _ in rows])
    together, shifted = (
        np.mean([exact_kl(data, model, (model + chance + shift)[:250])[1] for data, model, chance in rows])
        for shift in (0, 1)
    )
    assert together < 1.4 * alone
    assert shifted == pytest.approx(math.log2(math.e), rel=0.01)


MIXTURE = np.array([[-2.0, 0.0], [1.0, 1.5], [1.0, -1.5]])


@every_prediction
def test_the_density_of_a_mixture(prediction_type):
    """A perfect model gives back the density of the data with the noise of the first timestep."""
    scheduler = make_scheduler("squaredcos_cap_v2", prediction_type)
    model = OptimalModel(scheduler, MIXTURE.tolist(), [0.4, 0.6])
    rng = np.random.default_rng(0)
    points = MIXTURE[rng.integers(3, size=40)] + rng.normal(size=(40, 2)) * [0.4, 0.6]
    scales = np.hypot([0.4, 0.6], math.exp(model.levels[0]))
    logs = log_likelihood(model, DDPM(scheduler), torch.from_numpy(points), 100).numpy()
    np.testing.assert_allclose(logs, mixture_log_prob(points, MIXTURE, scales), atol=0.01)


class Network(torch.nn.Module):
    """Smooth and arbitrary: knows nothing of any data."""

    def __init__(self, dimension, seed=0, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = [(dimension + 1, 16), (16, dimension)]
        self.weights = torch.nn.ParameterList(torch.randn(s, generator=generator).to(dtype) / 2 for s in shapes)

    @property
    def dtype(self):
        return self.weights[0].dtype

    def forward(self, noisy, timesteps):
        inputs = torch.cat([noisy, timesteps.to(noisy)[:, None] / 1000], dim=1)
        return SimpleNamespace(sample=torch.tanh(inputs @ self.weights[0]) @ self.weights[1])


@pytest.mark.parametrize(("prediction_type", "width"), [("epsilon", 900), ("v_prediction", 12)])
def test_the_density_of_any_network_integrates_to_1(prediction_type, width):
    """Nothing but the flow makes it so. A network that predicts little noise leaves points as wide as the last level."""
    points = torch.linspace(-width, width, 4001, dtype=torch.float64)[:, None]
    logs = log_likelihood(Network(1), DDPM(make_scheduler("linear", prediction_type)), points, 200)
    assert torch.trapezoid(logs.exp(), points[:, 0]).item() == pytest.approx(1, abs=0.01)


@every_schedule
def test_the_density_of_a_mixture_integrates_to_1(beta_schedule):
    scheduler = make_scheduler(beta_schedule)
    model = OptimalModel(scheduler, MIXTURE.tolist(), [0.4, 0.6])
    axis = np.linspace(-5, 5, 51)
    grid = torch.from_numpy(np.array(list(itertools.product(axis, axis))))
    total = log_likelihood(model, DDPM(scheduler), grid).exp().sum().item() * (axis[1] - axis[0]) ** 2
    assert total == pytest.approx(1, abs=0.03)


@every_prediction
@cases("dimension", [1, 2, 4])
def test_the_divergence_is_that_of_finite_differences(dimension, prediction_type):
    predict = _NoisePrediction(Network(dimension), DDPM(make_scheduler(prediction_type=prediction_type)))
    points, width = torch.from_numpy(2 * normal(0, 6, dimension)), 1e-5
    for log_sigma in (-2.0, 0.0, 1.7):
        value, divergence = predict.with_divergence(points, log_sigma)
        torch.testing.assert_close(value, predict(points, log_sigma).detach(), rtol=0, atol=0)
        assert not value.requires_grad
        expected = torch.zeros(6, dtype=torch.float64)
        for axis in range(dimension):
            step = width * torch.eye(dimension, dtype=torch.float64)[axis]
            change = predict(points + step, log_sigma) - predict(points - step, log_sigma)
            expected += change.detach()[:, axis] / (2 * width)
        torch.testing.assert_close(divergence, expected, rtol=1e-6, atol=1e-7)


@every_prediction
@every_schedule
def test_timesteps_are_those_of_the_noise(prediction_type, beta_schedule):
    scheduler = make_scheduler(beta_schedule, prediction_type)
    seen = []

    class Model:
        dtype = torch.float64

        def __call__(self, noisy, timesteps):
            seen.append((noisy, timesteps))
            return SimpleNamespace(sample=noisy)

    predict = _NoisePrediction(Model(), DDPM(scheduler))
    points = torch.from_numpy(normal(0, 5))
    for timestep in (0, 1, 500, 998, 999):
        alpha = scheduler.alphas_cumprod[timestep].double()
        predict(points, float(log_noise_levels(scheduler)[timestep]))
        torch.testing.assert_close(seen[-1][1], torch.full((5,), float(timestep)), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(seen[-1][0], alpha.sqrt() * points, rtol=1e-9, atol=0)


@cases("batch_size", [1, 2, 6, 7, 100])
def test_the_batch_size_does_not_matter(batch_size):
    scheduler = make_scheduler()
    points = torch.from_numpy(normal(0, 7))
    expected = log_likelihood(Network(2), DDPM(scheduler), points, 10)
    model = OptimalModel(scheduler, [[0.0, 0.0]], [1.0, 1.0])
    torch.testing.assert_close(
        log_likelihood(Network(2), DDPM(scheduler), points, 10, batch_size), expected, rtol=1e-10, atol=1e-10
    )
    log_likelihood(model, DDPM(scheduler), points, 3, batch_size)
    assert max(size for size, _ in model.calls) == min(batch_size, 7)


def test_likelihoods_in_float32_are_near_and_leave_no_trace():
    scheduler = make_scheduler()
    points = torch.from_numpy(normal(0, 20)).float()
    double, single = Network(2), Network(2).to(torch.float32)
    with torch.no_grad():
        logs = log_likelihood(single, DDPM(scheduler), points, 50)
    assert not logs.requires_grad
    assert logs.dtype == torch.float64
    assert not points.requires_grad
    assert all(weight.grad is None for weight in single.weights)
    torch.testing.assert_close(logs, log_likelihood(double, DDPM(scheduler), points.double(), 50), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_steps", [0, -1])
def test_a_number_of_steps_that_is_none_is_told(num_steps):
    with pytest.raises(ValueError, match=f"num_steps={num_steps}"):
        log_likelihood(Network(2), DDPM(make_scheduler()), torch.zeros(3, 2), num_steps)


def test_a_schedule_of_a_single_noise_level_is_refused():
    with pytest.raises(ValueError, match="noise level of all timesteps .1. is the same"):
        log_likelihood(Network(2), DDPM(DDPMScheduler(1)), torch.zeros(3, 2))


def test_a_prediction_that_is_not_known_is_told():
    with pytest.raises(ValueError, match="flow_prediction"):
        log_likelihood(Network(2), DDPM(make_scheduler(prediction_type="flow_prediction")), torch.zeros(3, 2), 5)


def test_the_exact_divergence_is_a_mean_with_its_error():
    of_data, of_model = np.random.default_rng(0).normal(size=(2, 50))
    mean, error = exact_kl(of_data, of_model)
    differences = [(x - y) / math.log(2) for x, y in zip(of_data, of_model, strict=True)]
    expected = sum(differences) / 50
    assert mean == pytest.approx(expected, rel=1e-12)
    assert error == pytest.approx(math.sqrt(sum((d - expected) ** 2 for d in differences) / 49 / 50), rel=1e-12)
    assert exact_kl(of_data, of_data) == (0, 0)
    assert exact_kl(of_model, of_data)[0] == -mean


def test_the_exact_divergence_of_gaussians_is_within_its_error():
    """The mean is near the closed form, and the spread over draws is what is told."""
    expected = gaussian_kl([0, 1], [1, 0.5], [0.5, 1], [1.5, 1])
    values = []
    for seed in range(200):
        points = normal(seed, 300) * [1, 0.5] + [0, 1]
        of_data = mixture_log_prob(points, np.array([[0, 1]]), np.array([1, 0.5]))
        of_model = mixture_log_prob(points, np.array([[0.5, 1]]), np.array([1.5, 1]))
        values.append(exact_kl(of_data, of_model))
    means, errors = np.array(values).T
    assert means.mean() == pytest.approx(expected, abs=4 * means.std() / math.sqrt(200))
    assert errors.mean() == pytest.approx(means.std(), rel=0.2)


def test_the_exact_divergence_of_a_model_is_that_of_what_it_makes():
    scheduler = make_scheduler()
    model = OptimalModel(scheduler, [[0.5, -1.0]], [1.5, 0.7])
    points = normal(0, 2000) * 0.8
    of_model = log_likelihood(model, DDPM(scheduler), torch.from_numpy(points), 100).numpy()
    mean, error = exact_kl(mixture_log_prob(points, np.zeros((1, 2)), np.array([0.8, 0.8])), of_model)
    assert error < 0.1
    expected = gaussian_kl([0, 0], [0.8, 0.8], *pushed_gaussian(model.levels, [0.5, -1.0], [1.5, 0.7]))
    assert mean == pytest.approx(expected, abs=4 * error + 0.01)


@cases(
    ("first", "second"),
    [((5,), (6,)), ((1,), (1,)), ((0,), (0,)), ((5, 1), (5, 1)), ((5,), (5, 1)), ((), ())],
)
def test_densities_that_do_not_match_are_told(first, second):
    with pytest.raises(ValueError) as told:  # noqa: PT011
        exact_kl(np.zeros(first), np.zeros(second))
    assert f"{first} and {second}" in str(told.value)


# --- all figures -----------------------------------------------------------------------------------------------------


@cases(
    ("num_real", "num_generated", "dimension", "missing"),
    [
        (5, 100, 2, set(POINT_METRICS)),
        (100, 5, 2, set(POINT_METRICS)),
        (1, 1, 2, set(POINT_METRICS)),
        (0, 10, 2, set(POINT_METRICS)),
        (6, 6, 2, set()),
        (6, 50, 1, set()),
        (50, 6, 2, set()),
        (50, 6, 3, {"histogram_kl"}),
        (20, 20, 7, {"histogram_kl"}),
    ],
)
def test_metrics_are_those_that_the_numbers_allow(num_real, num_generated, dimension, missing):
    results = compare_samples(normal(0, num_real, dimension), normal(1, num_generated, dimension))
    assert list(results) == [name for name in POINT_METRICS if name not in missing]
    assert np.isfinite([*results.values()]).all()


@pytest.mark.parametrize(("num_real", "num_generated"), [(40, 40), (60, 25), (25, 60)])
def test_metrics_are_those_that_one_would_compute(num_real, num_generated):
    """The number of real points is that of generated ones where that matters."""
    real, generated = normal(0, num_real), 1 + normal(1, num_generated)
    both = min(num_real, num_generated)
    density, coverage = density_and_coverage(real[:num_generated], generated, 5)
    assert compare_samples(real, generated) == {
        "kl": knn_kl(real, generated, 5),
        "histogram_kl": histogram_kl(real, generated, 50),
        "energy_distance": energy_distance(real, generated),
        "squared_mmd": squared_mmd(real, generated),
        "sliced_wasserstein": sliced_wasserstein(real, generated),
        "exact_wasserstein": exact_wasserstein(real[:both], generated[:both]),
        "density": density,
        "coverage": coverage,
    }


def test_a_signal_is_no_failure_of_the_metric_that_it_comes_in(monkeypatch, tmp_path):
    """A study stops by it, with its own exit status."""

    def stop(real, generated):
        raise StudyInterrupted(15, tmp_path)

    monkeypatch.setitem(METRICS, "kl", dataclasses.replace(METRICS["kl"], function=stop))
    points = np.random.default_rng(0).normal(size=(20, 2))
    with pytest.raises(StudyInterrupted):
        compare_samples(points, points)


@cases(("num_real", "num_generated"), [(9000, 7000), (6000, 9000), (3000, 1500), (1500, 3000), (10, 20)])
def test_metrics_are_given_the_first_points(monkeypatch, num_real, num_generated):
    def first_rows(real, generated):
        assert (real[:, 0] == np.arange(len(real))).all()
        assert (generated[:, 0] == np.arange(len(generated))).all()
        return len(real) + len(generated) / 100_000

    for name in POINT_METRICS:
        monkeypatch.setitem(METRICS, name, dataclasses.replace(METRICS[name], function=first_rows))
    real, generated = (np.repeat(np.arange(num, dtype=float)[:, None], 2, axis=1) for num in (num_real, num_generated))
    exact = min(num_real, num_generated, 2000)
    sizes = {
        "kl": (num_real, num_generated),
        "histogram_kl": (num_real, num_generated),
        "energy_distance": (min(num_real, 5000), min(num_generated, 5000)),
        "squared_mmd": (min(num_real, 5000), min(num_generated, 5000)),
        "sliced_wasserstein": (num_real, num_generated),
        "exact_wasserstein": (exact, exact),
        "density": (min(num_real, num_generated), num_generated),
        "coverage": (min(num_real, num_generated), num_generated),
    }
    expected = {name: first + second / 100_000 for name, (first, second) in sizes.items()}
    assert compare_samples(real, generated, progress="figures") == expected


def test_generated_points_that_are_all_one_have_figures():
    """A model that collapsed is one to be told apart, not an error."""
    real = normal(0, 100)
    results, held_out = compare_samples(real, np.zeros((100, 2))), compare_samples(real, normal(1, 100))
    assert np.isfinite([*results.values()]).all()
    for name in ("kl", "histogram_kl", "energy_distance", "squared_mmd", "sliced_wasserstein", "exact_wasserstein"):
        assert results[name] > held_out[name]
    assert results["coverage"] < held_out["coverage"]


def test_real_points_that_are_mostly_one_have_other_figures():
    """Their median distance is 0, so there is no width of a kernel; the rest can be told."""
    real = normal(0, 100)
    real[10:] = 1
    results = compare_samples(real, normal(1, 100))
    assert {"kl", "energy_distance", "sliced_wasserstein", "coverage"} <= set(results)


def test_generated_points_that_are_not_finite_are_told():
    with pytest.raises(ValueError, match="Point 4 of the second set"):
        compare_samples(normal(0, 20), with_value(normal(1, 20), 4, math.nan))
