"""Distances between sets of points, against closed forms and slow twins."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from gaussians import gaussian_kl, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tables import rows

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
from diffusers_lrlab.evaluation.metrics import METRICS
from diffusers_lrlab.study.runs.progress import StudyInterrupted

POINT_METRICS = [name for name, metric in METRICS.items() if metric.of == "samples"]


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
@rows("which", [0, 1])
@rows(
    ("change", "part"),
    [
        (lambda points: with_value(points, 3, math.nan), "point 3 [1.0, nan] of the {} set: must be"),
        (lambda points: with_value(points, 7, math.inf), "point 7 [1.0, inf] of the {} set: must be"),
        (lambda points: with_value(points, 0, -math.inf), "point 0 [1.0, -inf] of the {} set: must be"),
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
@rows("scale", [1e155, 1e307])
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


@pytest.mark.slow
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


@rows("dimension", [1, 2, 3, 4])
@rows(("n", "m", "k"), [(2, 1, 1), (6, 5, 5), (30, 11, 3), (12, 50, 11), (40, 40, 5)])
def test_the_neighbour_estimate_is_the_formula(n, m, k, dimension):
    real, generated = normal(n, n, dimension), 2 * normal(m + 100, m, dimension) + 0.3
    assert knn_kl(real, generated, k) == pytest.approx(slow_knn_kl(real, generated, k), abs=1e-10)


def test_five_neighbours_are_the_default():
    real, generated = normal(0, 30), normal(1, 40)
    assert knn_kl(real, generated) == knn_kl(real, generated, k=5)


@rows(
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


@rows(("inner", "outer"), [((1, 1), (2, 2)), ((1, 2), (4, 3)), ((1,), (8,)), ((2, 3), (2, 3))])
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


@rows(
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


@rows(("dimension", "bins"), [(1, 1), (1, 7), (2, 6), (3, 4)])
@rows("limits", [None, 0.7, 9])
def test_the_histogram_estimate_is_the_formula(dimension, bins, limits):
    """Also with points outside the grid, on any side."""
    real, generated = normal(0, 60, dimension), 2 * normal(1, 90, dimension)
    edges = (real.min(axis=0), real.max(axis=0)) if limits is None else np.array([-1.0, 1.1])[:, None] * [limits] * dimension
    edges = [np.broadcast_to(edge, dimension) for edge in edges]
    value = histogram_kl(real, generated, bins, None if limits is None else tuple(edges))
    assert value == pytest.approx(slow_histogram_kl(real, generated, bins, *edges), abs=1e-10)


@rows("same", [np.zeros((20, 2)), np.array([[1.0, 2.0]]), normal(0, 300), normal(1, 300, 1)])
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


@rows(("bins", "dimension", "most"), [(0, 2, 3162), (-1, 1, 10**7), (3163, 2, 3162), (10**7 + 1, 1, 10**7), (216, 3, 215)])
def test_numbers_of_cells_that_cannot_be_are_told(bins, dimension, most):
    with pytest.raises(ValueError, match=rf"bins={bins}: must be a whole number in \[1, {most}\]"):
        histogram_kl(normal(0, 20, dimension), normal(1, 20, dimension), bins)


def test_as_many_cells_as_are_offered_are_taken():
    assert math.isfinite(histogram_kl(normal(0, 20), normal(1, 20), 3162))


@rows(
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

SIZES = rows(("n", "m", "dimension"), [(2, 2, 1), (7, 7, 2), (9, 4, 3), (3, 20, 2), (15, 16, 5)])


@SIZES
def test_the_energy_distance_is_the_formula(n, m, dimension):
    first, second = normal(n, n, dimension), 2 * normal(m, m, dimension) + 1
    expected = 2 * all_distances(first, second).mean()
    expected -= all_distances(first, first).mean() + all_distances(second, second).mean()
    assert energy_distance(first, second) == pytest.approx(expected, abs=1e-12)
    assert energy_distance(second, first) == pytest.approx(expected, abs=1e-12)


@SIZES
@rows("bandwidth", [None, 0.3, 2])
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


@rows(("n", "m", "shift", "scale"), [(5, 5, 0, 1), (4, 9, 0, 1), (6, 3, 1.5, 1), (5, 8, 0.5, 2)])
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


@rows(("n", "m", "shift", "scale", "dimension"), [(2, 2, 0, 1, 2), (4, 7, 0, 1, 1), (3, 2, 1.5, 1, 2), (6, 5, 0.5, 2, 3)])
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


@rows("num", [10, 1999, 2000, 2001, 3000, 3999, 4000, 5001])
def test_the_width_of_the_kernel_is_that_of_the_whole_set(num):
    """Evenly spaced points in order: half of the pairs are less than 1 - 1 / sqrt(2) apart."""
    points = np.linspace(0, 1, num)[:, None]
    assert median_bandwidth(points) == pytest.approx(1 - 1 / math.sqrt(2), abs=0.06 if num == 10 else 0.01)


def test_the_width_of_the_kernel_is_of_distances_that_are_none():
    assert median_bandwidth(np.ones((1, 2))) == median_bandwidth(np.ones((9, 2))) == 1
    assert median_bandwidth(np.array([[0, 0], [3, 4]])) == 5


@rows("bandwidth", [0, -1.0, math.nan, math.inf])
def test_a_bandwidth_that_is_none_is_told(bandwidth):
    with pytest.raises(ValueError, match=f"bandwidth(=| must be .*){bandwidth}"):
        squared_mmd(normal(0, 5), normal(1, 5), bandwidth)


def test_equal_points_have_a_width_by_definition():
    assert 0 < squared_mmd(np.ones((5, 2)), normal(1, 5)) <= 2
    assert squared_mmd(np.ones((5, 2)), np.ones((7, 2))) == 0


@rows(("bandwidth", "expected"), [(1e-170, 0), (1e170, 0), (1e-100, 0), (1e100, 0)])
def test_a_bandwidth_may_be_any_number_above_0(bandwidth, expected):
    """A narrow one sees points in nothing but themselves, a wide one sees no difference."""
    assert squared_mmd(normal(0, 5), normal(1, 5), bandwidth) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("n", "m"), [(1, 5), (5, 1)])
def test_the_mmd_takes_two_points_at_least(n, m):
    with pytest.raises(ValueError, match=r"shape \(1, 2\).*at least 2 points"):
        squared_mmd(normal(0, n), normal(1, m), 1.0)


@rows("pairs", [1, 7, 50, 61, 10**9])
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


@rows(("n", "m"), [(1, 1), (1, 6), (7, 7), (6, 4), (49, 50), (97, 89), (3, 300)])
def test_the_sliced_distance_of_numbers_is_exact(n, m):
    first, second = normal(n, n, 1), 2 * normal(m + 1000, m, 1) + 1
    value = sliced_wasserstein(first, second, num_projections=3)
    assert value == pytest.approx(math.sqrt(line_distance(first[:, 0], second[:, 0])), rel=1e-10)


@rows(("n", "m", "num"), [(8, 8, 1), (8, 8, 16), (12, 9, 5), (5, 30, 128)])
def test_the_sliced_distance_of_planes_is_the_mean_over_half_a_turn(n, m, num):
    first, second = normal(n, n), 2 * normal(m + 1000, m) + 1
    angles = [(i + 0.5) / num * math.pi for i in range(num)]
    powers = [line_distance(*((points * [math.cos(a), math.sin(a)]).sum(1) for points in (first, second))) for a in angles]
    assert sliced_wasserstein(first, second, num) == pytest.approx(math.sqrt(np.mean(powers)), rel=1e-10)


@rows("dimension", [1, 2, 3])
def test_a_translate_is_as_far_as_it_was_moved(dimension):
    points, vector = normal(0, 40, dimension), 2 * normal(1, 1, dimension)[0]
    moved = np.random.default_rng(3).permutation(points + vector)
    assert exact_wasserstein(points, moved) == pytest.approx(np.linalg.norm(vector), rel=1e-9)


@rows("num", [2, 3, 128, 129])
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


@rows(("mean", "scale"), [(0, 1), (2, 1), (0, 3), (-1, 0.5)])
def test_the_distance_of_gaussian_numbers(mean, scale):
    first, second = normal(0, 20_000, 1), mean + scale * normal(1, 15_000, 1)
    expected = math.hypot(mean, scale - 1)
    assert sliced_wasserstein(first, second, num_projections=1) == pytest.approx(expected, abs=0.05)


@rows("dimension", [1, 2, 3])
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


@rows("distance", [sliced_wasserstein, exact_wasserstein])
@rows("scale", [1e-3, 10])
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


@rows(("n", "m", "k"), [(2, 1, 1), (20, 20, 5), (20, 7, 3), (8, 60, 7)])
@rows("dimension", [1, 2, 4])
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


@rows("k", [0, 10, -1, 2.5])
def test_a_ball_without_a_neighbour_is_told(k):
    with pytest.raises(
        ValueError,
        match=rf"k={k}: must be .*\[1, 9\], got {k}. Hint: there are 10 real points|must be a whole number, got {k}",
    ):
        density_and_coverage(normal(0, 10), normal(1, 20), k)


# --- all figures -----------------------------------------------------------------------------------------------------


@rows(
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


@rows(("num_real", "num_generated"), [(9000, 7000), (6000, 9000), (3000, 1500), (1500, 3000), (10, 20)])
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
    with pytest.raises(ValueError, match=r"point 4 \[.*\] of the second set: must be"):
        compare_samples(normal(0, 20), with_value(normal(1, 20), 4, math.nan))
