"""`join`: schedules of the clock one after another."""

from bisect import bisect_right
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ..core.errors import LabError, must_be
from ..core.progress import Progress
from ..core.registry import Parameter
from ..core.spec import merge_spec
from ..core.words import counted
from .lab_curves import boundaries_in_updates
from .registries import SCHEDULERS
from .resolve import resolve_schedule
from .schedule import Schedule

_OF_WHOLE = ("min_lr", "warmup_type", "warmup_start_ratio")  # parameters of the run as a whole


@lru_cache(maxsize=256)
def _parts_of(specs: tuple[str, ...]) -> tuple[Schedule, ...]:
    """
    The schedules in a join, by spec string; they may not set parameters of the run as a whole.

    A floor in absolute numbers, which a schedule may have by default, is left out, too.
    """
    parts = []
    for spec in specs:
        part, (name, given) = resolve_schedule(spec), merge_spec(spec, None, SCHEDULERS)
        entry = SCHEDULERS[name]
        if why := part.more_than_a_curve:
            raise LabError(
                f"join cannot take {spec!r}, which {why}. Take schedules of the learning rate and the clock alone."
            )
        meaning = {parameter.name: parameter.same_as or parameter.name for parameter in (*entry.parameters, *entry.common)}
        for key in (meaning[key] for key in given if meaning[key] in _OF_WHOLE):
            remedy = "min_lr_ratio there, or min_lr to the join" if key == "min_lr" else "it to the join"
            raise LabError(f"join cannot take {key} inside {spec!r}: give {remedy}.")
        parts.append(replace(part, kwargs=part.kwargs | {"min_lr": None}) if "min_lr" in part.kwargs else part)
    return tuple(parts)


def parts_of_join(
    schedules: list[str], boundaries: list[float], scales: list[float] | None
) -> tuple[tuple[Schedule, ...], list[float]]:
    """The schedules of a join and their scales, checked."""
    if not schedules:
        raise must_be("schedules", schedules, "one schedule or more", "give spec strings in order", of="join")
    parts = _parts_of(tuple(schedules))
    scales = scales or [1.0] * len(parts)
    if len(boundaries) != len(parts) - 1 or len(scales) != len(parts):
        raise LabError(
            f"join got {len(parts)} schedules, {len(boundaries)} boundaries and {len(scales)} scales; {len(parts)} "
            f"schedules take {len(parts) - 1} boundaries and {len(parts)} scales."
        )
    return parts, scales


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
    parts, scales = parts_of_join(schedules, boundaries, scales)
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
