"""The clock of a third-party script: expected and applied learning rates of its schedule.

accelerate steps a prepared schedule once per process at each optimizer update, and a script steps any other itself.
diffusers' scripts multiply the schedule's length by the processes, by the accumulation, or by neither. This hook compares
the schedule's clock with the updates that the script will do, corrects it if asked, and audits it at every update.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ...audit.recorder.steps import bare_optimizer
from ...core.errors import LabError
from ...core.progress import Progress
from ...core.words import counted
from ...schedules.registries import SCHEDULERS
from ...schedules.schedule import ENDLESS, Schedule, describe_schedule, resolve_schedule
from ...schedules.scheduler import CurveLR
from ..host.driven_optimizer import DrivenOptimizer
from ..host.run import HostRun
from ..host.source import HostScript, NotRecognised, lines_of
from ..host.watched_schedule import WatchedSchedule
from ..installed_hooks import Hook, Host
from ..registration import build_for_library

# Arguments of diffusers' functions that are no parameters of a schedule.
_NOT_OF_SCHEDULES = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")


def recognise(script: HostScript) -> str:
    if not script.schedule_calls:
        raise NotRecognised("it makes its schedule without diffusers.optimization.get_scheduler")
    return f"diffusers' get_scheduler makes the schedule ({lines_of(script.schedule_calls)})"


def make(host: Host) -> Hook:
    # A range test has its own number of updates, and its learning rates are not the schedule's.
    options, is_training = host.options, host.range_test is None
    num_updates = options.num_updates if is_training else None
    clock = HostClock(host.run, options.fix_lr_clock, options.strict_lr_audit, num_updates, compares=is_training)
    clock.is_replaced = options.lr_scheduler is not None
    return clock


class HostClock:
    """
    Watches the schedules of the script that runs in this process.

    With `fix`, the schedules get the script's real number of updates and one step per update. With `strict`, a deviation is
    an error. `num_updates` is for scripts whose arguments do not determine it.
    """

    def __init__(self, run: HostRun, fix: bool, strict: bool, num_updates: int | None = None, compares: bool = True):
        self.run, self.fix, self.strict, self.num_updates, self.compares = run, fix, strict, num_updates, compares
        # `compares` learning rates with the schedule's, but not in a range test.
        self.watched: list[WatchedSchedule] = []
        self.is_replaced = False  # whether --lr_scheduler of the launcher replaces the script's schedules
        self.driven: Callable[[], DrivenOptimizer | None] | None = None  # then, the optimizer that it drives

    def install(self) -> None:
        """Wraps the functions by which scripts build, prepare and step schedules."""
        if not self.is_replaced:
            self._follow_schedules_of_diffusers()
            self._follow_curves()
        self._follow_preparation()
        self.run.on_prepared.append(self._resolve_known_clocks)

    def _follow_schedules_of_diffusers(self) -> None:
        """Watches diffusers' own schedules or, to correct their clock, has ours built in their place."""
        from diffusers import optimization

        functions = optimization.TYPE_TO_SCHEDULER_FUNCTION
        names = {name for name in SCHEDULERS if "host" in SCHEDULERS[name].traits}
        own = {member: function for member, function in functions.items() if member.value in names}
        self.run.patches.callback(functions.update, own)
        for member, function in own.items():
            ours = functools.partial(build_for_library, member.value)
            functions[member] = ours if self.fix else self._watching(member.value, function)

    def _watching(self, name: str, function: Callable[..., LRScheduler]) -> Callable[..., LRScheduler]:
        """The function of diffusers, whose schedules are watched."""

        @functools.wraps(function)
        def build(*args: Any, **kwargs: Any) -> LRScheduler:
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            own = {key: value for key, value in given.items() if key not in _NOT_OF_SCHEDULES and value is not None}
            schedule = resolve_schedule(name, own)
            warmup = 0 if "no_warmup" in schedule.traits else int(given.get("num_warmup_steps", 0))
            scheduler = function(*args, **kwargs)
            self._watch(schedule, scheduler, Progress(0, int(given.get("num_training_steps", ENDLESS)), warmup))
            return scheduler

        return build

    def _follow_curves(self) -> None:
        """Watches every `CurveLR` from its constructor on, and counts the steps of all watched schedules."""

        def make_and_watch(make: Any, scheduler: CurveLR, /, *args: Any, **kwargs: Any) -> None:
            make(scheduler, *args, **kwargs)
            given = Progress(0, scheduler.plan["num_training_steps"], scheduler.plan["num_warmup_steps"])
            self._watch(scheduler.schedule, scheduler, given)

        def step_and_count(step: Any, scheduler: LRScheduler, /, *args: Any, **kwargs: Any) -> None:
            watched = self._find(scheduler)
            if watched is None or watched.takes_step():
                step(scheduler, *args, **kwargs)

        self.run.patches.wrap(CurveLR, "__init__", make_and_watch)
        self.run.patches.wrap(LRScheduler, "step", step_and_count)

    def _watch(self, schedule: Schedule, scheduler: LRScheduler, given: Progress) -> None:
        optimizer = bare_optimizer(scheduler.optimizer)  # whose steps are updates
        watched = WatchedSchedule(schedule, scheduler, optimizer, given, self.run, self.strict)
        watched.resolve_clock = self._resolve_clock
        self.watched.append(watched)

    def _follow_preparation(self) -> None:
        """Resolves clocks once everything is prepared, or before the first update if the data are prepared later."""
        from accelerate import Accelerator
        from accelerate.scheduler import AcceleratedScheduler

        def prepare_and_remember(prepare_scheduler: Any, accelerator: Any, scheduler: Any, /) -> Any:
            self.run.accelerator = accelerator
            wrapper = prepare_scheduler(accelerator, scheduler)
            watched = self._find(scheduler)
            if self.is_replaced:
                pass
            elif watched is None:
                self._report_unwatched(scheduler)
            else:
                # With step_scheduler_with_optimizer=False, accelerate only forwards the script's own steps.
                watched.is_prepared, watched.wrapper = wrapper.step_with_optimizer or self.fix, wrapper
            return wrapper

        def load_or_continue(_: Any, wrapper: AcceleratedScheduler, state: dict[str, Any], /) -> None:
            if self.is_replaced and _is_of_another(wrapper.scheduler, state):
                wrapper.scheduler.last_epoch = int(state.get("last_epoch", 0))  # its rates are replaced
            elif note := (self._find(wrapper.scheduler) or wrapper.scheduler).load_state_dict(state):
                self.run.warn(note)

        self.run.patches.wrap(Accelerator, "prepare_scheduler", prepare_and_remember)
        self.run.patches.wrap(AcceleratedScheduler, "load_state_dict", load_or_continue)

    def _resolve_known_clocks(self) -> None:
        for watched in self.watched:
            # The script's own steps are seen at the first update, and have no effect on a corrected clock.
            is_known = watched.is_prepared or self.fix and watched.optimizer is self.run.optimizer
            if watched.resolve_clock is not None and is_known and self.count_updates() is not None:
                watched.resolve_clock(watched)

    def _find(self, scheduler: Any) -> WatchedSchedule | None:
        return next((each for each in self.watched if each.scheduler is scheduler), None)

    def _report_unwatched(self, scheduler: Any) -> None:
        text = (
            f"this script makes its {type(scheduler).__name__} without diffusers.optimization.get_scheduler, or "
            "it follows a loss, so its learning rate is neither audited nor corrected."
        )
        self._complain(text, f"Remove {'--fix_lr_clock' if self.fix else '--strict_lr_audit'}.")

    def _complain(self, text: str, remedy: str) -> None:
        """An error if the clock should be corrected or is strict, otherwise a warning."""
        if self.fix or self.strict:
            raise LabError(f"{text[0].upper()}{text[1:]} {remedy}")
        self.run.warn(text)

    # --- updates of the run -------------------------------------------------------------------------------------------

    def count_updates(self) -> int | None:
        """The optimizer updates of the whole run, by `--num_updates` or the script."""
        return self.run.count_updates() if self.num_updates is None else self.num_updates

    @property
    def _counting(self) -> WatchedSchedule | DrivenOptimizer | None:
        """The schedule that counts the script's updates."""
        if self.driven is not None:
            return self.driven()
        # The first schedule of the trained optimizer: a script may make others to look at a curve.
        own = [watched for watched in self.watched if watched.optimizer is self.run.optimizer]
        return next(iter(own or self.watched), None)

    @property
    def counts(self) -> bool:
        return self._counting is not None

    @property
    def update(self) -> int:
        """Optimizer updates so far, including those before a resume, which the script's schedule tells."""
        if (counting := self._counting) is None:
            raise LabError(
                "The script builds no schedule with diffusers.optimization.get_scheduler, which counts the updates for "
                "timesteps and losses."
            )
        return counting.update

    # --- the schedule's clock -----------------------------------------------------------------------------------------

    def _resolve_clock(self, watched: WatchedSchedule) -> None:
        """Compares or corrects a schedule's clock."""
        watched.resolve_clock, wrapper = None, watched.wrapper
        watched.num_updates = num_updates = self.count_updates()
        is_by_script = wrapper is None or not wrapper.step_with_optimizer
        steps = self.run.steps_by_script(watched.num_steps) if is_by_script else self.run.steps_per_update(wrapper)
        watched.steps_per_update = watched.own_steps_per_update = steps
        if not self.compares:
            return
        if num_updates is None:
            if self.run.accelerator is not None or self.fix:
                self.run.warn(
                    "the number of updates of this script is unknown, so its schedule is audited by its own length; give "
                    "--num_updates N to diffusers_lrlab.launch.",
                )
            return
        given, asked = watched.given, self.run.arguments.get("lr_warmup_steps")
        # By the script's option if the schedule has a multiple of it.
        warmup = int(asked if given.warmup_updates and asked and given.warmup_updates % asked == 0 else given.warmup_updates)
        if warmup >= num_updates:
            text = f"warm-up of {counted(warmup, 'update')} does not fit into the script's {counted(num_updates, 'update')}"
            self._complain(f"{text}: the learning rate will not reach its peak.", "Shorten it (--lr_warmup_steps).")
            return
        is_endless = "endless" in watched.schedule.traits and given.total_updates >= ENDLESS
        watched.expected = Progress(0, given.total_updates if is_endless else num_updates, warmup)
        if self.fix:
            self._correct(watched, num_updates)
            return
        if is_by_script:
            watched.begin()
        if deviation := watched.deviation(num_updates):
            if self.strict:
                raise LabError(f"--strict_lr_audit: {deviation}")
            self.run.warn(deviation)

    def _correct(self, watched: WatchedSchedule, num_updates: int) -> None:
        clock, wrapper = watched.expected, watched.wrapper
        scheduler = cast(CurveLR, watched.scheduler)  # our functions build all
        watched.given, watched.steps_per_update = clock, 1
        vars(scheduler)["steps_per_update"] = 1  # saved with its state, for a resume
        scheduler.replan(clock.warmup_updates, clock.total_updates)
        if wrapper is None:
            done, watched.is_by_update, watched.num_steps = watched.update, True, 0
            scheduler.move_to(done)
        else:  # accelerate steps once per update if it "splits batches"
            wrapper.split_batches = wrapper.step_with_optimizer = True
        self.run.warn(
            f"{describe_schedule(watched.schedule)} now takes {counted(num_updates, 'update')}, {clock.warmup_updates} of "
            "them warm-up, one step each (--fix_lr_clock).",
        )

    # --- the audit ----------------------------------------------------------------------------------------------------

    def _audited(self) -> list[WatchedSchedule]:
        return [each for each in self.watched if each.audit.num_updates]

    @property
    def num_seen(self) -> int:
        """Schedules that an optimizer followed."""
        return len(self._audited())

    def report(self) -> str:
        """The result of the audit, a line for each schedule."""
        nothing = "LR audit: no optimizer step followed a schedule from diffusers.optimization.get_scheduler."
        return "\n".join(each.report() for each in self._audited()) or ("" if self.is_replaced else nothing)


def _is_of_another(scheduler: LRScheduler, state: dict[str, Any]) -> bool:
    """Whether a saved state is that of another class, or may be of a curve of another length."""
    return isinstance(scheduler, CurveLR) or isinstance(scheduler, LambdaLR) != ("lr_lambdas" in state)
