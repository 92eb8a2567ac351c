"""A learning-rate schedule: warm-up, peak and floor around a shape.

    lr(n) = ramp(n) * (floor + (peak - floor) * shape(n))

A shape is a pure function of the clock, registered in `SCHEDULERS`; warm-up, peak and floor are common to all shapes.
"""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.progress import Progress
from ..core.registry import Entry
from ..core.spec import choose, format_spec
from .registries import MOMENTUM_SCHEDULERS, RAMPS, SCHEDULERS

# Parameters that `Schedule` itself applies; all others belong to the shape.
_OUTSIDE_SHAPE = frozenset(("min_lr", "min_lr_ratio", "warmup_type", "warmup_start_ratio", "f_max"))
_FLOORS = ("min_lr", "min_lr_ratio")
ENDLESS = 2**53


@dataclass(frozen=True)
class Schedule:
    """A schedule with all its parameters, which a run is audited against. Each of its names is looked up once."""

    name: str | None  # in `SCHEDULERS`; `None`: no schedule is applied here
    kwargs: dict[str, Any] = field(default_factory=dict)
    momentum: str | None = None  # in `MOMENTUM_SCHEDULERS`
    momentum_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # `compensates` raises an error if both schedules set the momentum.
        if self.momentum and self.compensates and self.follows_metric:
            raise LabError(
                f"The momentum schedule {self.momentum!r} sets the learning rate, and so does the schedule {self.name!r}, "
                f"which follows a metric. Use the momentum schedule 'demon' with {self.name!r}."
            )

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: functions of plug-ins cannot be pickled."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def entry(self) -> Entry | None:
        """The entry of the learning-rate schedule."""
        return None if self.name is None else SCHEDULERS[self.name]

    @cached_property
    def momentum_schedule(self) -> tuple[Entry, dict[str, Any]] | None:
        """The momentum schedule and its parameters, separate or part of the learning-rate schedule."""
        is_part = "momentum" in self.traits and bool(self.kwargs.get("cycle_momentum", True))
        if self.momentum is None:
            return (MOMENTUM_SCHEDULERS[str(self.name)], self._shape_kwargs) if is_part else None
        if is_part:
            raise LabError(
                f"The schedule {self.name!r} sets the momentum, and so does the momentum schedule {self.momentum!r}. "
                + ("Give it cycle_momentum=false, or drop" if self.name == "one_cycle" else "Drop")
                + " one of them."
            )
        return MOMENTUM_SCHEDULERS[self.momentum], self.momentum_kwargs

    @property
    def entries(self) -> list[Entry]:
        """The entries of the learning-rate and the momentum schedule, where they are given."""
        momentum = self.momentum_schedule
        return [entry for entry in (self.entry, momentum and momentum[0]) if entry is not None]

    @cached_property
    def _shape_kwargs(self) -> dict[str, Any]:
        return {key: value for key, value in self.kwargs.items() if key not in _OUTSIDE_SHAPE}

    @property
    def traits(self) -> frozenset[str]:
        """The traits of the learning-rate schedule."""
        return frozenset() if self.entry is None else self.entry.traits

    @property
    def follows_metric(self) -> bool:
        return "feedback" in self.traits

    @property
    def sets_momentum(self) -> bool:
        return self.momentum_schedule is not None

    @property
    def sets_lr(self) -> bool:
        """Whether it sets the learning rate, which a momentum schedule alone may not."""
        return self.name is not None or self.compensates

    @property
    def compensates(self) -> bool:
        """Whether the momentum schedule changes the learning rate."""
        return self.momentum_schedule is not None and "compensates" in self.momentum_schedule[0].traits

    @cached_property
    def parts(self) -> tuple["Schedule", "Schedule"]:
        """The schedules of the learning rate and of the momentum alone."""
        return Schedule(self.name, self.kwargs), Schedule(None, {}, self.momentum, self.momentum_kwargs)

    def at(
        self, progress: Progress, lr: float, momentum: float | None = None, default_lr: float | None = None
    ) -> tuple[Any, Any]:
        """
        Learning rate and momentum at a reading of the clock; arrays if `progress.update` is an array.

        Args:
            progress ([`Progress`]): The clock.
            lr (`float`): The initial learning rate of the optimizer or of a parameter group.
            momentum (`float`, *optional*): Its momentum or beta1; required if the schedule sets it.
            default_lr (`float`, *optional*): The learning rate of the whole optimizer if `lr` is that of a group. A floor
                given as a rate refers to it, and scales with the rates of groups as in diffusers and transformers.
        """
        shape, factor, beta = 1.0, 1.0, None
        if self.entry is not None:
            shape = self.entry(progress, **self._shape_kwargs)
        if self.momentum_schedule is not None:
            entry, kwargs = self.momentum_schedule
            beta, factor = entry(progress, momentum, **kwargs)
        peak, floor = self._bounds(lr, default_lr)
        # Exact at both ends, unlike floor + (peak - floor) * shape.
        height = shape * factor
        value = peak * height + floor * (1 - height) if floor else peak * height
        return self._ramp(progress, floor / peak if peak else 0.0) * value, beta

    def _bounds(self, lr: float, default_lr: float | None) -> tuple[float, float]:
        """Peak and floor of the learning rate."""
        if not lr:  # a frozen group
            return 0.0, 0.0
        min_lr, ratio = self.kwargs.get("min_lr"), self.kwargs.get("min_lr_ratio")
        floor = ratio * lr if ratio is not None else min_lr or 0.0
        if ratio is None and default_lr and default_lr != lr and "floor_of_all" not in self.traits:
            floor *= lr / default_lr
        peak = lr * self.kwargs.get("f_max", 1.0)
        if floor > peak:
            raise LabError(
                f"The floor {floor:g} of {self.name!r} is above its peak, {peak:g}. Lower one or raise the other."
            )
        return peak, floor

    def _ramp(self, progress: Progress, floor_ratio: float) -> Any:
        traits = self.traits
        if not progress.warmup_updates or self.name is None or {"rises", "no_warmup"} & traits:
            return 1.0
        start = self.kwargs["warmup_start_ratio"]
        fraction = progress.warmup_fraction
        if "early_peak" in traits:
            steps = progress.warmup_updates
            passed = progress.update + 1 if start is None else progress.update / max(1, steps - 1) * steps
            fraction = np.minimum(passed / steps, 1.0)
        if start is None:
            start = floor_ratio if "warmup_from_floor" in traits else 0.0
        ramp = RAMPS[self.kwargs["warmup_type"]](fraction)
        return start + (1 - start) * ramp if start else ramp


