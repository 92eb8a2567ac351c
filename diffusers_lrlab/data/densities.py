"""Closed-form log densities (natural) of the toy sets, for points `(n, 2)`; results are float64 `(n,)`."""

import math

import numpy as np

_CHUNK_PAIRS = 4_000_000  # points times components at a time: 32 MB


def mixture_log_prob(points: np.ndarray, centres: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """
    Log density of a mixture of Gaussians with equal weights, centres `(components, dimension)` and common standard
    deviations along the axes, `(dimension,)`.
    """
    from scipy.spatial.distance import cdist
    from scipy.special import logsumexp

    scaled, means = np.asarray(points, np.float64) / scales, centres / scales
    constant = -0.5 * means.shape[1] * math.log(2 * math.pi) - np.log(scales).sum() - math.log(len(means))
    size = max(1, _CHUNK_PAIRS // len(means))
    parts = [np.empty(0)]
    for start in range(0, len(scaled), size):
        squares = cdist(scaled[start : start + size], means, "sqeuclidean")
        parts.append(logsumexp(-0.5 * squares, axis=1) + constant)
    return np.concatenate(parts)


def rectangles_log_prob(points: np.ndarray, corners: np.ndarray, size: tuple[float, float]) -> np.ndarray:
    """Log density of a uniform distribution on disjoint rectangles of one `size`, given by their lower left corners."""
    offsets = np.asarray(points, np.float64)[:, None] - corners
    inside = ((offsets >= 0) & (offsets <= np.asarray(size))).all(axis=2).any(axis=1)
    return np.where(inside, -math.log(len(corners) * size[0] * size[1]), -np.inf)


def rings_log_prob(points: np.ndarray, radii: np.ndarray, scale: float) -> np.ndarray:
    r"""
    Log density of points on circles around the origin, all equally likely, plus Gaussian noise.

    The mean of a Gaussian over a circle of radius R is \(e^{-(r^2 + R^2) / 2 s^2} I_0(r R / s^2) / 2 \pi s^2\).
    """
    from scipy.special import i0e, logsumexp

    r = np.linalg.norm(np.asarray(points, np.float64), axis=1)[:, None]
    # i0e is I_0 scaled by e^-x, which completes the square.
    logs = -((r - radii) ** 2) / (2 * scale**2) + np.log(i0e(r * radii / scale**2))
    return logsumexp(logs, axis=1) - math.log(2 * math.pi * scale**2 * len(radii))


def discs_log_prob(points: np.ndarray, centres: np.ndarray, weights: np.ndarray, radius: float) -> np.ndarray:
    """Log density of points at a uniform distance, up to `radius`, and in a uniform direction from disjoint centres."""
    from scipy.spatial import cKDTree

    distances, nearest = cKDTree(centres).query(np.asarray(points, np.float64))
    # Uniform in distance, not in area, so the density is unbounded towards the centre.
    with np.errstate(divide="ignore"):
        logs = np.log(weights[nearest]) - np.log(2 * math.pi * radius * distances)
    # Rounding to float32 may move points across the edge.
    return np.where(distances <= radius + 1e-6, logs, -np.inf)
