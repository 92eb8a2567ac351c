"""`splice`: schedules one after another, of which each may keep the clock of a whole run."""

from bisect import bisect_right
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.progress import Progress
from ..core.registry import Parameter
from ..core.words import counted
from .lab_curves import boundaries_in_updates
from .registries import SCHEDULERS
from .resolve import resolve_schedule
from .schedule import Schedule


@lru_cache(maxsize=256)
def _part(spec: str) -> Schedule:
    """A schedule of a splice, whose floor is a share of the peak."""
    if spec.startswith("hub:"):
        raise LabError(
            f"splice cannot take {spec!r}, which may change on the Hub. Write its spec string; `lrlab pull` shows it."
        )
    part = resolve_schedule(spec)
    if why := part.more_than_a_curve:
        raise LabError(f"splice cannot take {spec!r}, which {why}. Take schedules of the learning rate and the clock alone.")
    if part.kwargs.get("min_lr") and part.kwargs["min_lr"] != part.entry.facts.get("min_lr"):
        raise LabError(f"splice cannot take min_lr inside {spec!r}: give min_lr_ratio there, or min_lr to the splice.")
    return replace(part, kwargs=part.kwargs | {"min_lr": None}) if "min_lr" in part.kwargs else part


@SCHEDULERS.register(
    "splice",
    description="schedules cut short or taken up in the middle, one after another, as of an extended run",
    source="diffusers_lrlab",
    parameters=(
        Parameter("schedules", list, ("constant_with_warmup", "cosine"), "spec strings, in order", items=str),
        Parameter(
            "boundaries", list, (0.5,), "start of the second and each later one: updates or fractions of the run",
            "(0, inf)",
        ),
        Parameter(
            "lengths", list, None, "updates of the run whose clock each keeps, warm-up included; 0, as if not given: only "
            "those from its boundary to the next", "[0, inf)",
        ),
        Parameter("scales", list, None, "peak of each, relative to that of the whole; 1 if not given", "[0, 1]"),
    ),
    without=("warmup_type", "warmup_start_ratio"),
    traits=("rises",),
)  # fmt: skip
def splice(
    progress: Progress,
    schedules: list[str],
    boundaries: list[float],
    lengths: list[float] | None,
    scales: list[float] | None,
) -> Any:
    """Each schedule with its own warm-up, floor and clock: that of a whole run, or of its part of this one."""
    lengths, scales = lengths or [0.0] * len(schedules), scales or [1.0] * len(schedules)
    if not schedules or not len(boundaries) + 1 == len(lengths) == len(scales) == len(schedules):
        raise LabError(
            f"splice got {len(schedules)} schedules, {len(boundaries)} boundaries, {len(lengths)} lengths and {len(scales)} "
            "scales; every schedule takes a length and a scale, and each but the first a boundary."
        )
    edges = boundaries_in_updates("splice", boundaries, progress.total_updates)
    total, warmup = progress.total_updates, progress.warmup_updates
    shortest = min(
        [edges[0] if edges else total] * (not lengths[0]) + [int(length) for length in lengths if length] or [total]
    )
    if edges and not 0 < edges[0] <= edges[-1] < total or warmup >= shortest:
        raise LabError(
            f"splice has boundaries at the updates {edges} of {total}, and its shortest part with the "
            f"{counted(warmup, 'update')} of warm-up has {shortest}. Boundaries lie inside the run, and no such part is "
            "shorter than the warm-up."
        )
    stretches = list(zip(schedules, lengths, scales, [0, *edges], [*edges, total], strict=True))
    if isinstance(progress.update, int):
        stretches = [stretches[bisect_right(edges, progress.update)]]
    result: Any = None
    for spec, length, scale, begin, end in stretches:
        value = scale * _part(spec).at(_clock(progress, int(length), begin, end), 1.0)[0]
        result = value if result is None else np.where(progress.update >= begin, value, result)
    return result


def _clock(progress: Progress, length: int, begin: int, end: int) -> Progress:
    """The clock of a part. The first one, and those of a whole run, have the warm-up of this run."""
    if not length and begin:
        return Progress(progress.update - begin, end - begin)
    return Progress(progress.update, length or end, progress.warmup_updates)
