"""diffusers' functions that build schedules, wrapped so that each reports the schedule that it builds."""

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...schedules.registries import SCHEDULERS
from ...schedules.resolve import resolve_schedule
from ...schedules.schedule import Schedule
from ...schedules.scheduler import build
from ..registration import schedules
from .patches import Patches

OnBuilt = Callable[[Schedule, LRScheduler, int, int | None], None]
"""Takes the schedule, its scheduler, and the script's numbers of warm-up and training steps."""


def record_schedules(patches: Patches, on_built: OnBuilt, by_lab: bool) -> None:
    """With `by_lab`, our functions build diffusers' own schedules too, so that their clock can be corrected."""
    from diffusers import optimization

    functions = optimization.TYPE_TO_SCHEDULER_FUNCTION
    own = dict(functions)

    def restore() -> None:  # the script's spec strings stay registered, unrecorded
        functions.update({member: own.get(member) or schedules.schedule_function(member.value) for member in functions})

    patches.callback(restore)
    recorded = functools.partial(_recorded, on_built, by_lab)
    patches.replace(schedules, "schedule_function", recorded)
    functions.update({member: recorded(member.value, function) for member, function in own.items()})


def _recorded(on_built: OnBuilt, by_lab: bool, spec: str, host_function: Any = None) -> Any:
    """A function that builds a schedule, by `host_function` if the schedule is diffusers' own."""
    is_host = spec in SCHEDULERS and "host" in SCHEDULERS[spec].traits

    def build_and_report(
        optimizer: Optimizer,
        num_warmup_steps: int = 0,
        num_training_steps: int | None = None,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> LRScheduler:
        num_training_steps, own = schedules.read_call(spec, num_training_steps, kwargs)
        schedule = resolve_schedule(spec, own)
        if is_host and not by_lab:
            clock = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
            names = host_function.__code__.co_varnames
            taken = {key: value for key, value in clock.items() if key in names}
            scheduler: LRScheduler = host_function(optimizer, last_epoch=last_epoch, **taken, **kwargs)
        else:
            scheduler = build(schedule, optimizer, num_warmup_steps, num_training_steps, last_epoch)
        on_built(schedule, scheduler, num_warmup_steps, num_training_steps)
        return scheduler

    return build_and_report
