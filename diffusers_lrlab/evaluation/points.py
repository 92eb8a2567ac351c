"""All figures for one set of generated points, each beside what held-out points of the data score in their place."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
from tqdm.auto import tqdm

from . import distances, kl

NEIGHBOUR = 5  # k of the nearest-neighbour estimates, as in the study


class Metric(NamedTuple):
    """
    A figure for generated points.

    Args:
        label (`str`): For cards, with the unit.
        function (`Callable`): From real and generated points, both `(num, dimension)`.
        num_real (`int` or `None`): Real points that it is given at most; `None` for as many as generated ones.
        num_generated (`int` or `None`): Generated points likewise; `None` for all.
    """

    label: str
    function: Callable[[np.ndarray, np.ndarray], float]
    num_real: int | None = None
    num_generated: int | None = None


_ALL = 10**12
POINT_METRICS = {
    "kl": Metric("KL(data ‖ samples) by 5th neighbours, bits", kl.knn_kl, _ALL),
    "histogram_kl": Metric("KL(data ‖ samples) of histograms of 50 cells along each axis, bits", kl.histogram_kl, _ALL),
    "energy_distance": Metric("Energy distance, of 5,000 points at most", distances.energy_distance, 5000, 5000),
    "squared_mmd": Metric(
        "Squared MMD, Gaussian kernel of the median distance, of 5,000 points at most", distances.squared_mmd, 5000, 5000
    ),
    "sliced_wasserstein": Metric("Sliced 2-Wasserstein distance", distances.sliced_wasserstein, _ALL),
    "exact_wasserstein": Metric("2-Wasserstein distance, of 2,000 points at most", distances.exact_wasserstein, 2000, 2000),
    "density": Metric("Density", lambda real, generated: distances.density_and_coverage(real, generated, NEIGHBOUR)[0]),
    "coverage": Metric("Coverage", lambda real, generated: distances.density_and_coverage(real, generated, NEIGHBOUR)[1]),
}


def point_metrics(
    real: np.ndarray, generated: np.ndarray, progress: str | None = None, names: Collection[str] | None = None
) -> dict[str, float]:
    """
    Every metric that the numbers of points and of dimensions allow.

    Args:
        real (`np.ndarray`): `(num_real, dimension)`, in random order.
        generated (`np.ndarray`): `(num_generated, dimension)`, likewise.
        progress (`str`, *optional*): What a progress bar in a terminal should say.
        names (`Collection[str]`, *optional*): Only those of these names.

    Returns:
        `dict`: from the names of `POINT_METRICS` to figures.
    """
    results: dict[str, float] = {}
    if min(len(real), len(generated)) <= NEIGHBOUR:
        return results
    chosen_metrics = {name: metric for name, metric in POINT_METRICS.items() if names is None or name in names}
    bar = tqdm(chosen_metrics.items(), desc=progress, leave=False, disable=None if progress else True)
    for name, metric in bar:
        if name == "histogram_kl" and real.shape[1] > 2:
            continue  # 50 cells along each of more axes are mostly empty
        chosen = generated[: metric.num_generated or len(generated)]
        reference = real[: metric.num_real or len(chosen)]
        if name == "exact_wasserstein":
            chosen, reference = chosen[: len(reference)], reference[: len(chosen)]
        results[name] = metric.function(reference, chosen)
    return results