def with_floor(entry: Entry, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All parameters of a learning-rate schedule, with its own default floor if no other is given."""
    if all(kwargs.get(key) is not None for key in _FLOORS):
        raise LabError(
            f"{entry.name!r} got min_lr={kwargs['min_lr']!r} and min_lr_ratio={kwargs['min_lr_ratio']!r}, which both set "
            "its floor. Drop one."
        )
    if "feedback" not in entry.traits and all(kwargs.get(key) is None for key in _FLOORS):
        return kwargs | {key: value for key, value in entry.facts.items() if key in _FLOORS}
    return kwargs


def resolve_schedule(
    spec: str | None,
    kwargs: dict[str, Any] | None = None,
    momentum: str | None = None,
    momentum_kwargs: dict[str, Any] | None = None,
) -> Schedule:
    """
    A schedule with all its parameters.

    `spec` and `momentum` are names or spec strings, `kwargs` and `momentum_kwargs` further parameters. Without `spec` the
    schedule does not set the learning rate.
    """
    schedule = Schedule(None)
    if spec is not None:
        choice = choose(spec, kwargs, SCHEDULERS)
        schedule = Schedule(choice.name, with_floor(choice.entry, choice.kwargs))
    if momentum is None:
        return schedule
    choice = choose(momentum, momentum_kwargs, MOMENTUM_SCHEDULERS)
    return replace(schedule, momentum=choice.name, momentum_kwargs=choice.kwargs)


def describe_schedule(schedule: Schedule) -> str:
    """Spec strings of a schedule and its momentum schedule, without parameters at their defaults."""
    chosen = [] if schedule.entry is None else [(schedule.entry, schedule.kwargs)]
    if schedule.momentum is not None and schedule.momentum_schedule is not None:
        chosen.append(schedule.momentum_schedule)
    specs = []
    for entry, kwargs in chosen:
        defaults = with_floor(entry, entry.resolve({}))
        specs.append(format_spec(entry.name, {key: value for key, value in kwargs.items() if value != defaults[key]}))
    return " with momentum ".join(specs)


def double_decay(
    schedule: Schedule, lr: float, momentum: float | None, warmup_updates: int, total_updates: int
) -> str | None:
    """A warning if both a momentum schedule and a learning-rate schedule lower the learning rate, else `None`."""
    if not schedule.compensates or schedule.momentum is None or schedule.name is None:
        return None
    end = Progress(total_updates, total_updates, warmup_updates)
    alone = float(np.max(schedule.parts[0].at(end, lr)[0]))
    if alone >= lr:
        return None
    together = float(np.max(schedule.at(end, lr, momentum)[0]))
    return (
        f"{schedule.momentum!r} changes the learning rate by itself, on top of {schedule.name!r}: together they end at "
        f"{together / lr:.3g} of the peak, {schedule.name!r} alone at {alone / lr:.3g}. Use 'constant_with_warmup' beside "
        "it, or 'demon' for the momentum alone."
    )
