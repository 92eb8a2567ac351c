"""The frame that every learning-rate schedule stands in: warm-up, peak and floor around a shape.

    lr(n) = ramp(n) * (floor + (peak - floor) * shape(n))

A shape is a pure function of the clock that is registered in `SCHEDULERS`; the rest is the same for all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.progress import Progress
from ..core.registry import Parameter, Registry

# The ramps that transformers' warmup_stable_decay has, by its names.
RAMPS = {
    "linear": lambda x: x,
    "cosine": lambda x: 0.5 * (1 - np.cos(math.pi * x)),
    "1-sqrt": lambda x: 1 - np.sqrt(1 - x),
}

SCHEDULERS = Registry(
    "learning-rate schedule",
    common=(
        Parameter("min_lr", float, None, "floor of the learning rate; 0 if not given", "[0, inf)"),
        Parameter("min_lr_ratio", float, None, "the floor, relative to the optimizer's learning rate", "[0, 1]"),
        Parameter("warmup_type", str, "linear", "shape of the warm-up", choices=tuple(RAMPS)),
        Parameter("warmup_start_ratio", float, None, "where warm-up starts, relative to its end; 0 if not given", "[0, 1]"),
    ),
)
"""
Traits of its entries: `"host"` is one of diffusers' own names; `"no_warmup"` cannot warm up; `"rises"` has its rise in
the shape, over the updates that are asked for as warm-up; `"feedback"` also reacts to a metric and is registered as
`"module:Class"`; `"momentum"` also sets the momentum, by the momentum schedule of the same name; `"endless"` needs no
length of the run; `"warmup_from_floor"` and `"early_peak"` are peculiarities of two of transformers' schedules.
"""

MOMENTUM_SCHEDULERS = Registry("momentum schedule")
"""Entries are functions `f(progress, momentum, **parameters) -> (momentum, factor on the learning rate)`.

The trait `"compensates"` marks those whose factor is not 1.
"""

_FRAME = frozenset(("min_lr", "min_lr_ratio", "warmup_type", "warmup_start_ratio", "f_max"))
ENDLESS = 2**53


@dataclass(frozen=True)
class Schedule:
    """
    A schedule with all its parameters: the promise that a run is held to.

    Args:
        name (`str` or `None`): In `SCHEDULERS`; `None` leaves the learning rate to somebody else.
        kwargs (`dict`, *optional*): All its parameters, resolved.
        momentum (`str`, *optional*): In `MOMENTUM_SCHEDULERS`.
        momentum_kwargs (`dict`, *optional*): All its parameters, resolved.
    """

    name: str | None
    kwargs: dict[str, Any] = field(default_factory=dict)
    momentum: str | None = None
    momentum_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.momentum and self.momentum_in_name():
            raise LabError(
                f"The schedule {self.name!r} sets the momentum, and so does the momentum schedule {self.momentum!r}. "
                + ("Give it cycle_momentum=false, or drop" if self.name == "one_cycle" else "Drop")
                + " one of them."
            )
        # Split once: a scheduler evaluates this at every update.
        shape = {key: value for key, value in self.kwargs.items() if key not in _FRAME}
        object.__setattr__(self, "_shape_kwargs", shape)

    def momentum_in_name(self) -> bool:
        """Whether the learning-rate schedule itself sets the momentum."""
        return (
            self.name is not None
            and "momentum" in SCHEDULERS[self.name].traits
            and bool(self.kwargs.get("cycle_momentum", True))
        )

    @property
    def sets_momentum(self) -> bool:
        """Whether the optimizer's momentum is driven too."""
        return self.momentum is not None or self.momentum_in_name()

    @property
    def sets_lr(self) -> bool:
        """Whether the learning rate is driven: a momentum schedule alone may leave it to another scheduler."""
        return self.name is not None or self.compensates

    @property
    def compensates(self) -> bool:
        """Whether the momentum schedule has a say in the learning rate."""
        name = self.momentum or (self.name if self.momentum_in_name() else None)
        return name is not None and "compensates" in MOMENTUM_SCHEDULERS[name].traits

    def at(self, progress: Progress, lr: float, momentum: float | None = None) -> tuple[Any, Any]:
        """
        The learning rate and the momentum at a reading of the clock; arrays when `progress.update` is one.

        Args:
            progress ([`Progress`]): The clock.
            lr (`float`): The learning rate that the optimizer was made with.
            momentum (`float`, *optional*): Its momentum or beta1; needed if the schedule sets it.

        Raises:
            LabError: for parameters that do not fit this run or this learning rate.
        """
        shape, factor, beta = self._shape(progress), 1.0, None
        if self.sets_momentum:
            name = self.momentum or self.name
            kwargs = self.momentum_kwargs if self.momentum else self._shape_kwargs  # type: ignore[attr-defined]
            beta, factor = MOMENTUM_SCHEDULERS[name].factory(progress, momentum, **kwargs)  # type: ignore[index]
        peak, floor = self._bounds(lr)
        # Exact at both ends, unlike floor + (peak - floor) * shape.
        height = shape * factor
        value = peak * height + floor * (1 - height) if floor else peak * height
        return self._ramp(progress, floor / peak if peak else 0.0) * value, beta

    def _shape(self, progress: Progress) -> Any:
        if self.name is None:
            return 1.0
        return SCHEDULERS[self.name].factory(progress, **self._shape_kwargs)  # type: ignore[attr-defined]

    def _bounds(self, lr: float) -> tuple[float, float]:
        """Peak and floor of the learning rate."""
        min_lr, ratio = self.kwargs.get("min_lr"), self.kwargs.get("min_lr_ratio")
        floor = ratio * lr if ratio is not None else min_lr or 0.0
        peak = lr * self.kwargs.get("f_max", 1.0)
        if floor > peak:
            raise LabError(
                f"The floor {floor:g} of {self.name!r} is above its peak, {peak:g}. Lower one or raise the other."
            )
        return peak, floor

    def _ramp(self, progress: Progress, floor_ratio: float) -> Any:
        if not progress.warmup_updates or self.name is None or {"rises", "no_warmup"} & SCHEDULERS[self.name].traits:
            return 1.0
        start, traits = self.kwargs["warmup_start_ratio"], SCHEDULERS[self.name].traits
        fraction = progress.warmup_fraction
        if "early_peak" in traits:
            steps = progress.warmup_updates
            passed = progress.update + 1 if start is None else progress.update / max(1, steps - 1) * steps
            fraction = np.minimum(passed / steps, 1.0)
        if start is None:
            start = floor_ratio if "warmup_from_floor" in traits else 0.0
        ramp = RAMPS[self.kwargs["warmup_type"]](fraction)
        return start + (1 - start) * ramp if start else ramp
