"""`splice`: schedules one after another, of which each may keep the clock of a whole run."""

from functools import partial
from typing import Any

from ..core.errors import LabError
from ..core.progress import Progress
from ..core.registry import Parameter
from ..core.words import counted
from .joined import parts_of, values_of_parts
from .lab_curves import boundaries_in_updates
from .registries import SCHEDULERS
from .schedule import Schedule


@SCHEDULERS.register(
    "splice",
    description="schedules one after another, each of which may be cut short or start in its middle, as in an extended run",
    source="diffusers_lrlab",
    parameters=(
        Parameter("schedules", list, ("constant_with_warmup", "cosine"), "spec strings, in order", items=str),
        Parameter(
            "boundaries", list, (0.5,), "start of the second and each later one: updates or fractions of the run",
            "(0, inf)",
        ),
        Parameter(
            "lengths", list, None, "updates of the run whose clock each part keeps, warm-up included; 0 or not given: only "
            "the updates from its boundary to the next", "[0, inf)",
        ),
        Parameter("scales", list, None, "peak of each, relative to the peak of the whole; 1 if not given", "[0, 1]"),
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
            f"{counted(warmup, 'update')} of warm-up has {shortest}. Boundaries must lie inside the run, and no such part "
            "may be shorter than the warm-up."
        )
    parts, begins, ends = parts_of("splice", tuple(schedules), ("min_lr",)), [0, *edges], [*edges, total]

    def value(part: Schedule, scale: float, length: float, begin: int, end: int) -> Any:
        return scale * part.at(_clock(progress, int(length), begin, end), 1.0)[0]

    given = zip(parts, scales, lengths, begins, ends, strict=True)
    return values_of_parts(progress, edges, [partial(value, *one) for one in given])


def _clock(progress: Progress, length: int, begin: int, end: int) -> Progress:
    """The clock of a part. The first one, and those of a whole run, have the warm-up of this run."""
    if not length and begin:
        return Progress(progress.update - begin, end - begin)
    return Progress(progress.update, length or end, progress.warmup_updates)
