"""The clock of a script that is not ours: expected and applied learning rates of its schedule.

accelerate steps a prepared schedule once per process at each optimizer update, and diffusers' scripts multiply lengths by
processes, by accumulation, or by neither. Here the clock of a running script's schedule is compared with the updates that
the script will do, corrected if asked, and audited at every update.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ..core.errors import LabError
from ..core.progress import Progress
from ..schedules.audit import TOLERANCE, ScheduleAudit
from ..schedules.momentum import read_momentum
from ..schedules.registries import SCHEDULERS
from ..schedules.resolve import describe_schedule, resolve_schedule
from ..schedules.schedule import ENDLESS, Schedule
from ..schedules.scheduler import CurveLR, build
from . import schedules as diffusers_plugin


@dataclass
class Length:
    """The length of a schedule, and how often it is stepped at an update."""

    num_warmup_steps: int
    num_training_steps: int
    steps_per_update: int = 1


class WatchedSchedule:
    """A schedule that a script has built, with the length that the script gave it, from there to its last update."""

    def __init__(self, schedule: Schedule, scheduler: LRScheduler, optimizer: Optimizer, length: Length, strict: bool):
        self.schedule, self.scheduler, self.length = schedule, scheduler, length
        self.expected_length = Length(length.num_warmup_steps, length.num_training_steps)
        self.audit = ScheduleAudit(strict)
        self.base_lrs = [float(lr) for lr in scheduler.base_lrs]
        self.base_momenta = [group.get("initial_momentum") for group in optimizer.param_groups]
        self.update: int | None = None
        # Once it is prepared: compares or corrects its clock as soon as the length of the run is known.
        self.resolve_clock: Callable[[], None] | None = None
        self.is_prepared = False
        optimizer.register_step_pre_hook(self._before_step)

    def applied(self, num_updates: int) -> np.ndarray:
        """The learning rates that the script's own clock gives its updates, float64."""
        counts = np.arange(num_updates) * self.length.steps_per_update
        if isinstance(self.scheduler, LambdaLR):
            return np.array([self.base_lrs[0] * self.scheduler.lr_lambdas[0](int(count)) for count in counts])
        return np.ones(num_updates) * self._at(counts, self.length, 0)[0]

    def expected(self, num_updates: int) -> np.ndarray:
        """The learning rates that were asked for, float64."""
        return np.ones(num_updates) * self._at(np.arange(num_updates), self.expected_length, 0)[0]

    def _at(self, counts: Any, length: Length, group: int) -> tuple[Any, Any]:
        progress = Progress(counts, length.num_training_steps, length.num_warmup_steps)
        return self.schedule.at(progress, self.base_lrs[group], self.base_momenta[group])

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Audits the coming update."""
        if self.resolve_clock is not None:
            self.resolve_clock()
        if self.update is None:  # not 0 in a resumed run
            self.update = self.scheduler.last_epoch // self.length.steps_per_update
        groups = range(len(self.base_lrs))
        self.audit.check(
            self.update,
            [(float(group["lr"]), read_momentum(group)) for group in optimizer.param_groups[: len(groups)]],
            [self._at(self.update, self.expected_length, index) for index in groups],
            self.base_lrs,
        )
        self.update += 1


class HostClock:
    """
    Watches the schedules of the script that runs in this process.

    Args:
        fix (`bool`): Whether to give them the script's real number of updates, and one step per update.
        strict (`bool`): Whether a deviation is an error.
        num_updates (`int`, *optional*): Updates of the run, if they do not follow from the script's arguments.
    """

    def __init__(self, fix: bool, strict: bool, num_updates: int | None = None):
        self.fix, self.strict, self.num_updates = fix, strict, num_updates
        self.watched: list[WatchedSchedule] = []
        self.arguments: dict[str, Any] = {}

    def install(self) -> None:
        """Hooks into the places where scripts parse arguments, build schedules and prepare them."""
        import accelerate
        from diffusers import optimization

        parse = argparse.ArgumentParser.parse_known_args

        @functools.wraps(parse)
        def parse_and_remember(parser: Any, *args: Any, **kwargs: Any) -> Any:
            namespace, rest = parse(parser, *args, **kwargs)
            # A copy: scripts write the length that they compute into their namespace.
            self.arguments = dict(vars(namespace))
            return namespace, rest

        cast(Any, argparse.ArgumentParser).parse_known_args = parse_and_remember
        functions = optimization.TYPE_TO_SCHEDULER_FUNCTION
        diffusers_plugin.schedule_function = self._recorded
        for member, function in functions.items():
            functions[member] = self._recorded(member.value, function)
        self._follow_preparation(accelerate.Accelerator)

    def _follow_preparation(self, accelerator_class: Any) -> None:
        """Resolves clocks when all is prepared, or before the first update if the data are prepared later or never."""
        prepare, prepare_scheduler = accelerator_class.prepare, accelerator_class.prepare_scheduler

        @functools.wraps(prepare_scheduler)
        def prepare_and_remember(accelerator: Any, scheduler: Any) -> Any:
            wrapper = prepare_scheduler(accelerator, scheduler)
            for watched in self.watched:
                if watched.scheduler is scheduler:
                    watched.is_prepared = True
                    watched.resolve_clock = functools.partial(self._resolve_clock, accelerator, wrapper, watched)
            return wrapper

        @functools.wraps(prepare)
        def prepare_and_resolve(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            prepared = prepare(accelerator, *args, **kwargs)
            for watched in self.watched:
                if watched.resolve_clock is not None and self._count_updates(accelerator) is not None:
                    watched.resolve_clock()
            return prepared

        accelerator_class.prepare_scheduler = prepare_and_remember
        accelerator_class.prepare = prepare_and_resolve

    def _recorded(self, spec: str, host_function: Any = None) -> Any:
        """The function behind a name, which records what it builds; diffusers' own are used unless clocks are fixed."""
        is_host = spec in SCHEDULERS and "host" in SCHEDULERS[spec].traits

        def build_and_watch(
            optimizer: Optimizer,
            num_warmup_steps: int = 0,
            num_training_steps: int | None = None,
            last_epoch: int = -1,
            **kwargs: Any,
        ) -> LRScheduler:
            schedule = resolve_schedule(spec, {key: value for key, value in kwargs.items() if value is not None})
            if is_host and not self.fix:
                clock = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
                names = host_function.__code__.co_varnames
                taken = {key: value for key, value in clock.items() if key in names}
                scheduler = host_function(optimizer, last_epoch=last_epoch, **taken, **kwargs)
            else:
                scheduler = build(schedule, optimizer, num_warmup_steps, num_training_steps, last_epoch)
            if not schedule.follows_metric:
                total = num_training_steps or getattr(scheduler, "plan", {}).get("num_training_steps", ENDLESS)
                length = Length(0 if "no_warmup" in schedule.traits else int(num_warmup_steps), total)
                self.watched.append(WatchedSchedule(schedule, scheduler, optimizer, length, self.strict))
            return scheduler

        return build_and_watch

    # --- the clock of the run ----------------------------------------------------------------------------------------

    def _resolve_clock(self, accelerator: Any, wrapper: Any, watched: WatchedSchedule) -> None:
        """Once all is prepared: compares the script's clock with the updates that it will do, or corrects it."""
        watched.resolve_clock = None
        num_updates = self._count_updates(accelerator)
        if not wrapper.step_with_optimizer:
            watched.length.steps_per_update = accelerator.gradient_accumulation_steps
        elif not wrapper.split_batches:
            watched.length.steps_per_update = accelerator.num_processes
        if num_updates is None:
            self._warn(
                accelerator,
                "cannot know how many updates this script will do, so its schedule is audited by its own numbers; "
                "give --num_updates N to diffusers_lrlab.launch.",
            )
            return
        endless = "endless" in watched.schedule.traits and watched.length.num_training_steps >= ENDLESS
        num_training_steps = watched.length.num_training_steps if endless else num_updates
        warmup = self.arguments.get("lr_warmup_steps", watched.length.num_warmup_steps)
        warmup = 0 if watched.length.num_warmup_steps == 0 else int(warmup)
        if warmup >= num_updates:
            text = f"warm-up of {warmup} updates does not fit into the {num_updates} updates of this script"
            if self.fix or self.strict:
                raise LabError(text[0].upper() + text[1:] + ". Give it a shorter one (--lr_warmup_steps).")
            self._warn(accelerator, text + ": the learning rate will not reach its peak.")
            return
        watched.expected_length = Length(warmup, num_training_steps)
        if self.fix:
            self._correct(accelerator, wrapper, watched, num_updates)
        else:
            self._compare(accelerator, watched, num_updates)

    def _count_updates(self, accelerator: Any) -> int | None:
        """The optimizer updates of the whole run, from the script's arguments and its prepared data."""
        if self.num_updates is not None:
            return self.num_updates
        if self.arguments.get("max_train_steps"):
            return int(self.arguments["max_train_steps"])
        epochs = self.arguments.get("num_train_epochs") or self.arguments.get("num_epochs")
        loaders = [loader for loader in accelerator._dataloaders if hasattr(loader, "__len__")]
        if not epochs or not loaders:
            return None
        return int(epochs) * math.ceil(len(loaders[0]) / accelerator.gradient_accumulation_steps)

    def _correct(self, accelerator: Any, wrapper: Any, watched: WatchedSchedule, num_updates: int) -> None:
        assert isinstance(watched.scheduler, CurveLR)
        length = watched.length = watched.expected_length
        watched.scheduler.replan(length.num_warmup_steps, length.num_training_steps)
        # What accelerate calls split batches is one step per update, whatever the batches are.
        wrapper.split_batches = wrapper.step_with_optimizer = True
        self._warn(
            accelerator,
            f"{describe_schedule(watched.schedule)} now takes {num_updates} updates, {length.num_warmup_steps} of "
            "them warm-up, one step each (--fix_lr_clock).",
        )

    def _compare(self, accelerator: Any, watched: WatchedSchedule, num_updates: int) -> None:
        applied, expected = watched.applied(num_updates), watched.expected(num_updates)
        peak = watched.base_lrs[0]
        if np.abs(applied - expected).max() <= TOLERANCE * peak:
            return
        length, name = watched.length, describe_schedule(watched.schedule)
        text = (
            f"this script does {num_updates} updates, each of which steps its schedule {length.steps_per_update} times, but "
            f"made {name!r} {length.num_training_steps} steps long, {length.num_warmup_steps} "
            f"of them warm-up. The learning rate will be {applied[-1]:.4g} at the last update where {expected[-1]:.4g} was "
            f"asked for, and highest at update {applied.argmax()} instead of {expected.argmax()}. Add --fix_lr_clock before "
            "the script's name to make it right."
        )
        if self.strict:
            raise LabError("--strict_lr_audit: " + text)
        self._warn(accelerator, text)

    def _warn(self, accelerator: Any, text: str) -> None:
        if accelerator.is_main_process:
            sys.stderr.write(f"diffusers_lrlab: {text}\n")
            sys.stderr.flush()

    def report(self) -> str:
        """What the audit found, in a line for each schedule."""
        done = [watched for watched in self.watched if watched.audit.num_updates]
        if not done:
            return (
                "diffusers_lrlab: LR audit: no optimizer step followed a schedule from diffusers.optimization.get_scheduler."
            )
        lines = []
        for watched in done:
            lines.append(f"{describe_schedule(watched.schedule)}: {watched.audit.summary()}")
            if self.fix and not watched.is_prepared:
                lines[-1] += " --fix_lr_clock left it alone: accelerate does not step it, so its length is the script's own."
        return "\n".join(f"diffusers_lrlab: {line}" for line in lines)
