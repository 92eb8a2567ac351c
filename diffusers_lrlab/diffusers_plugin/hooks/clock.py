"""The clock of a script that is not ours: expected and applied learning rates of its schedule.

accelerate steps a prepared schedule once per process at each optimizer update, a script steps any other itself, and
diffusers' scripts multiply lengths by processes, by accumulation, or by neither. Here the clock of a running script's
schedule is compared with the updates that the script will do, corrected if asked, and audited at every update.
"""

import functools
from typing import Any, cast

from torch.optim.lr_scheduler import LRScheduler

from ...core.errors import LabError
from ...core.progress import Progress
from ...core.words import counted
from ...schedules.feedback import FeedbackSchedule
from ...schedules.resolve import describe_schedule
from ...schedules.schedule import ENDLESS, Schedule
from ...schedules.scheduler import CurveLR
from ..host.hook import Hook, Host
from ..host.recorded_schedules import record_schedules
from ..host.run import HostRun
from ..host.watched_schedule import WatchedFeedback, WatchedSchedule
from ..script.source import HostScript, NotRecognised, called_in


def recognise(script: HostScript) -> str:
    """Where a script makes its schedule; [`NotRecognised`] if it does so without diffusers."""
    if not script.schedule_calls:
        raise NotRecognised("it makes its schedule without diffusers.optimization.get_scheduler")
    return f"diffusers' get_scheduler makes the schedule ({called_in(script.schedule_calls)})"


def make(host: Host) -> Hook:
    # The updates of a range test are not the run's, and its rates are not the schedule's.
    options, is_training = host.options, host.range_test is None
    num_updates = options.num_updates if is_training else None
    return HostClock(host.run, options.fix_lr_clock, options.strict_lr_audit, num_updates, compares=is_training)


def clock_of(host: Host) -> "HostClock":
    """That of the script, which is there before other hooks are made."""
    return cast(HostClock, host.hooks["clock"])


