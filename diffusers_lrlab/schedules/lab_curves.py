"""Schedules that are not in diffusers, transformers or torch."""

from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.progress import Progress, resolve_updates
from ..core.registry import Parameter
from ..core.words import counted
from .registries import SCHEDULERS, half_cosine


@SCHEDULERS.register(
    "rex",
    description="slow at first, then ever steeper to the floor",
    source="REX, arXiv 2107.04197, section 3",
    parameters=(Parameter("d", float, 0.5, "0 is linear; towards 1 it stays up longer and falls later", "[0, 1)"),),
)
def rex(progress: Progress, d: float) -> Any:
    r"""\(s = z / ((1 - d) + d z)\), \(z = 1 - p\); with \(d = \beta_0\) it is the profile of `demon`."""
    z = 1 - progress.fraction
    return z / ((1 - d) + d * z)


@SCHEDULERS.register(
    "edm2_inverse_sqrt",
    description="constant, then falling with the inverse square root of the images seen",
    source="EDM2, arXiv 2312.02696, section 2 and table 6",
    parameters=(
        Parameter(
            "reference_images", float, None,
            "images seen when the fall begins (EDM2: 70,000 batches of 2,048); derived: a tenth of the run", "(0, inf)",
        ),
        Parameter(
            "images_per_update", int, None,
            "effective batch size; known in `lrlab train`, elsewhere required with reference_images", "[1, inf)",
        ),
    ),
)  # fmt: skip
def edm2_inverse_sqrt(progress: Progress, reference_images: float | None, images_per_update: int | None) -> Any:
    r"""\(s = 1 / \sqrt{\max(m / m_\text{ref}, 1)}\) after \(m\) images, warm-up included.

    EDM2 warms up over 10 million images; its reference rate of 0.01 is for networks that preserve the magnitude of
    activations.
    """
    if reference_images is None:
        reference_updates = progress.total_updates / 10
    elif images_per_update is None:
        raise LabError(
            f"edm2_inverse_sqrt got reference_images={reference_images:g} without images_per_update. Add "
            "images_per_update=N (batch size x accumulation x processes)."
        )
    else:
        reference_updates = reference_images / images_per_update
    return 1 / np.sqrt(np.maximum(progress.now / reference_updates, 1.0))


@SCHEDULERS.register(
    "piecewise",
    description="interpolates between given points by lines, half cosines or steps",
    source="diffusers_lrlab",
    parameters=(
        Parameter("updates", list, (0.5, 1.0), "positions of the points: updates or fractions of the run", "[0, inf)"),
        Parameter("values", list, (1.0, 0.1), "multipliers at the points", "[0, 1]"),
        Parameter(
            "interpolation", str, "linear", "between points; `constant` holds each value until the next point",
            choices=("linear", "cosine", "constant"),
        ),
    ),
)  # fmt: skip
def piecewise(progress: Progress, updates: list[float], values: list[float], interpolation: str) -> Any:
    """Constant before the first point and after the last one."""
    points = boundaries_in_updates("piecewise", updates, progress.total_updates, may_end=len(updates) > 1)
    if len(points) != len(values) or not points:
        raise LabError(
            f"piecewise got {counted(len(points), 'update')} and {counted(len(values), 'value')}; give equally many."
        )
    if interpolation == "constant":
        return np.array([values[0], *values])[np.searchsorted(points, progress.now, side="right")]
    if interpolation == "linear":
        return np.interp(progress.now, points, values)
    index = np.clip(np.searchsorted(points, progress.now, side="right") - 1, 0, max(len(points) - 2, 0))
    edges, heights = np.array([*points, points[-1] + 1]), np.array([*values, values[-1]])
    share = np.clip((progress.now - edges[index]) / (edges[index + 1] - edges[index]), 0.0, 1.0)
    return heights[index + 1] + (heights[index] - heights[index + 1]) * half_cosine(share)


def boundaries_in_updates(owner: str, given: list[float], total_updates: int, may_end: bool = False) -> list[int]:
    """Increasing updates from numbers or fractions. After fractions, 1.0 is the end of the run if `may_end`."""
    whole = may_end and given[-1] == 1.0 and all(value < 1 for value in given[:-1])
    updates = [resolve_updates(value, total_updates, f"A boundary of {owner}") for value in given]
    if whole:
        updates[-1] = total_updates
    if sorted(set(updates)) != updates or (updates and updates[-1] > total_updates):
        raise LabError(
            f"{owner} has boundaries at the updates {updates}; they must increase and lie inside the run of "
            f"{counted(total_updates, 'update')}. Give updates, or fractions of the run such as [0.3, 0.8]."
        )
    return updates
