"""Divergences and distances between two sets of points that need no density."""

import math
from functools import lru_cache

import numpy as np
import torch

from ..core.errors import LabError, must_be
from ..core.values import SEED, Range, checked
from ..core.words import counted

# Squares of larger coordinates overflow in float64, which threads of KD-trees do not report.
_LARGEST = float(np.finfo(np.float32).max)
_PROJECTIONS = Range("[1, 1e6]", whole=True)
_BLOCK_PAIRS = 4_000_000  # pairs of points at a time: 32 MB


def as_points(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two sets of points, as float64 `(num, dimension)`; a `LabError` if they are not points of one space."""
    sets = [np.asarray(points, np.float64) for points in (first, second)]
    for name, points in zip(("first", "second"), sets, strict=True):
        if points.ndim != 2 or not points.size:
            raise LabError(f"The {name} set has shape {points.shape}; expected (num, dimension), neither of them 0.")
        good = np.abs(points) <= _LARGEST  # not so for NaN
        if not good.all():
            row = int(np.flatnonzero(~good.all(axis=1))[0])
            wanted = "coordinates that float32 can hold"
            raise must_be(f"point {row}", points[row].tolist(), wanted, "leave it out", of=f"the {name} set")
    if sets[0].shape[1] != sets[1].shape[1]:
        raise LabError(f"The sets have different dimensions: {sets[0].shape[1]} and {sets[1].shape[1]}.")
    return sets[0], sets[1]


def _resolution(real: np.ndarray) -> float:
    """The smallest distance that means anything near a real point: the rounding of float32 at the largest coordinate."""
    # Of real points alone: a sample far away must not blur all distances.
    return float(np.finfo(np.float32).eps * max(np.abs(real).max(), np.finfo(np.float32).tiny))


# The same real points are compared with samples and with held-out points, at the end of each run of a study.
@lru_cache(maxsize=4)
def _distances_within(points: bytes, dimension: int, k: int) -> np.ndarray:
    """From each point of a set, float64, to its k-th neighbour among the others, `(num, 1)`."""
    from scipy.spatial import cKDTree

    found = np.frombuffer(points).reshape(-1, dimension)
    # Its own point is the nearest one, at distance 0.
    return cKDTree(found).query(found, k=[k + 1], workers=torch.get_num_threads())[0]


@checked
def knn_kl(real: np.ndarray, generated: np.ndarray, k: int = 5) -> float:
    r"""
    KL(real || generated) in bits, by the distances to nearest neighbours.

    \(\frac{d}{n} \sum_i \log \frac{\nu_k(i)}{\rho_k(i)} + \log \frac{m}{n - 1}\), where \(\rho_k(i)\) is the distance from
    the i-th of n real points to its k-th neighbour among the other real ones, and \(\nu_k(i)\) to its k-th neighbour among
    the m generated ones (Q. Wang, S. Kulkarni, S. Verdú, IEEE Trans. Inf. Theory 55, 2009, eq. 5 and 25). Distances are
    Euclidean; `kldiv` of the package NPEET, which the study uses, is the same estimate with the largest difference of a
    coordinate for a distance.

    The estimate has a bias and a spread that depend on both sets and on their sizes: measure it between two sets of real
    points of the same sizes, as training runs do, and read the figure beside that one. It can be negative.

    Distances below the rounding of float32 at the largest real coordinate count as that much, so that repeated points
    give large figures and not infinite ones. `k` is less than n, and at most m.
    """
    from scipy.spatial import cKDTree

    real, generated = as_points(real, generated)
    sizes = f"there are {len(real)} real and {counted(len(generated), 'generated point')}"
    Range(f"[1, {min(len(real) - 1, len(generated))}]", whole=True).check("k", k, sizes)
    smallest, own = _resolution(real), _distances_within(real.tobytes(), real.shape[1], k)
    other = cKDTree(generated).query(real, k=[k], workers=torch.get_num_threads())[0]
    logs = np.log(np.maximum(other, smallest)) - np.log(np.maximum(own, smallest))
    nats = real.shape[1] * logs.mean() + math.log(len(generated) / (len(real) - 1))
    return float(nats / math.log(2))


@lru_cache(maxsize=4)
def _mean_distance_within(points: bytes, dimension: int) -> float:
    found = np.frombuffer(points).reshape(-1, dimension)
    return _mean_distance(found, found)


def _mean_distance(first: np.ndarray, second: np.ndarray) -> float:
    from scipy.spatial.distance import cdist

    size = max(1, _BLOCK_PAIRS // len(second))
    total = sum(float(cdist(first[i : i + size], second).sum()) for i in range(0, len(first), size))
    return total / (len(first) * len(second))


@checked
def energy_distance(first: np.ndarray, second: np.ndarray) -> float:
    r"""
    The energy distance \(2 E|X - Y| - E|X - X'| - E|Y - Y'|\) (Székely and Rizzo 2013), of the sets as they are.

    In the unit of the coordinates. The means are over all pairs, including those of a point with itself (a V-statistic), so
    it is 0 for equal sets and never negative; for two sets of n points of one distribution it is about \(2 E|X - X'| / n\).
    """
    first, second = as_points(first, second)
    within = [_mean_distance_within(points.tobytes(), points.shape[1]) for points in (first, second)]
    return max(0.0, 2 * _mean_distance(first, second) - sum(within))  # rounding can make less of it


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
def density_and_coverage(real: np.ndarray, generated: np.ndarray, k: int = 5) -> tuple[float, float]:
    """
    Density and coverage of M. Naeem et al., arXiv 2002.09797, eq. 4 and 6.

    Around each real point lies a ball that reaches to its k-th neighbour among the other real ones. Density is the mean
    number of balls that a generated point is in, over k: 1 for sets of one distribution, less for samples outside of it.
    Coverage is the share of balls that hold a generated point. For sets of one distribution it depends on their sizes (and
    is 0.97 for as many of either and k = 5), so compare it only between sets of the same sizes.
    """
    from scipy.spatial import cKDTree

    real, generated = as_points(real, generated)
    Range(f"[1, {len(real) - 1}]", whole=True).check("k", k, f"there are {counted(len(real), 'real point')}")
    # Balls are closed: a point at the distance itself is in, however it is rounded.
    radii = _distances_within(real.tobytes(), real.shape[1], k)[:, 0] * (1 + 1e-12)
    # Repeated real points have balls of radius 0; they hold what float32 cannot distinguish from their centre.
    inside = cKDTree(generated).query_ball_point(
        real, np.maximum(radii, _resolution(real)), workers=torch.get_num_threads(), return_length=True
    )
    return float(inside.sum() / (k * len(generated))), float((inside > 0).mean())
