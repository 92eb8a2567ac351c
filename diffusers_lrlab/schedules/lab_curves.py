"""Schedules that are not in diffusers, transformers or torch."""

from bisect import bisect_right
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.progress import Progress, resolve_updates
from ..core.registry import Parameter
from ..core.spec import choose
from ..core.words import counted
from .registries import METRIC_MODE, NO_SHAPE, SCHEDULERS, half_cosine
from .schedule import Schedule, with_floor


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


SCHEDULERS.register(
    "adaptive",
    description="raised slightly after each validation that improved, lowered strongly after one that worsened",
    source="the bold driver: Vogl et al., Biological Cybernetics 59 (1988); Battiti, Complex Systems 3 (1989)",
    parameters=(
        METRIC_MODE,
        Parameter("increase", float, 1.05, "factor after an improvement", "[1, inf)"),
        Parameter("decrease", float, 0.5, "factor after a deterioration", "(0, 1)"),
        Parameter("threshold", float, 0.01, "smaller relative changes are ignored as noise", "[0, 1)"),
        Parameter("min_lr_ratio", float, 0.01, "floor, relative to the optimizer's learning rate", "[0, 1]"),
        Parameter("max_lr_ratio", float, 4.0, "ceiling, relative to it", "[1, inf)"),
    ),
    without=NO_SHAPE,
    traits=("feedback",),
)("diffusers_lrlab.schedules.feedback:BoldDriver")


# --- schedules one after another --------------------------------------------------------------------------------------

_OF_WHOLE = ("min_lr", "warmup_type", "warmup_start_ratio")  # parameters of the run as a whole


@lru_cache(maxsize=256)
def _parts_of(specs: tuple[str, ...]) -> tuple[Schedule, ...]:
    """
    The schedules in a join, by spec string; they may not set parameters of the run as a whole.

    A floor in absolute numbers, which a schedule may have by default, is left out, too.
    """
    parts = []
    for spec in specs:
        choice = choose(spec, None, SCHEDULERS)
        part, entry = Schedule(choice.name, with_floor(choice.entry, choice.kwargs)), choice.entry
        if part.follows_metric or part.sets_momentum:
            why = "follows a metric" if part.follows_metric else "also sets the momentum"
            raise LabError(f"join cannot take {spec!r}, which {why}: take schedules of the rate and the clock alone.")
        meaning = {parameter.name: parameter.same_as or parameter.name for parameter in (*entry.parameters, *entry.common)}
        for key in (meaning[key] for key in choice.given if meaning[key] in _OF_WHOLE):
            remedy = "min_lr_ratio there, or min_lr to the join" if key == "min_lr" else "it to the join"
            raise LabError(f"join cannot take {key} inside {spec!r}: give {remedy}.")
        parts.append(replace(part, kwargs=part.kwargs | {"min_lr": None}) if "min_lr" in part.kwargs else part)
    return tuple(parts)


@SCHEDULERS.register(
    "join",
    description="schedules one after another, each over its own part of the run",
    source="diffusers_lrlab, after optax.join_schedules",
    parameters=(
        Parameter("schedules", list, ("constant_with_warmup", "cosine"), "spec strings, in order", items=str),
        Parameter(
            "boundaries", list, (0.5,), "start of the second and each later one: updates or fractions of the run",
            "(0, inf)",
        ),
        Parameter("scales", list, None, "peak of each, relative to the peak of the whole; 1 if not given", "[0, 1]"),
    ),
)  # fmt: skip
def join(progress: Progress, schedules: list[str], boundaries: list[float], scales: list[float] | None) -> Any:
    """Each schedule has its own clock, from its boundary to the next one; warm-up is that of the run."""
    parts = _parts_of(tuple(schedules))
    scales = scales or [1.0] * len(parts)
    if not parts or len(boundaries) != len(parts) - 1 or len(scales) != len(parts):
        raise LabError(
            f"join got {len(parts)} schedules, {len(boundaries)} boundaries and {len(scales)} scales. It takes one schedule "
            "or more, one boundary fewer, and as many scales."
        )
    edges = boundaries_in_updates("join", boundaries, progress.total_updates)
    if edges and (edges[0] <= progress.warmup_updates or edges[-1] >= progress.total_updates):
        raise LabError(
            f"join has boundaries at the updates {edges}; the first must come after the "
            f"{counted(progress.warmup_updates, 'update')} of warm-up, the last before the end at {progress.total_updates}."
        )
    begins, ends = [progress.warmup_updates, *edges], [*edges, progress.total_updates]

    def value(part: Schedule, scale: float, begin: int, end: int) -> Any:
        return scale * part.at(Progress(progress.update - begin, end - begin), 1.0)[0]

    curves = [partial(value, *one) for one in zip(parts, scales, begins, ends, strict=True)]
    if isinstance(progress.update, int):
        return curves[bisect_right(edges, progress.update)]()
    result = curves[0]()
    for curve, edge in zip(curves[1:], edges, strict=True):
        result = np.where(progress.update >= edge, curve(), result)
    return result
