"""The Kullback-Leibler divergence between sets of points: by nearest neighbours, by histograms."""

import math

import numpy as np
import torch
from scipy.spatial import cKDTree

from ..core.errors import LabError, must_be
from ..core.ranges import Range
from ..core.signatures import checked
from ..core.words import counted

# Squares of larger coordinates overflow in float64, which threads of KD-trees do not report.
_LARGEST = float(np.finfo(np.float32).max)


def check_neighbour(k: int, most: int, sizes: str) -> None:
    if k not in (allowed := Range(f"[1, {most}]", whole=True)):
        raise must_be("k", k, str(allowed), f"there are {sizes}")


def as_points(first: np.ndarray, second: np.ndarray, at_least: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Two sets of points in a space, as float64 `(num, dimension)`; a `LabError` if they cannot be that."""
    sets = [np.asarray(points, np.float64) for points in (first, second)]
    for name, points in zip(("first", "second"), sets, strict=True):
        if points.ndim != 2 or points.shape[1] < 1 or len(points) < at_least:
            raise LabError(
                f"The {name} set has shape {points.shape}; expected (at least {counted(at_least, 'point')}, at "
                f"least 1 dimension)."
            )
        good = np.abs(points) <= _LARGEST  # not so for NaN
        if not good.all():
            row = int(np.flatnonzero(~good.all(axis=1))[0])
            wanted = "coordinates that float32 can hold"
            raise must_be(f"point {row}", points[row].tolist(), wanted, "leave it out", of=f"the {name} set")
    if sets[0].shape[1] != sets[1].shape[1]:
        raise LabError(
            f"The sets have {sets[0].shape[1]} and {counted(sets[1].shape[1], 'dimension')}; these must be equal."
        )
    return sets[0], sets[1]


def resolution(real: np.ndarray) -> float:
    """The smallest distance that means anything near a real point: the rounding of float32 at the largest coordinate."""
    # Of real points alone: a sample far away must not blur all distances.
    return float(np.finfo(np.float32).eps * max(np.abs(real).max(), np.finfo(np.float32).tiny))


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
    real, generated = as_points(real, generated)
    sizes = f"{len(real)} real and {counted(len(generated), 'generated point')}"
    check_neighbour(k, min(len(real) - 1, len(generated)), sizes)
    workers, smallest = torch.get_num_threads(), resolution(real)
    # Its own point is the nearest one, at distance 0.
    own = cKDTree(real).query(real, k=[k + 1], workers=workers)[0]
    other = cKDTree(generated).query(real, k=[k], workers=workers)[0]
    logs = np.log(np.maximum(other, smallest)) - np.log(np.maximum(own, smallest))
    nats = real.shape[1] * logs.mean() + math.log(len(generated) / (len(real) - 1))
    return float(nats / math.log(2))


def _as_limits(limits: tuple[np.ndarray, np.ndarray], dimension: int) -> list[np.ndarray]:
    ends = [np.asarray(end, np.float64) for end in limits]
    shapes_fit = len(ends) == 2 and all(end.shape == (dimension,) for end in ends)
    if not shapes_fit or not np.isfinite(ends).all() or (ends[0] >= ends[1]).any():
        wanted = f"{dimension} lowest and as many higher coordinates"
        raise must_be("limits", limits, wanted, "leave them out for those of the real points")
    return ends


@checked
def histogram_kl(
    real: np.ndarray,
    generated: np.ndarray,
    bins: int = 50,
    limits: tuple[np.ndarray, np.ndarray] | None = None,
) -> float:
    r"""
    KL(real || generated) in bits, of two histograms on one grid.

    Every cell has half a point more than it holds, in both (the Krichevsky-Trofimov estimate), so that empty cells do not
    make it infinite; points outside the grid count in its outermost cells. It sees nothing finer than a cell.

    The grid has `bins` cells along each axis, so 1 to 3 dimensions are practical; `limits` are its lowest and highest
    coordinates, those of the real points if not given.
    """
    real, generated = as_points(real, generated)
    dimension = real.shape[1]
    most = Range(f"[1, {int(10 ** (7 / dimension))}]", whole=True)
    most.check("bins", bins, f"the grid has bins**{dimension} cells")
    lowest, highest = (real.min(axis=0), real.max(axis=0)) if limits is None else _as_limits(limits, dimension)
    width = np.where(highest > lowest, highest - lowest, 1.0)
    shares = []
    for points in (real, generated):
        cells = np.clip(np.floor((points - lowest) / width * bins), 0, bins - 1).astype(np.int64)
        flat = np.ravel_multi_index(tuple(cells.T), (bins,) * dimension)
        counts = np.bincount(flat, minlength=bins**dimension) + 0.5
        shares.append(counts / counts.sum())
    return float((shares[0] * np.log(shares[0] / shares[1])).sum() / math.log(2))
