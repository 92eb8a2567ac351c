"""The clock of a script that is not ours: expected and applied learning rates of its schedule.

accelerate steps a prepared schedule once per process at each optimizer update, and diffusers' scripts multiply lengths by
processes, by accumulation, or by neither. Here the clock of a running script's schedule is compared with the updates that
the script will do, corrected if asked, and audited at every update.
"""

import argparse
import functools
import math
import sys
from typing import Any, cast

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..core.errors import LabError
from ..core.progress import Progress
from ..schedules.audit import TOLERANCE
from ..schedules.registries import SCHEDULERS
from ..schedules.resolve import describe_schedule, resolve_schedule
from ..schedules.schedule import ENDLESS
from ..schedules.scheduler import CurveLR, build
from . import schedules as diffusers_plugin
from .host_script import NotRecognised
from .watched import WatchedSchedule


class HostClock:
    """
    Watches the schedules of the script that runs in this process.

    Args:
        fix (`bool`): Whether to give them the script's real number of updates, and one step per update.
        strict (`bool`): Whether a deviation is an error.
        num_updates (`int`, *optional*): Updates of the run, if they do not follow from the script's arguments.
        strict_hooks (`bool`): Whether it is an error if a hook does not recognise what it is for.
    """

    def __init__(self, fix: bool, strict: bool, num_updates: int | None = None, strict_hooks: bool = False):
        self.fix, self.strict, self.num_updates, self.strict_hooks = fix, strict, num_updates, strict_hooks
        self.accelerator: Any = None  # once something is prepared
        self.built: list[LRScheduler] = []
        self.watched: list[WatchedSchedule] = []  # those of them that follow the clock
        self.training_loader: Any = None  # the one that was prepared together with an optimizer
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
        from accelerate.scheduler import AcceleratedScheduler
        from accelerate.state import PartialState

        prepare, prepare_scheduler = accelerator_class.prepare, accelerator_class.prepare_scheduler

        @functools.wraps(prepare_scheduler)
        def prepare_and_remember(accelerator: Any, scheduler: Any) -> Any:
            wrapper = prepare_scheduler(accelerator, scheduler)
            if watched := self._find(scheduler):
                watched.is_prepared = True
                watched.resolve_clock = functools.partial(self._resolve_clock, accelerator, wrapper, watched)
            elif not any(scheduler is built for built in self.built):
                self._pass_by(accelerator, scheduler)
            return wrapper

        @functools.wraps(prepare)
        def prepare_and_resolve(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            self.accelerator = accelerator
            prepared = prepare(accelerator, *args, **kwargs)
            # Scripts that make images of a class first prepare a loader for these too, without an optimizer.
            if any(isinstance(part, Optimizer) for part in args):
                known = {id(loader) for loader in accelerator._dataloaders}
                loaders = [part for part in (prepared if len(args) > 1 else [prepared]) if id(part) in known]
                self.training_loader = loaders[0] if loaders else self.training_loader
            for watched in self.watched:
                if watched.resolve_clock is not None and self.count_updates() is not None:
                    watched.resolve_clock()
            return prepared

        def load_or_go_on(wrapper: AcceleratedScheduler, state: dict[str, Any]) -> None:
            watched = self._find(wrapper.scheduler)
            if watched is None:
                wrapper.scheduler.load_state_dict(state)
            elif note := watched.load_state_dict(state):
                self._warn(PartialState(), note)

        accelerator_class.prepare_scheduler = prepare_and_remember
        accelerator_class.prepare = prepare_and_resolve
        cast(Any, AcceleratedScheduler).load_state_dict = load_or_go_on

    def _find(self, scheduler: Any) -> WatchedSchedule | None:
        return next((watched for watched in self.watched if watched.scheduler is scheduler), None)

    def _pass_by(self, accelerator: Any, scheduler: Any) -> None:
        """Says that a schedule was made elsewhere, such as by transformers' `get_scheduler` or by its class."""
        text = (
            f"this script makes its {type(scheduler).__name__} without diffusers.optimization.get_scheduler, so its "
            "learning rate is neither audited nor corrected."
        )
        if self.fix or self.strict:
            flag = "--fix_lr_clock" if self.fix else "--strict_lr_audit"
            raise LabError(f"{text[0].upper()}{text[1:]} Leave {flag} out.")
        self._warn(accelerator, text)

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
            self.built.append(scheduler)
            if not schedule.follows_metric:
                total = num_training_steps or getattr(scheduler, "plan", {}).get("num_training_steps", ENDLESS)
                warmup = 0 if "no_warmup" in schedule.traits else int(num_warmup_steps)
                given = Progress(0, total, warmup)
                self.watched.append(WatchedSchedule(schedule, scheduler, optimizer, given, self.strict))
            return scheduler

        return build_and_watch

    # --- the clock of the run ----------------------------------------------------------------------------------------

    def _resolve_clock(self, accelerator: Any, wrapper: Any, watched: WatchedSchedule) -> None:
        watched.resolve_clock = None
        self.accelerator = accelerator
        num_updates = self.count_updates()
        if not wrapper.step_with_optimizer:
            watched.steps_per_update = accelerator.gradient_accumulation_steps
        elif not wrapper.split_batches:
            watched.steps_per_update = accelerator.num_processes
        watched.own_steps_per_update, watched.num_updates = watched.steps_per_update, num_updates
        if num_updates is None:
            self._warn(
                accelerator,
                "cannot know how many updates this script will do, so its schedule is audited by its own numbers; "
                "give --num_updates N to diffusers_lrlab.launch.",
            )
            return
        given = watched.given
        endless = "endless" in watched.schedule.traits and given.total_updates >= ENDLESS
        warmup = int(self.arguments.get("lr_warmup_steps", given.warmup_updates)) if given.warmup_updates else 0
        if warmup >= num_updates:
            text = f"warm-up of {warmup} updates does not fit into the {num_updates} updates of this script"
            if self.fix or self.strict:
                raise LabError(text[0].upper() + text[1:] + ". Give it a shorter one (--lr_warmup_steps).")
            self._warn(accelerator, text + ": the learning rate will not reach its peak.")
            return
        watched.expected = Progress(0, given.total_updates if endless else num_updates, warmup)
        if self.fix:
            self._correct(accelerator, wrapper, watched, num_updates)
        else:
            self._compare(accelerator, watched, num_updates)

    @property
    def update(self) -> int:
        """Optimizer updates done so far, by the first schedule that the script built."""
        if not self.watched:
            raise LabError(
                "The script builds no schedule by diffusers.optimization.get_scheduler, which its updates are counted by: "
                "neither timesteps nor losses can follow them."
            )
        watched = self.watched[0]
        done = watched.scheduler.last_epoch // watched.steps_per_update
        return done if watched.update is None else watched.update

    def refuse(self, option: str, reason: NotRecognised) -> None:
        """Says that an option of ours leaves this script alone; an error if hooks are strict."""
        text = f"{option} cannot be used in this script: {reason}."
        if self.strict_hooks:
            raise LabError(f"{text} (--strict)")
        self.warn(text[0].upper() + text[1:] + " It is left alone.")

    def warn(self, text: str) -> None:
        from accelerate.state import PartialState

        self._warn(PartialState(), text)

    def count_updates(self) -> int | None:
        """The optimizer updates of the whole run, from the script's arguments and its prepared data."""
        if self.num_updates is not None:
            return self.num_updates
        if self.arguments.get("max_train_steps"):
            return int(self.arguments["max_train_steps"])
        epochs = self.arguments.get("num_train_epochs") or self.arguments.get("num_epochs")
        # One that was prepared by itself is known when the script takes batches from it.
        loader, accelerator = self.training_loader, self.accelerator
        if loader is None and accelerator is not None:
            loader = accelerator.gradient_state.active_dataloader
        if not epochs or not hasattr(loader, "__len__"):
            return None
        return int(epochs) * math.ceil(len(loader) / accelerator.gradient_accumulation_steps)

    def _correct(self, accelerator: Any, wrapper: Any, watched: WatchedSchedule, num_updates: int) -> None:
        clock, scheduler = watched.expected, cast(CurveLR, watched.scheduler)  # since clocks are fixed
        watched.given, watched.steps_per_update = clock, 1
        vars(scheduler)["steps_per_update"] = 1  # saved with its state, so that a resume knows
        scheduler.replan(clock.warmup_updates, clock.total_updates)
        # What accelerate calls split batches is one step per update, whatever the batches are.
        wrapper.split_batches = wrapper.step_with_optimizer = True
        self._warn(
            accelerator,
            f"{describe_schedule(watched.schedule)} now takes {num_updates} updates, {clock.warmup_updates} of "
            "them warm-up, one step each (--fix_lr_clock).",
        )

    def _compare(self, accelerator: Any, watched: WatchedSchedule, num_updates: int) -> None:
        applied, expected = watched.lrs(num_updates)
        if np.abs(applied - expected).max() <= TOLERANCE * watched.base_lrs[0]:
            return
        given, name = watched.given, describe_schedule(watched.schedule)
        steps = "once" if watched.steps_per_update == 1 else f"{watched.steps_per_update} times"
        end = f"{applied[-1]:.4g} at the last update where {expected[-1]:.4g} was asked for"
        peaks = applied.argmax(), expected.argmax()
        text = (
            f"this script does {num_updates} updates, each of which steps its schedule {steps}, but made {name!r} "
            f"{given.total_updates} steps long, {given.warmup_updates} of them warm-up. The learning rate will be {end}"
            + (f", and highest at update {peaks[0]} instead of {peaks[1]}" if peaks[0] != peaks[1] else "")
            + ". Add --fix_lr_clock before the script's name to make it right."
        )
        if self.strict:
            raise LabError("--strict_lr_audit: " + text)
        self._warn(accelerator, text)

    def _warn(self, accelerator: Any, text: str) -> None:
        """`accelerator` may be its `PartialState`."""
        if accelerator.is_main_process:
            sys.stderr.write(f"diffusers_lrlab: {text}\n")

    def report(self) -> str:
        """What the audit found, in a line for each schedule."""
        lines = []
        for watched in self.watched:
            if watched.audit.num_updates:
                lines.append(f"{describe_schedule(watched.schedule)}: {watched.audit.summary()}{watched.other_length()}")
                if self.fix and not watched.is_prepared:
                    lines[-1] += (
                        " --fix_lr_clock left it alone: accelerate does not step it, so its length is the script's own."
                    )
        nothing = "LR audit: no optimizer step followed a schedule from diffusers.optimization.get_scheduler."
        return "\n".join(f"diffusers_lrlab: {line}" for line in lines or [nothing])
