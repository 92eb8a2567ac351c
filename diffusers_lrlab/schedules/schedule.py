"""A learning-rate schedule: warm-up, peak and floor around a shape.

    lr(n) = ramp(n) * (floor + (peak - floor) * shape(n))

A shape is a pure function of the clock, registered in `SCHEDULERS`; warm-up, peak and floor are common to all shapes.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.progress import Progress
from ..core.registry import Entry
from .registries import MOMENTUM_SCHEDULERS, RAMPS, SCHEDULERS

# Parameters that `Schedule` itself applies; all others belong to the shape.
_OUTSIDE_SHAPE = frozenset(("min_lr", "min_lr_ratio", "warmup_type", "warmup_start_ratio", "f_max"))
ENDLESS = 2**53


@dataclass(frozen=True)
class Schedule:
    """A schedule with all its parameters, which a run is audited against."""

    name: str | None  # in `SCHEDULERS`; `None`: no schedule is applied here
    kwargs: dict[str, Any] = field(default_factory=dict)
    momentum: str | None = None  # in `MOMENTUM_SCHEDULERS`
    momentum_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.momentum and self._momentum_in_name():
            raise LabError(
                f"The schedule {self.name!r} sets the momentum, and so does the momentum schedule {self.momentum!r}. "
                + ("Give it cycle_momentum=false, or drop" if self.name == "one_cycle" else "Drop")
                + " one of them."
            )

    @cached_property
    def _shape_kwargs(self) -> dict[str, Any]:
        return {key: value for key, value in self.kwargs.items() if key not in _OUTSIDE_SHAPE}

    @property
    def traits(self) -> frozenset[str]:
        """The traits of the learning-rate schedule."""
        return SCHEDULERS[self.name].traits if self.name is not None else frozenset()

    @property
    def follows_metric(self) -> bool:
        return "feedback" in self.traits

    def _momentum_in_name(self) -> bool:
        """Whether the learning-rate schedule itself sets the momentum."""
        return "momentum" in self.traits and bool(self.kwargs.get("cycle_momentum", True))

    @property
    def momentum_schedule(self) -> tuple[str, dict[str, Any]] | None:
        """The momentum schedule and its parameters, separate or part of the learning-rate schedule."""
        if self.momentum is not None:
            return self.momentum, self.momentum_kwargs
        return (self.name, self._shape_kwargs) if self.name is not None and self._momentum_in_name() else None

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
        momentum = self.momentum_schedule
        return momentum is not None and "compensates" in MOMENTUM_SCHEDULERS[momentum[0]].traits

    @property
    def entry(self) -> Entry:
        """The entry of the learning-rate schedule, or else of the momentum schedule."""
        return SCHEDULERS[self.name] if self.name is not None else MOMENTUM_SCHEDULERS[self.momentum or ""]

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
        if self.name is not None:
            shape = SCHEDULERS[self.name](progress, **self._shape_kwargs)
        if (schedule := self.momentum_schedule) is not None:
            name, kwargs = schedule
            beta, factor = MOMENTUM_SCHEDULERS[name](progress, momentum, **kwargs)
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
