"""Distances between two sets of points that need no density."""

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist

from ..core.errors import LabError
from ..core.ranges import COUNT, POSITIVE, SEED, Range
from ..core.signatures import checked
from ..core.words import counted
from .kl import as_points, check_neighbour, resolution

MAX_EXACT_POINTS = 5000
_PROJECTIONS = Range("[1, 1e6]", whole=True)
_BLOCK_PAIRS = 4_000_000  # pairs of points at a time: 32 MB


def _mean_of_pairs(first: np.ndarray, second: np.ndarray, value: Callable[[np.ndarray], np.ndarray]) -> float:
    """The mean over all pairs of a function of their distance."""
    size = max(1, _BLOCK_PAIRS // len(second))
    total = sum(float(value(cdist(first[i : i + size], second)).sum()) for i in range(0, len(first), size))
    return total / (len(first) * len(second))


@checked
def energy_distance(first: np.ndarray, second: np.ndarray) -> float:
    r"""
    The energy distance \(2 E|X - Y| - E|X - X'| - E|Y - Y'|\) (Székely and Rizzo 2013), of the sets as they are.

    In the unit of the coordinates. The means are over all pairs, including those of a point with itself (a V-statistic), so
    it is 0 for equal sets and never negative; for two sets of n points of one distribution it is about \(2 E|X - X'| / n\).
    Time grows with the product of the sizes: half a second or so for 10,000 points each.
    """
    first, second = as_points(first, second)
    between = _mean_of_pairs(first, second, lambda distances: distances)
    within = [_mean_of_pairs(points, points, lambda distances: distances) for points in (first, second)]
    return max(0.0, 2 * between - sum(within))  # rounding can make less of it


@checked
def median_bandwidth(points: np.ndarray, num_points: int = 2000) -> float:
    """
    The median distance between some of the points (evenly spread over the array), a usual width of a kernel.

    Distances of 0 do not count; 1 if there are no others.
    """
    COUNT.check("num_points", num_points, "all pairs of these are compared")
    points, _ = as_points(points, points)
    rows = np.linspace(0, len(points) - 1, min(num_points, len(points))).round().astype(int)
    chosen = points[rows]
    distances = cdist(chosen, chosen)[np.triu_indices(len(chosen), 1)]
    distances = distances[distances > 0]
    return float(np.median(distances)) if len(distances) else 1.0


@checked
def squared_mmd(first: np.ndarray, second: np.ndarray, bandwidth: float | None = None) -> float:
    r"""
    The squared maximum mean discrepancy with the kernel \(e^{-|x - y|^2 / 2 h^2}\), without bias.

    The U-statistic of A. Gretton et al., JMLR 13, 2012, eq. 3: 0 on average for sets of one distribution, so negative
    half of the time, and 2 at most. `bandwidth` is h, in the unit of the coordinates: the median distance inside the first
    set if not given. Either set has 2 points at least.
    """
    first, second = as_points(first, second, at_least=2)
    h = median_bandwidth(first) if bandwidth is None else bandwidth
    POSITIVE.check("bandwidth", h, "it is in the unit of the coordinates")

    def kernel(distances: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # far away is far away
            return np.exp(-((distances / h) ** 2) / 2)

    def within(points: np.ndarray) -> float:
        n = len(points)  # a point with itself has a kernel of 1, and is left out
        return (_mean_of_pairs(points, points, kernel) * n - 1) / (n - 1)

    return within(first) + within(second) - 2 * _mean_of_pairs(first, second, kernel)


def _root_mean_square(values: np.ndarray, weights: np.ndarray) -> float:
    """Of values that are not negative."""
    largest = float(values.max())
    return largest * float((weights * (values / largest) ** 2).sum()) ** 0.5 if largest else 0.0


@checked
def sliced_wasserstein(first: np.ndarray, second: np.ndarray, num_projections: int = 128, seed: int = 0) -> float:
    r"""
    The sliced 2-Wasserstein distance: \((\mathrm{mean}_u\, W_2(\langle X, u \rangle, \langle Y, u \rangle)^2)^{1/2}\).

    The directions u are evenly spread half a turn around in two dimensions, and random in more; along each the distance
    is exact, by quantiles (N. Bonneel et al., J. Math. Imaging Vis. 51, 2015). In the unit of the coordinates; the sets may
    differ in size.
    """
    first, second = as_points(first, second)
    _PROJECTIONS.check("num_projections", num_projections, "the error falls with their number")
    SEED.check("seed", seed, "it seeds the random directions")
    dimension = first.shape[1]
    if dimension == 2:
        angles = (np.arange(num_projections) + 0.5) * math.pi / num_projections
        directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    else:
        directions = np.random.default_rng(seed).normal(size=(num_projections, dimension))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    # Quantile functions are steps; between two neighbouring steps of either both are constant.
    edges = np.union1d(np.arange(1, len(first) + 1) / len(first), np.arange(1, len(second) + 1) / len(second))
    shares, middles = np.diff(edges, prepend=0.0), (edges + np.concatenate([[0.0], edges[:-1]])) / 2
    rows = [np.minimum((middles * len(points)).astype(np.int64), len(points) - 1) for points in (first, second)]
    distances = []  # of each direction
    for direction in directions:
        quantiles = [np.sort(points @ direction)[row] for points, row in zip((first, second), rows, strict=True)]
        distances.append(_root_mean_square(np.abs(quantiles[0] - quantiles[1]), shares))
    return _root_mean_square(np.array(distances), np.full(num_projections, 1 / num_projections))


@checked
def exact_wasserstein(first: np.ndarray, second: np.ndarray) -> float:
    """
    The 2-Wasserstein distance of two sets of equally many points, by the best assignment of one to the other.

    Between samples it is biased upwards, by an amount that shrinks slowly with their number. Time grows with about the
    cube of it, so more than `MAX_EXACT_POINTS` are refused.
    """
    first, second = as_points(first, second)
    if len(first) != len(second) or len(first) > MAX_EXACT_POINTS:
        raise LabError(
            f"The exact Wasserstein distance is between sets of equally many points, {MAX_EXACT_POINTS} at most; got "
            f"{len(first)} and {len(second)}. Use subsets of them, or sliced_wasserstein."
        )
    distances = cdist(first, second)
    largest = distances.max()
    assigned = distances[linear_sum_assignment((distances / largest) ** 2 if largest else distances)]
    return _root_mean_square(assigned, np.full(len(assigned), 1 / len(assigned)))


@checked
def density_and_coverage(real: np.ndarray, generated: np.ndarray, k: int = 5) -> tuple[float, float]:
    """
    Density and coverage of M. Naeem et al., arXiv 2002.09797, eq. 4 and 6.

    Around each real point lies a ball that reaches to its k-th neighbour among the other real ones. Density is the mean
    number of balls that a generated point is in, over k: 1 for sets of one distribution, less for samples outside of it.
    Coverage is the share of balls that hold a generated point. For sets of one distribution it depends on their sizes (and
    is 0.97 for as many of either and k = 5), so compare it only between sets of the same sizes.
    """
    real, generated = as_points(real, generated)
    check_neighbour(k, len(real) - 1, f"{counted(len(real), 'real point')}")
    radii = cKDTree(real).query(real, k=[k + 1], workers=torch.get_num_threads())[0][:, 0]
    radii *= 1 + 1e-12  # balls are closed: a point at the distance itself is in, whatever rounding says
    # Repeated real points have balls of radius 0; they hold what float32 cannot distinguish from their centre.
    inside = cKDTree(generated).query_ball_point(
        real, np.maximum(radii, resolution(real)), workers=torch.get_num_threads(), return_length=True
    )
    return float(inside.sum() / (k * len(generated))), float((inside > 0).mean())
