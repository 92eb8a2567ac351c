"""Replaces the learning rate scheduler of any torch program, for programs with a fixed list of schedulers, or none.

The optimizer's real steps are counted, by torch's hooks around them. Before each, its rates are set to those of the
schedule. What the program's own schedulers write in between is put back, however they are chained or stepped.
"""

import ast
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...audit.recorder.schedulers import bare_optimizer
from ...audit.recorder.steps import is_nested_step
from ...core.errors import LabError, is_first_process, must_be
from ...core.words import counted
from ...schedules.expected import resolve_length
from ...schedules.resolve import describe_schedule, resolve_schedule
from ...schedules.schedule import ENDLESS, Schedule
from ..host.driven_optimizer import DrivenOptimizer, is_left_out, why_unseen
from ..host.hook import Hook, Host
from ..host.program_schedulers import SchedulerLength, length_of, optimizers_in
from ..host.replaced_steps import ReplacedSteps
from ..host.watched_schedule import WatchedSchedule
from ..script.source import HostScript, lines_of
from .clock import HostClock, clock_of

_OWN_OPTIONS = ("--lr_scheduler", "--lr-scheduler", "--lr_scheduler_type")


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
    own = [word for word in options.arguments if word.partition("=")[0] in _OWN_OPTIONS]
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
    return LrSchedulerHook(clock_of(host), schedule, warmup)