class HostClock:
    """
    Watches the schedules of the script that runs in this process.

    Args:
        run (`HostRun`): What the script prepares.
        fix (`bool`): Whether to give them the script's real number of updates, and one step per update.
        strict (`bool`): Whether a deviation is an error.
        num_updates (`int`, *optional*): Updates of the run, if they do not follow from the script's arguments.
        compares (`bool`): Whether the rates are to be those of the schedule: not where they are tested.
    """

    def __init__(self, run: HostRun, fix: bool, strict: bool, num_updates: int | None = None, compares: bool = True):
        self.run, self.fix, self.strict, self.num_updates, self.compares = run, fix, strict, num_updates, compares
        self.watched: list[WatchedSchedule] = []  # schedules that follow the clock
        self.followers: list[WatchedFeedback] = []  # and those that follow a loss
        self.has_loss = False  # whether a hook shows them one, which the script does not

    def install(self) -> None:
        """Hooks into the places where scripts build schedules and prepare them."""
        record_schedules(self.run.patches, self._on_built, by_ours=self.fix)
        self._follow_curves()
        self._follow_preparation()
        self._leave_followers_to_losses()
        self.run.on_prepared.append(self._resolve_known_clocks)
        self.run.on_update.append(self._advance_followers)

    def _follow_curves(self) -> None:
        """Watches every `CurveLR`, wherever it is made, and counts the steps of all watched schedules."""

        def make_and_watch(make: Any, scheduler: CurveLR, *args: Any, **kwargs: Any) -> None:
            make(scheduler, *args, **kwargs)
            given = Progress(0, scheduler.plan["num_training_steps"], scheduler.plan["num_warmup_steps"])
            self._watch(scheduler.schedule, scheduler, given)

        def step_and_count(step: Any, scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
            watched = self._find(scheduler)
            if watched is None or watched.takes_step():
                step(scheduler, *args, **kwargs)

        self.run.patches.wrap(CurveLR, "__init__", make_and_watch)
        self.run.patches.wrap(LRScheduler, "step", step_and_count)

    def _watch(self, schedule: Schedule, scheduler: LRScheduler, given: Progress) -> WatchedSchedule:
        from accelerate.optimizer import AcceleratedOptimizer

        optimizer = scheduler.optimizer
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer  # whose steps are updates
        watched = WatchedSchedule(schedule, scheduler, optimizer, given, self.strict)
        watched.resolve_clock = functools.partial(self._resolve_clock, None, watched)
        self.watched.append(watched)
        return watched

    def _follow_preparation(self) -> None:
        """Resolves clocks when all is prepared, or before the first update if the data are prepared later or never."""
        from accelerate import Accelerator
        from accelerate.scheduler import AcceleratedScheduler

        def prepare_and_remember(prepare_scheduler: Any, accelerator: Any, scheduler: Any) -> Any:
            self.run.accelerator = accelerator
            wrapper = prepare_scheduler(accelerator, scheduler)
            if watched := self._find(scheduler):
                # With step_scheduler_with_optimizer=False, accelerate only passes the script's own steps on.
                watched.is_prepared = wrapper.step_with_optimizer or self.fix
                if watched.resolve_clock is not None:
                    watched.resolve_clock = functools.partial(self._resolve_clock, wrapper, watched)
            elif not any(scheduler is follower.scheduler for follower in self.followers):
                self._pass_by(scheduler)
            return wrapper

        def load_or_go_on(wrapper: AcceleratedScheduler, state: dict[str, Any]) -> None:
            note, scheduler = None, wrapper.scheduler
            if watched := self._find(scheduler):
                note = watched.load_state_dict(state)
            elif follower := next((each for each in self.followers if each.scheduler is scheduler), None):
                note = follower.load_state_dict(state, self.run.steps_per_update(wrapper))
            else:
                scheduler.load_state_dict(state)
            if note:
                self.run.warn(note)

        self.run.patches.wrap(Accelerator, "prepare_scheduler", prepare_and_remember)
        self.run.patches.replace(AcceleratedScheduler, "load_state_dict", load_or_go_on)

    def _leave_followers_to_losses(self) -> None:
        """Scripts step schedules without a loss. That of schedules which follow one is left out where a hook shows it."""
        from accelerate.scheduler import AcceleratedScheduler

        def step_by_the_clock(step: Any, wrapper: Any, *args: Any, **kwargs: Any) -> None:
            is_follower = isinstance(wrapper.scheduler, FeedbackSchedule) and not args and not kwargs
            if not is_follower or self.compares and not self.has_loss:
                step(wrapper, *args, **kwargs)

        self.run.patches.wrap(AcceleratedScheduler, "step", step_by_the_clock)

    def _advance_followers(self) -> None:
        for follower in self.followers if self.has_loss else ():
            follower.scheduler.advance()

    def follow_loss(self, loss: float) -> None:
        """Shows a loss of held-out data to the schedules that follow one."""
        for follower in self.followers:
            cast(Any, follower.scheduler).step(loss)

    def _resolve_known_clocks(self) -> None:
        for watched in self.watched:
            # Steps of the script's own are seen at the first update, and do not matter to a clock that is fixed.
            is_known = watched.is_prepared or self.fix and watched.optimizer is self.run.optimizer
            if watched.resolve_clock is not None and is_known and self.count_updates() is not None:
                watched.resolve_clock()

    def _find(self, scheduler: Any) -> WatchedSchedule | None:
        return next((watched for watched in self.watched if watched.scheduler is scheduler), None)

    def _pass_by(self, scheduler: Any) -> None:
        """Says that a schedule was made elsewhere, such as by transformers' `get_scheduler` or by its class."""
        text = (
            f"this script makes its {type(scheduler).__name__} without diffusers.optimization.get_scheduler, so its "
            "learning rate is neither audited nor corrected."
        )
        if self.fix or self.strict:
            flag = "--fix_lr_clock" if self.fix else "--strict_lr_audit"
            raise LabError(f"{text[0].upper()}{text[1:]} Leave {flag} out.")
        self.run.warn(text)

    def _on_built(
        self, schedule: Schedule, scheduler: LRScheduler, num_warmup_steps: int, num_training_steps: int | None
    ) -> None:
        if schedule.follows_metric:
            follower = WatchedFeedback(schedule, cast(FeedbackSchedule, scheduler), self.strict)
            self.followers.append(follower)
            if self.has_loss and num_warmup_steps:  # in updates: scripts multiply it by the processes
                follower.scheduler.num_warmup_steps = int(self.run.arguments.get("lr_warmup_steps", num_warmup_steps))
            return
        watched = self._find(scheduler)  # a `CurveLR` is watched from its constructor on
        if watched is None:
            warmup = 0 if "no_warmup" in schedule.traits else int(num_warmup_steps)
            watched = self._watch(schedule, scheduler, Progress(0, int(num_training_steps or ENDLESS), warmup))
        watched.warmup_option = "lr_warmup_steps"

    # --- the clock of the run ----------------------------------------------------------------------------------------

    def _resolve_clock(self, wrapper: Any, watched: WatchedSchedule) -> None:
        """`wrapper` is accelerate's, of a schedule that is prepared."""
        watched.resolve_clock = None
        num_updates = self.count_updates()
        is_by_script = wrapper is None or not wrapper.step_with_optimizer
        steps = self.run.steps_by_script(watched.num_steps) if is_by_script else self.run.steps_per_update(wrapper)
        watched.steps_per_update = watched.own_steps_per_update = steps
        watched.num_updates = num_updates
        if not self.compares:
            return
        if num_updates is None:
            if self.run.accelerator is not None or self.fix:
                self.run.warn(
                    "cannot know how many updates this script will do, so its schedule is audited by its own numbers; "
                    "give --num_updates N to diffusers_lrlab.launch.",
                )
            return
        given = watched.given
        endless = "endless" in watched.schedule.traits and given.total_updates >= ENDLESS
        warmup = self._asked_warmup(watched)
        if warmup >= num_updates:
            text = (
                f"warm-up of {counted(warmup, 'update')} does not fit into the {counted(num_updates, 'update')} of this "
                "script"
            )
            if self.fix or self.strict:
                raise LabError(text[0].upper() + text[1:] + ". Give it a shorter one (--lr_warmup_steps).")
            self.run.warn(text + ": the learning rate will not reach its peak.")
            return
        watched.expected = Progress(0, given.total_updates if endless else num_updates, warmup)
        if self.fix:
            self._correct(wrapper, watched, num_updates)
        else:
            if is_by_script:
                watched.begin()
            self._compare(watched, num_updates)

    def _asked_warmup(self, watched: WatchedSchedule) -> int:
        """In updates: as the script's option says, or as the user said to a curve that is made by its class path."""
        given = watched.given.warmup_updates
        asked = self.run.arguments.get(watched.warmup_option or "")
        return int(given if asked is None or not given else asked)

    @property
    def counts(self) -> bool:
        """Whether a schedule that the script built counts its updates."""
        return bool(self.watched or self.has_loss and self.followers)

    @property
    def update(self) -> int:
        """Optimizer updates done so far, by the schedule that the script built."""
        if not self.counts:
            raise LabError(
                "The script builds no schedule by diffusers.optimization.get_scheduler, which its updates are counted by: "
                "neither timesteps nor losses can follow them."
            )
        return self.followers[0].scheduler.num_updates if self._counter is None else self._counter.num_done

    @property
    def _counter(self) -> WatchedSchedule | None:
        """The first schedule of the optimizer that is prepared first: a script may make others, to look at a curve."""
        own = (watched for watched in self.watched if watched.optimizer is self.run.optimizer)
        return next(own, self.watched[0] if self.watched else None)

    def outside_checkpoints(self) -> list[WatchedSchedule]:
        """Schedules of what is trained that accelerate does not know, so that its checkpoints lack them."""
        known = {id(each.scheduler) for each in self.run.accelerator._schedulers}
        own = [watched for watched in self.watched if watched.optimizer is self.run.optimizer]
        return [watched for watched in own if id(watched.scheduler) not in known]

    @property
    def has_begun(self) -> bool:
        """Whether the coming update is counted already."""
        return self._counter is not None and self._counter.update is not None

    def count_updates(self) -> int | None:
        """The optimizer updates of the whole run, as the user said or as the script shows."""
        return self.run.count_updates() if self.num_updates is None else self.num_updates

    def _correct(self, wrapper: Any, watched: WatchedSchedule, num_updates: int) -> None:
        clock, scheduler = watched.expected, cast(CurveLR, watched.scheduler)  # since clocks are fixed
        watched.given, watched.steps_per_update = clock, 1
        vars(scheduler)["steps_per_update"] = 1  # saved with its state, so that a resume knows
        scheduler.replan(clock.warmup_updates, clock.total_updates)
        if wrapper is None:
            done, watched.is_by_update, watched.num_steps = watched.num_done, True, 0
            scheduler.move_to(done)
        else:  # what accelerate calls split batches is one step per update, whatever the batches are
            wrapper.split_batches = wrapper.step_with_optimizer = True
        self.run.warn(
            f"{describe_schedule(watched.schedule)} now takes {counted(num_updates, 'update')}, {clock.warmup_updates} of "
            "them warm-up, one step each (--fix_lr_clock).",
        )

    def _compare(self, watched: WatchedSchedule, num_updates: int) -> None:
        text = watched.deviation(num_updates)
        if text and self.strict:
            raise LabError("--strict_lr_audit: " + text)
        if text:
            self.run.warn(text)

    @property
    def num_seen(self) -> int:
        """Schedules that an optimizer followed."""
        followed = [each.audit for each in self.watched] + [each.audit for each in self.followers]
        return sum(bool(audit.num_updates) for audit in followed)

    def report(self) -> str:
        """What the audit found, in a line for each schedule."""
        lines = []
        for watched in self.watched:
            if watched.audit.num_updates:
                lines.append(f"{describe_schedule(watched.schedule)}: {watched.audit.summary()}{watched.other_length()}")
        lines += [follower.report() for follower in self.followers if follower.audit.num_updates]
        nothing = "LR audit: no optimizer step followed a schedule from diffusers.optimization.get_scheduler."
        return "\n".join(lines or [nothing])
