"""Replaces the learning rate scheduler of any torch program, for programs with a fixed list of schedulers, or none.

The optimizer's real steps are counted, by torch's hooks around them. Before each, its rates are set to those of the
schedule. What the program's own schedulers write in between is put back, however they are chained or stepped.
"""

import ast
import contextlib
import functools
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...audit.recorder.steps import bare_optimizer
from ...core.errors import LabError, is_first_process, must_be
from ...core.words import counted
from ...schedules.expected import resolve_length
from ...schedules.schedule import ENDLESS, Schedule, describe_schedule, resolve_schedule
from ..host.driven_optimizer import UNSEEN, DrivenOptimizer, optimizers_in
from ..host.run import LR_OPTIONS
from ..host.source import HostScript, lines_of
from ..installed_hooks import Hook, Host
from .clock import HostClock

_OPTIM = os.path.dirname(torch.optim.__file__)


def recognise(script: HostScript) -> str:
    torch_names = {name for name, value in vars(torch.optim.lr_scheduler).items() if isinstance(value, type)}
    made = [
        call
        for call in script.nodes(ast.Call)
        if (name := ast.unparse(call.func).rpartition(".")[2]) in torch_names or name == "get_scheduler"
    ]
    if made:
        return f"the schedule made at {lines_of(made)} is replaced"
    optimizers = [call for call in script.nodes(ast.Call) if {"lr", "betas"} & {keyword.arg for keyword in call.keywords}]
    if optimizers:
        return f"the optimizer (made at {lines_of(optimizers)}) gets a schedule, as this file makes none"
    return "this file makes no scheduler and no optimizer; those of its modules are found when it runs"


def make(host: Host) -> Hook:
    options = host.options
    spec, warmup = options.lr_scheduler, options.num_warmup_steps or 0
    warmup = int(warmup) if float(warmup).is_integer() else warmup
    schedule = resolve_schedule(spec)
    if schedule.follows_metric:
        raise LabError(
            f"--lr_scheduler {spec}: must be a function of the update, got a schedule that follows a loss, which this "
            "option cannot read from a program. Hint: 'cosine' or 'wsd'."
        )
    if options.fix_lr_clock:
        raise LabError(
            "--fix_lr_clock has no effect with --lr_scheduler, whose schedule takes one step per update. Remove it."
        )
    own = [word for word in options.arguments if word.partition("=")[0] in LR_OPTIONS]
    if own:
        raise LabError(
            f"--lr_scheduler {spec}: must be the only schedule, got another one for the program itself ({own[0]} after its "
            "name). Hint: leave one of them out."
        )
    if warmup > 1 and not isinstance(warmup, int):
        wanted = "a whole number of updates, or a fraction of the run in (0, 1)"
        raise must_be("--num_warmup_steps", warmup, wanted, "it is the warm-up of --lr_scheduler")
    if options.num_updates is not None or warmup:
        _resolved(schedule, warmup, options.num_updates or ENDLESS)
    return LrSchedulerHook(host.hooks["clock"], schedule, warmup)