class LrSchedulerHook:
    """Drives the one optimizer that the program trains with: that of its schedulers or, without any, the one that steps."""

    def __init__(self, clock: HostClock, schedule: Schedule, num_warmup_steps: float):
        self.clock, self.run, self.schedule, self.num_warmup_steps = clock, clock.run, schedule, num_warmup_steps
        self.option = f"--lr_scheduler {describe_schedule(schedule)}"  # for messages
        self.num_seen = 0  # updates
        self._last_made: Optimizer | None = None  # by the program
        self._presumed: SchedulerLength | None = None  # of the run, if the program's scheduler tells it
        self._scheduled: list[DrivenOptimizer] = []  # with a scheduler
        self._driven: DrivenOptimizer | None = None
        self._watched: WatchedSchedule | None = None  # in the clock's audit
        self._running: list[Optimizer] = []  # optimizers in their steps: one may call another
        self._replaced = ReplacedSteps(self._before_step, self._after_replaced_step)
        self._error: LabError | None = None  # that has ended the run, even if the program has caught it
        self._depth = 0  # of calls of schedulers, which may call others

    def install(self) -> None:
        patches = self.run.patches

        def follow_new(cls: type[LRScheduler], /, **kwargs: Any) -> None:
            super(LRScheduler, cls).__init_subclass__(**kwargs)
            self._follow(cls)

        def make_and_remember(init: Any, optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> None:
            self._last_made = optimizer
            init(optimizer, *args, **kwargs)

        for cls in _with_subclasses(LRScheduler):
            self._follow(cls)
        patches.replace(LRScheduler, "__init_subclass__", classmethod(follow_new))
        patches.wrap(Optimizer, "__init__", make_and_remember)
        self._replaced.install(patches)
        patches.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        patches.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self.clock.begin_early = self._begin_early

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
        rates = driven.rates()
        self._call(make, scheduler, *args, **kwargs)
        driven.schedulers.append(scheduler)
        if driven not in self._scheduled:
            self._scheduled.append(driven)
        driven.put_back(rates)

    def _step(self, step: Any, scheduler: LRScheduler, /, *args: Any, **kwargs: Any) -> None:
        optimizer = bare_optimizer(getattr(scheduler, "optimizer", None))
        if self._depth or optimizer is None:
            step(scheduler, *args, **kwargs)
            return
        driven = self._find(optimizer)
        if not self.num_seen:
            with self._kept():
                driven.check_steps_are_seen()
        rates = driven.rates()
        self._call(step, scheduler, *args, **kwargs)
        driven.count_scheduler_step(scheduler, *args, *kwargs.values())
        driven.put_back(rates)

    def _call(self, call: Any, /, *args: Any, **kwargs: Any) -> None:
        self._depth += 1
        try:
            call(*args, **kwargs)
        finally:
            self._depth -= 1

    def _find(self, optimizer: Optimizer) -> DrivenOptimizer:
        known = [*self._scheduled, *([self._driven] if self._driven else [])]
        return next((each for each in known if each.optimizer is optimizer), None) or DrivenOptimizer(optimizer)

    # --- the optimizer's steps ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Keeps an error, which a program may catch."""
        if self._error is not None:
            raise self._error
        try:
            yield
        except LabError as error:
            self._error = error
            if self._watched is not None:
                self._watched.num_updates = None  # how many there have been says nothing now
            raise

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        with self._kept():
            self._set_rates(optimizer)

    def _set_rates(self, optimizer: Optimizer) -> None:
        if self._running and not self._replaced.running and not is_nested_step():
            self._running.clear()  # left by a step that raised an error
        is_inside = any(each is optimizer or self._is_driven(each) for each in self._running)
        self._replaced.note_inner(optimizer)
        self._running.append(optimizer)
        if self._watched is not None:
            self._watched.is_paused = is_inside
        if is_inside:
            return
        if self._driven is None and (not self._scheduled or any(each.optimizer is optimizer for each in self._scheduled)):
            self._begin(self._find(optimizer))
        driven, watched = self._driven, self._watched
        if driven is None or watched is None:
            return
        if driven.optimizer is not optimizer:
            self._refuse_second(driven, optimizer)
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise LabError(f"{self.option}: a step in a CUDA graph has the same rate at every replay. Switch the graph off.")
        watched.update = driven.before_step()
        if self._presumed is not None:
            self._presumed.check(self.num_seen, watched.update, self.option)
        driven.say_if_past_end(self.option)

    def _after_replaced_step(self, optimizer: Optimizer, was_left_out: bool) -> None:
        if self._is_driven(optimizer) and self._watched is not None and not was_left_out:
            self._watched.is_paused = False
            self._watched.before_step(optimizer)
        self._after_step(optimizer, was_left_out=was_left_out)

    def _after_step(self, optimizer: Optimizer, *_: Any, was_left_out: bool = False) -> None:
        while self._running and self._running.pop() is not optimizer:
            pass
        driven, watched = self._driven, self._watched
        if driven is None or watched is None or driven.optimizer is not optimizer:
            return
        if any(each is optimizer for each in self._running):
            return  # its step called that of its base class
        was_skipped = was_left_out or is_left_out(optimizer)
        self.num_seen += not was_skipped
        watched.update = driven.after_step(was_skipped)

    def _is_driven(self, optimizer: Optimizer) -> bool:
        return self._driven is not None and self._driven.optimizer is optimizer

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

    def _begin_early(self) -> None:
        """Before the first step, for hooks that ask which update comes."""
        if self._driven is None and len(self._scheduled) == 1:
            self._begin(self._scheduled[0])

    def _begin(self, driven: DrivenOptimizer) -> None:
        num_updates, source = self._length(driven)
        is_endless = "endless" in self.schedule.traits and self.schedule.momentum is None
        if num_updates is None and (not is_endless or 0 < self.num_warmup_steps < 1):
            raise LabError(
                f"{self.option}: needs the number of updates of the run, which {source}. Hint: give --num_updates N before "
                "the program's name."
            )
        if is_endless and self._presumed is not None and not 0 < self.num_warmup_steps < 1:
            self._presumed = num_updates = None
        remedy = (
            "" if self._presumed is None else f" Or give --num_updates N, since {num_updates} is {source.partition(';')[0]}."
        )
        warmup, total = _resolved(self.schedule, self.num_warmup_steps, num_updates, remedy)
        driven.last_update = None if is_endless else total - 1
        self._depth += 1  # the curve is a scheduler, too
        curve = driven.drive(self.schedule, warmup, total)
        self._depth -= 1
        self._driven, self._watched = driven, self.clock.follow(curve, num_updates)
        self._watched.last_update = driven.last_update
        if num_updates is None:
            length = f"no end, with a warm-up of {counted(warmup, 'update', ',')}" if warmup else "no end, with no warm-up"
        else:
            length = f"{counted(num_updates, 'update', ',')} ({source}), {warmup} of them warm-up"
        self._announce(driven, length)

    def _length(self, driven: DrivenOptimizer) -> tuple[int | None, str]:
        """The updates of the run and who says so, or `None` and why it is not known."""
        if self.clock.num_updates is not None:
            return self.clock.num_updates, "--num_updates"
        if (known := self.run.count_updates()) is not None:
            return known, "by the program's arguments"
        for scheduler in driven.outermost():
            if (steps := length_of(scheduler)) is None:
                continue
            name = type(scheduler).__name__
            num_processes = int(os.environ.get("WORLD_SIZE", 1))
            if num_processes > 1 or getattr(self.run.accelerator, "gradient_accumulation_steps", 1) > 1:
                reason = f"with {counted(num_processes, 'process')}" if num_processes > 1 else "with accumulated gradients"
                return None, f"the {counted(steps, 'step', ',')} of {name} do not tell {reason}"
            self._presumed = SchedulerLength(scheduler, steps)
            return steps, f"the length of {name}; --num_updates sets another"
        return None, f"neither the program's arguments nor {driven.replaced() or 'a scheduler'} tells"

    def _announce(self, driven: DrivenOptimizer, length: str) -> None:
        optimizer = type(driven.optimizer).__name__
        replaced = f"replaces {driven.replaced()} of {optimizer}"
        if not driven.schedulers:
            replaced = f"drives {optimizer}, for which the program makes no scheduler"
        peak = max(group["initial_lr"] for group in driven.optimizer.param_groups)
        text = f"{self.option} {replaced}: {length}, from a learning rate of {peak:.4g}."
        if done := driven.update:
            text += f" It goes on at update {done}."
        if is_first_process():
            sys.stderr.write(f"diffusers_lrlab: {text}\n")

    # --- the end ------------------------------------------------------------------------------------------------------

    @property
    def num_past_end(self) -> int:
        """Updates of this process after the last one of the schedule."""
        return 0 if self._driven is None else self._driven.num_past_end

    def raise_error(self) -> None:
        """Raises the error that has ended the run, if the program has caught it."""
        if self._error is not None:
            raise self._error

    def report(self) -> str:
        """Updates past the end; else empty if it acted, since the clock reports the rates."""
        if (driven := self._driven) is not None and driven.num_past_end:
            return (
                f"{self.option}: {counted(driven.num_past_end, 'update', ',')} ran past the end of the schedule, at a "
                f"learning rate of {driven.rate:.4g}, that of its last update. The exit status is 1."
            )
        if self.num_seen:
            return ""
        if self._last_made is None:
            return f"{self.option}: the program ended without making a torch optimizer, so there was nothing to drive."
        optimizer = self._scheduled[0].optimizer if self._scheduled else self._last_made
        return (
            f"{self.option}: the program ended before a step of its optimizer was seen. Either it did not train, or "
            f"{why_unseen(optimizer)}."
        )


def _resolved(schedule: Schedule, num_warmup_steps: float, num_updates: int | None, remedy: str = "") -> tuple[int, int]:
    """Updates of warm-up and of the run. With the length checked before, an error is one of the warm-up, and names it."""
    try:
        return resolve_length(schedule, num_warmup_steps, num_updates)
    except LabError as error:
        named = f"--num_warmup_steps {num_warmup_steps:g}: " if num_warmup_steps else ""
        raise LabError(f"{named}{error}{remedy}") from None


def _with_subclasses(cls: type[LRScheduler]) -> set[type[LRScheduler]]:
    return {cls}.union(*map(_with_subclasses, cls.__subclasses__()))
