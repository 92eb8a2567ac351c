"""Resolution of names and spec strings to a [`Schedule`] with all its parameters."""

from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.progress import Progress
from ..core.registry import Entry
from ..core.spec import format_spec, merge_spec
from .registries import MOMENTUM_SCHEDULERS, SCHEDULERS
from .schedule import Schedule


def resolve_kwargs(entry: Entry, given: dict[str, Any]) -> dict[str, Any]:
    """All parameters of a learning-rate schedule, with its own default floor."""
    kwargs = entry.resolve(given)
    if kwargs.get("min_lr") is not None and kwargs.get("min_lr_ratio") is not None:
        raise LabError(
            f"{entry.name!r} got min_lr={kwargs['min_lr']!r} and min_lr_ratio={kwargs['min_lr_ratio']!r}, which both set "
            "its floor. Drop one."
        )
    floors = ("min_lr", "min_lr_ratio")
    if "feedback" not in entry.traits and all(kwargs.get(key) is None for key in floors):
        kwargs |= {key: value for key, value in entry.facts.items() if key in floors}
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
    resolved: dict[str, Any] = {}
    name = None
    if spec is not None:
        name, given = merge_spec(spec, kwargs, SCHEDULERS)
        resolved = resolve_kwargs(SCHEDULERS[name], given)
    if momentum is None:
        return Schedule(name, resolved)
    momentum, given = merge_spec(momentum, momentum_kwargs, MOMENTUM_SCHEDULERS)
    schedule = Schedule(name, resolved, momentum, MOMENTUM_SCHEDULERS[momentum].resolve(given))
    if schedule.compensates and name is not None and "feedback" in SCHEDULERS[name].traits:
        raise LabError(
            f"{momentum!r} sets the learning rate, and so does {name!r}, which follows a metric. Use 'demon' beside it."
        )
    return schedule


def describe_schedule(schedule: Schedule) -> str:
    """Spec strings of a schedule and its momentum schedule, without parameters at their defaults."""
    parts = []
    for registry, name, kwargs in (
        (SCHEDULERS, schedule.name, schedule.kwargs),
        (MOMENTUM_SCHEDULERS, schedule.momentum, schedule.momentum_kwargs),
    ):
        if name is not None:
            defaults = resolve_kwargs(registry[name], {})
            parts.append(format_spec(name, {key: value for key, value in kwargs.items() if value != defaults[key]}))
    return " with momentum ".join(parts)


def double_decay(
    schedule: Schedule, lr: float, momentum: float | None, warmup_updates: int, total_updates: int
) -> str | None:
    """A warning if both a momentum schedule and a learning-rate schedule lower the learning rate, else `None`."""
    if not schedule.compensates or schedule.momentum is None or schedule.name is None:
        return None
    end = Progress(total_updates, total_updates, warmup_updates)
    alone = float(np.max(Schedule(schedule.name, schedule.kwargs).at(end, lr)[0]))
    if alone >= lr:
        return None
    together = float(np.max(schedule.at(end, lr, momentum)[0]))
    return (
        f"{schedule.momentum!r} changes the learning rate by itself, on top of {schedule.name!r}: together they end at "
        f"{together / lr:.3g} of the peak, {schedule.name!r} alone at {alone / lr:.3g}. Use 'constant_with_warmup' beside "
        "it, or 'demon' for the momentum alone."
    )