class LrSchedulerHook:
    """Drives the one optimizer that the program trains with: that of its schedulers or, without any, the one that steps."""

    def __init__(self, clock: HostClock, schedule: Schedule, num_warmup_steps: float):
        self.clock, self.run, self.schedule, self.num_warmup_steps = clock, clock.run, schedule, num_warmup_steps
        self.option = f"--lr_scheduler {describe_schedule(schedule)}"  # for messages
        self._scheduled: list[DrivenOptimizer] = []  # with a scheduler
        self._driven: DrivenOptimizer | None = None
        self._depth = 0  # of calls of schedulers, which may call others

    def install(self) -> None:
        self.run.patches.follow_classes(LRScheduler, self._follow)
        self.run.patches.wrap(Optimizer, "__setattr__", self._set_attribute)
        self.run.steps.before.append(self._before_step)
        self.run.steps.after.insert(0, self._after_step)  # others ask how many updates there were
        self.clock.driven = self.driven_early

    # --- the program's schedulers -------------------------------------------------------------------------------------

    def _follow(self, cls: type[LRScheduler]) -> None:
        for name, around in (("__init__", self._make), ("step", self._step)):
            if name in vars(cls):
                self.run.patches.wrap(cls, name, around)

    def _make(self, make: Any, scheduler: LRScheduler, /, *args: Any, **kwargs: Any) -> None:
        optimizers = [] if self._depth else optimizers_in([*args, *kwargs.values()])
        if not optimizers:
            make(scheduler, *args, **kwargs)
            return
        driven = self._find(optimizers[0])
        optimizers[0]._patch_step_function()  # torch's hooks, which a step that the program gave the class lacks
        with self._replacing(driven):
            make(scheduler, *args, **kwargs)
            driven.schedulers.append(scheduler)
        if driven not in self._scheduled:
            self._scheduled.append(driven)

    def _step(self, step: Any, scheduler: LRScheduler, /, *args: Any, **kwargs: Any) -> None:
        optimizer = bare_optimizer(getattr(scheduler, "optimizer", None))
        if self._depth or optimizer is None:
            step(scheduler, *args, **kwargs)
            return
        driven = self._find(optimizer)
        if not self.num_seen:
            with self.run.error_kept():
                driven.check_steps_are_seen()
        with self._replacing(driven):
            step(scheduler, *args, **kwargs)
            driven.note_scheduler_step(scheduler, *args, *kwargs.values())

    @contextlib.contextmanager
    def _replacing(self, driven: DrivenOptimizer) -> Iterator[None]:
        """Around a call of a scheduler, which may call others: puts back what it writes into the optimizer."""
        rates = driven.rates()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        driven.put_back(rates)

    def _find(self, optimizer: Optimizer) -> DrivenOptimizer:
        known = [*self._scheduled, *([self._driven] if self._driven else [])]
        found = next((each for each in known if each.optimizer is optimizer), None)
        return found or DrivenOptimizer(optimizer, self.schedule, self.run, self.clock.strict)

    def _set_attribute(self, set_value: Any, owner: Optimizer, name: str, value: Any, /) -> None:
        """Also counts a step that a program sets on its optimizer, as OneTrainer does, which torch's hooks do not see."""
        function = getattr(value, "__func__", value)
        file_name = getattr(getattr(function, "__code__", None), "co_filename", "")
        # A wrapper's optimizer has hooks, and torch's own functions around a step call it.
        if name == "step" and bare_optimizer(owner) is owner and not file_name.startswith(_OPTIM):
            calls_class = set[bool]()

            @functools.wraps(function)
            def step(owner: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
                steps, num_inner = self.run.steps, self.run.steps.num_inner
                with steps.step_without_hooks(owner):
                    result = value(*args, **kwargs)
                    calls_class.add(steps.num_inner > num_inner)
                    if len(calls_class) > 1:  # as one that counts micro-batches would
                        with self.run.error_kept():
                            raise LabError(
                                f"{self.option}: the program replaces the step of {type(owner).__name__} by one that only "
                                "sometimes calls that of the class, so its updates cannot be counted. Switch that off there."
                            )
                return result

            set_value(owner, name, types.MethodType(step, owner))  # torch can make no scheduler for a function
            return
        set_value(owner, name, value)

    # --- the optimizer's steps ----------------------------------------------------------------------------------------

    @property
    def num_seen(self) -> int:
        """Updates of this process."""
        return 0 if self._driven is None else self.run.steps.count(self._driven.optimizer)

    def _before_step(self, optimizer: Optimizer) -> None:
        if self._driven is not None and self.run.steps.is_running(self._driven.optimizer):
            if self._driven.optimizer is not optimizer:
                return  # which it calls
        with self.run.error_kept():
            self._set_rates(optimizer)

    def _set_rates(self, optimizer: Optimizer) -> None:
        if self._driven is None and (not self._scheduled or any(each.optimizer is optimizer for each in self._scheduled)):
            self._begin(self._find(optimizer))
        driven = self._driven
        if driven is None:
            return
        if driven.optimizer is not optimizer:
            self._refuse_second(driven, optimizer)
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise LabError(f"{self.option}: a step in a CUDA graph has the same rate at every replay. Switch the graph off.")
        driven.before_step(self.option)

    def _after_step(self, optimizer: Optimizer) -> None:
        if self._driven is not None and self._driven.optimizer is optimizer:
            self._driven.after_step()

    def _refuse_second(self, driven: DrivenOptimizer, optimizer: Optimizer) -> None:
        """An optimizer without a scheduler may train beside one with a scheduler."""
        has_scheduler = any(each.optimizer is optimizer for each in self._scheduled)
        if has_scheduler or not driven.schedulers:
            which = "each with a scheduler" if has_scheduler else "and no scheduler that would tell which one to drive"
            first, second = type(driven.optimizer).__name__, type(optimizer).__name__
            raise LabError(
                f"{self.option}: must have one optimizer to drive, got two ({first} and {second}), {which}. Hint: make the "
                "schedules in the program, by diffusers_lrlab.get_scheduler."
            )

    # --- beginning ----------------------------------------------------------------------------------------------------

    def driven_early(self) -> DrivenOptimizer | None:
        """The optimizer, for hooks that ask before its first step which update comes."""
        if self._driven is None and len(self._scheduled) == 1:
            self._begin(self._scheduled[0])
        return self._driven

    def _begin(self, driven: DrivenOptimizer) -> None:
        num_updates, source = self.clock.num_updates, "--num_updates"
        if num_updates is None:
            num_updates, source = self.run.count_updates(), "by the program's arguments"
        is_endless = "endless" in self.schedule.traits and self.schedule.momentum is None
        if num_updates is None and (not is_endless or 0 < self.num_warmup_steps < 1):
            raise LabError(
                f"{self.option}: needs the number of updates of the run, which the program's arguments do not tell. Hint: "
                "give --num_updates N before the program's name."
            )
        warmup, total = _resolved(self.schedule, self.num_warmup_steps, num_updates)
        driven.last_update, driven.num_updates = None if is_endless else total - 1, num_updates
        with self._replacing(driven):
            driven.drive(warmup, total)  # which makes a scheduler, too
        self._driven = driven
        if num_updates is None:
            length = f"no end, with a warm-up of {counted(warmup, 'update', ',')}" if warmup else "no end, with no warm-up"
        else:
            length = f"{counted(num_updates, 'update', ',')} ({source}), {warmup} of them warm-up"
        self._announce(driven, length)

    def _announce(self, driven: DrivenOptimizer, length: str) -> None:
        optimizer = type(driven.optimizer).__name__
        schedulers = ", ".join(type(each).__name__ for each in driven.schedulers)  # and those that they hold
        replaced = f"replaces {schedulers} of {optimizer}"
        if not schedulers:
            replaced = f"drives {optimizer}, for which the program makes no scheduler"
        peak = max(group["initial_lr"] for group in driven.optimizer.param_groups)
        text = f"{self.option} {replaced}: {length}, from a learning rate of {peak:.4g}."
        if done := driven.update:
            text += f" It goes on at update {done}."
        if is_first_process():
            sys.stderr.write(f"diffusers_lrlab: {text}\n")

    # --- the end ------------------------------------------------------------------------------------------------------

    @property
    def exit_status(self) -> int:
        """1 if the program has done updates past the end of the schedule."""
        return int(self._driven is not None and self._driven.num_past_end > 0)

    def report(self) -> str:
        """The audit and the updates past the end, or why the program was not driven."""
        if (driven := self._driven) is not None and self.num_seen:
            past = (
                f"\n{self.option}: {counted(driven.num_past_end, 'update', ',')} ran past the end of the schedule, at a "
                f"learning rate of {driven.rate:.4g}, that of its last update. The exit status is 1."
            )
            return driven.report() + past * bool(driven.num_past_end)
        return f"{self.option}: the program ended before a step of a torch optimizer was seen. If it trained, {UNSEEN}."


def _resolved(schedule: Schedule, num_warmup_steps: float, num_updates: int | None) -> tuple[int, int]:
    """Updates of warm-up and of the run. With the length checked before, an error is one of the warm-up, and names it."""
    try:
        return resolve_length(schedule, num_warmup_steps, num_updates)
    except LabError as error:
        named = f"--num_warmup_steps {num_warmup_steps:g}: " if num_warmup_steps else ""
        raise LabError(f"{named}{error}") from None
