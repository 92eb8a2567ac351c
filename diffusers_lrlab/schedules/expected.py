"""The learning rate and momentum at each update of a run, and of runs that continue others, without a model or torch."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.progress import Progress, resolve_warmup_updates
from ..core.registry import Entry
from ..core.spec import format_spec
from ..core.values import Range, checked
from .schedule import ENDLESS, Schedule, describe_schedule, resolve_schedule

_LENGTH = Range(f"[1, {ENDLESS}]", whole=True)
_KEPT_BY_COOLDOWN = ("min_lr", "min_lr_ratio", "warmup_type", "warmup_start_ratio")


def resolve_length(schedule: Schedule, num_warmup_steps: float, num_training_steps: int | None) -> tuple[int, int]:
    """Updates of warm-up and of the whole run, checked against the traits of the schedule."""
    traits, name = schedule.traits, schedule.name or schedule.momentum
    Range("[0, inf)").check("num_warmup_steps", num_warmup_steps, "it counts updates, or is a fraction of the run")
    _LENGTH.check("num_training_steps", num_training_steps, "it counts optimizer updates")
    if num_training_steps is None:
        if 0 < num_warmup_steps < 1:
            raise LabError(f"Warm-up of {num_warmup_steps} of the run needs num_training_steps, the length of the run.")
        if "endless" not in traits or schedule.momentum is not None:
            raise LabError(f"The schedule {name!r} needs num_training_steps, the optimizer updates of the whole run.")
        num_training_steps = ENDLESS
    if "no_warmup" in traits and num_warmup_steps and schedule.momentum is None:
        raise LabError(
            f"{name!r} has no warm-up, but {num_warmup_steps} warm-up steps were requested. Use 0"
            + (", or 'constant_with_warmup'." if name == "constant" else ".")
        )
    return resolve_warmup_updates(num_warmup_steps, num_training_steps), num_training_steps


@checked
def lr_curve(
    name: str,
    base_lr: float,
    num_warmup_steps: float,
    num_training_steps: int,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
    momentum: float = 0.9,
) -> np.ndarray:
    """The learning rate at each update of a run, without a model or an optimizer.

    Args:
        name (`str`): A name of [`list_schedulers`] or a spec string.
        base_lr (`float`): The learning rate of the optimizer.
        num_warmup_steps (`float`): Updates of warm-up, or a fraction of the run in (0, 1).
        num_training_steps (`int`): Updates of the run.
        scheduler_specific_kwargs (`dict`, *optional*): The schedule's parameters.
        momentum (`float`, *optional*, defaults to 0.9): The momentum of the optimizer; `mdlrc` depends on it.

    Returns:
        `np.ndarray`: float64 of shape `(num_training_steps,)`. A schedule that follows a metric is shown as its warm-up,
        followed by a constant rate.
    """
    schedule = resolve_schedule(name, scheduler_specific_kwargs)
    return schedule_curves(schedule, base_lr, momentum, num_warmup_steps, num_training_steps)[0]


def schedule_curves(
    schedule: Schedule, base_lr: float, momentum: float | None, num_warmup_steps: float, num_training_steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Learning rate and momentum at each update of a run, float64; the momentum is NaN if the optimizer has none."""
    if num_training_steps is None:
        raise LabError("A curve needs num_training_steps, the number of updates to give values for.")
    warmup, total = resolve_length(schedule, num_warmup_steps, num_training_steps)
    clock = Progress(np.arange(total), total, warmup)
    if schedule.follows_metric:
        lrs = base_lr * np.minimum(clock.update / warmup, 1.0) if warmup else base_lr
        _, momenta = schedule.parts[1].at(clock, base_lr, momentum)
    else:
        lrs, momenta = schedule.at(clock, base_lr, momentum)
    lrs, momenta = np.ones(total) * lrs, None if momenta is None else np.ones(total) * momenta
    _check_values(schedule.entries[0], "learning rate", lrs, np.inf)
    if momenta is None:
        return lrs, np.full(total, np.nan if momentum is None else momentum)
    _check_values(schedule.entries[-1], "momentum", momenta, 1.0)
    return lrs, momenta


def _check_values(entry: Entry, what: str, values: np.ndarray, below: float) -> None:
    """Raises a `LabError` for a negative, too large or NaN value, which schedules of plug-ins may return."""
    wrong = ~((values >= 0) & (values < below))
    if wrong.any():
        update = int(np.argmax(wrong))
        raise LabError(
            f"{entry.title} gives a {what} of {values[update]:g} at update {update}: must be in [0, {below:g}).{entry.where}"
        )


@dataclass(frozen=True)
class RunCurve:
    """The learning rate and momentum of each update of a run."""

    schedule: Schedule
    lr: float  # the peak
    momentum: float | None
    warmup_updates: int
    num_updates: int

    @cached_property
    def _curves(self) -> tuple[np.ndarray, np.ndarray]:
        return schedule_curves(self.schedule, self.lr, self.momentum, self.warmup_updates, self.num_updates)

    @property
    def lrs(self) -> np.ndarray:
        """float64 `(num_updates,)`."""
        return self._curves[0]

    @property
    def momenta(self) -> np.ndarray:
        """float64 `(num_updates,)`; NaN if the schedule does not set the momentum."""
        return self._curves[1]

    @property
    def text(self) -> str:
        return describe_schedule(self.schedule)

    def lasting(self, num_updates: int) -> "RunCurve":
        """The curve of the same schedule over another number of updates."""
        return dataclasses.replace(self, num_updates=num_updates)

    def cooled_down(self, at: int, num_decay: int, decay_type: str) -> "RunCurve":
        """The curve of a `warmup_stable_decay` that begins to decay after `at` updates, with this momentum schedule."""
        given = {key: self.schedule.kwargs.get(key) for key in _KEPT_BY_COOLDOWN}
        given |= {"num_decay_steps": num_decay, "decay_type": decay_type}
        named = resolve_schedule(format_spec("warmup_stable_decay", given))
        schedule = dataclasses.replace(self.schedule, name=named.name, kwargs=named.kwargs)
        return dataclasses.replace(self, schedule=schedule, num_updates=at + num_decay)

    def in_words(self, at: int) -> str:
        """The first, highest and last rate from an update on, and the one before."""
        rest = self.lrs[at:]
        highest = at + int(rest.argmax())
        return (
            f"{rest[0]:.4g} first (update {at}), {rest.max():.4g} highest (update {highest}), {rest[-1]:.4g} last "
            f"(update {self.num_updates - 1}); {self.lrs[at - 1]:.4g} before"
        )


def agreeing_updates(one: RunCurve, other: RunCurve) -> int:
    """Updates from the start in which the rates and momenta of two curves are equal."""
    num = min(one.num_updates, other.num_updates)
    momenta = one.momenta[:num], other.momenta[:num]
    differ = (one.lrs[:num] != other.lrs[:num]) | ((momenta[0] != momenta[1]) & ~np.isnan(momenta[0]))
    return int(np.argmax(differ)) if differ.any() else num
