"""A third-party script's schedule: its learning rate at every update, the expected one, and its state after a resume."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ...core.errors import LabError
from ...core.progress import Progress
from ...core.words import counted, times
from ...schedules.audit import TOLERANCE, ScheduleAudit
from ...schedules.feedback import FeedbackSchedule
from ...schedules.momentum import default_lr, read_momentum, rounding_of, write_lrs
from ...schedules.resolve import describe_schedule
from ...schedules.schedule import Schedule
from ...schedules.scheduler import CurveLR


class WatchedSchedule:
    """
    A schedule on the clock that the script gave it, audited at every update.

    accelerate steps a prepared schedule after an update, once per process. The script steps any other, perhaps in each
    micro-batch: an update then starts at a fraction of a step, since all its micro-batches but the last have already
    stepped the schedule.
    """

    def __init__(self, schedule: Schedule, scheduler: LRScheduler, optimizer: Optimizer, given: Progress, strict: bool):
        self.schedule, self.scheduler, self.optimizer = schedule, scheduler, optimizer
        self.given = self.expected = given  # the script's clock and the intended one, both at update 0
        self.steps_per_update = self.own_steps_per_update = 1  # now, and by the script's clock
        self.audit = ScheduleAudit(strict)
        self.base_lrs = [float(lr) for lr in scheduler.base_lrs]
        self.default_lr = default_lr(optimizer)
        self.base_momenta = [group.get("initial_momentum") for group in optimizer.param_groups]
        self.update: int | None = None  # the coming one, once this process has started to train
        self.phase = 0.0  # position of the schedule within an update
        self.num_steps = 0  # of the schedule in this process
        self.is_by_update = False  # whether steps at other times than after an update are skipped
        self.num_updates: int | None = None  # of the run, once known
        self.warmup_option: str | None = None  # the script's option for warm-up updates
        # Compares or corrects the clock, once its steps and the length of the run are known.
        self.resolve_clock: Callable[[], None] | None = None
        self.is_prepared = False  # whether accelerate steps it
        self.is_paused = False  # the optimizer's step has called that of its base class
        self.last_update: int | None = None  # whose values are those of all later ones, too
        optimizer.register_step_pre_hook(self.before_step)

    def lrs(self, num_updates: int) -> tuple[np.ndarray, np.ndarray]:
        """The learning rates at each update by the script's clock and by the intended one, float64."""
        updates, scheduler = np.arange(num_updates) + self.phase, self.scheduler
        group = next((index for index, lr in enumerate(self.base_lrs) if lr), 0)  # the first that is not frozen
        counts = updates * self.steps_per_update
        if isinstance(scheduler, LambdaLR):
            applied = np.array([self.base_lrs[group] * scheduler.lr_lambdas[group](round(count)) for count in counts])
        else:
            applied = self._at(self.given, counts, group)[0]
        return np.ones(num_updates) * applied, np.ones(num_updates) * self._at(self.expected, updates, group)[0]

    def deviation(self, num_updates: int) -> str | None:
        """A message if the script's clock yields other learning rates than the intended one."""
        if not self.schedule.sets_lr:
            return None
        applied, expected = self.lrs(num_updates)
        if np.abs(applied - expected).max() <= TOLERANCE * max(self.base_lrs):
            return None
        end = f"{applied[-1]:.4g} at the last update instead of {expected[-1]:.4g}"
        peaks = applied.argmax(), expected.argmax()
        return (
            f"this script does {counted(num_updates, 'update')} and steps its schedule {times(self.steps_per_update)} per "
            f"update, but made {describe_schedule(self.schedule)!r} {counted(self.given.total_updates, 'step')} long, "
            f"{self.given.warmup_updates} of them warm-up. The learning rate will be {end}"
            + (f", and highest at update {peaks[0]} instead of {peaks[1]}" if peaks[0] != peaks[1] else "")
            + ". Add --fix_lr_clock before the script's name to correct it."
        )

    def _at(self, clock: Progress, counts: Any, group: int = 0) -> tuple[Any, Any]:
        at = replace(clock, update=counts)
        lr, momentum = self.schedule.at(at, self.base_lrs[group], self.base_momenta[group], self.default_lr)
        return lr if self.schedule.sets_lr else None, momentum

    @property
    def num_done(self) -> int:
        """Updates so far, including those before a resume."""
        if self.update is not None:
            return self.update
        return (self.scheduler.last_epoch - (0 if self.is_prepared else self.num_steps)) // self.steps_per_update

    def takes_step(self) -> bool:
        """Counts a step that is about to be made, and returns whether the schedule takes it."""
        if self.is_by_update and self.scheduler.last_epoch >= (self.update or 0):
            return False
        self.num_steps += 1
        return True

    def begin(self) -> None:
        """Finds the first update of this process, which is not 0 in a resumed run."""
        steps = self.num_steps if self.num_steps <= self.steps_per_update else 0
        self.update, rest = divmod(self.scheduler.last_epoch - steps, self.steps_per_update)
        self.phase = (rest + steps) / self.steps_per_update

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Audits the coming update."""
        if self.is_paused:
            return
        if self.resolve_clock is not None:
            self.resolve_clock()
        if self.update is None:
            self.begin()
        assert self.update is not None
        if self.audit.strict and self.update == self.num_updates:
            raise LabError(
                f"--strict_lr_audit: the script continues after {counted(self.num_updates, 'update')}, where its schedule "
                "ends. Give its real number of updates (--num_updates N before its name)."
            )
        position = self.update + self.phase
        position = position if self.last_update is None else min(position, self.last_update)
        groups = range(len(self.base_lrs))
        self.audit.check(
            self.update,
            [(float(group["lr"]), read_momentum(group)) for group in optimizer.param_groups[: len(groups)]],
            [self._at(self.expected, position, index) for index in groups],
            self.base_lrs,
            rounding_of(optimizer.param_groups),
        )
        self.update += 1

    def length_note(self) -> str:
        """A sentence for the report if the script did another number of updates than expected."""
        if self.update is None or self.num_updates in (None, self.update):
            return ""
        return (
            f" The script did {counted(self.update, 'update')} instead of the expected {self.num_updates}: if that is its "
            f"length, start it with --num_updates {self.update}."
        )

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """
        Restores a saved schedule, even of another name or clock, and returns a message if it is another one.

        An unmodified script cannot skip its schedule when it resumes. So a different saved schedule only gives the number of
        updates done, from which this one continues.
        """
        scheduler = self.scheduler
        same = state.get("plan") == scheduler.plan if isinstance(scheduler, CurveLR) else "lr_lambdas" in state
        if same:
            scheduler.load_state_dict(state)
            return None
        update = _saved_updates(state, self.own_steps_per_update)
        self.move_to(update * self.steps_per_update)
        return (
            f"the checkpoint was trained with another schedule or clock. From update {update} on, the learning rate "
            f"follows {describe_schedule(self.schedule)}: {scheduler.optimizer.param_groups[0]['lr']:.4g}."
        )

    def move_to(self, step: int) -> None:
        """Moves the schedule to a step, counted from its first one."""
        scheduler = self.scheduler
        scheduler.last_epoch, scheduler._step_count = step, step + 1
        groups = scheduler.optimizer.param_groups
        if isinstance(scheduler, CurveLR):
            scheduler.apply()
        elif isinstance(scheduler, LambdaLR):
            lambdas = zip(self.base_lrs, scheduler.lr_lambdas, strict=True)
            write_lrs(groups, [lr * function(scheduler.last_epoch) for lr, function in lambdas])

    def report(self) -> str:
        return f"{describe_schedule(self.schedule)}: {self.audit.summary()}{self.length_note()}"


class WatchedFeedback:
    """A schedule that follows a loss, audited for whether the optimizer has the learning rates that it set."""

    def __init__(self, schedule: Schedule, scheduler: FeedbackSchedule, strict: bool):
        self.schedule, self.scheduler, self.audit = schedule, scheduler, ScheduleAudit(strict)
        self.own_steps_per_update = 1  # of other schedules in the script's loop
        self.lrs: list[float] = []  # of the first group, one for each change
        scheduler.optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, *step: Any) -> None:
        applied = [(float(group["lr"]), None) for group in optimizer.param_groups]
        expected = [(float(lr), None) for lr in self.scheduler._last_lr]
        rounding = rounding_of(optimizer.param_groups)
        self.audit.check(self.scheduler.num_updates, applied, expected, self.scheduler.peak_lrs, rounding)
        if not self.lrs or self.lrs[-1] != applied[0][0]:
            self.lrs.append(applied[0][0])

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Like [`WatchedSchedule.load_state_dict`]; after another schedule it starts without earlier losses."""
        scheduler: Any = self.scheduler
        if state.keys() >= scheduler.state_dict().keys():
            scheduler.load_state_dict(state)
            return None
        scheduler.go_on(_saved_updates(state, self.own_steps_per_update))
        return (
            f"the checkpoint was trained with another schedule. From update {scheduler.num_updates} on, the learning rate "
            f"follows {describe_schedule(self.schedule)}, which has no earlier losses: {scheduler._last_lr[0]:.4g}."
        )

    def report(self) -> str:
        return (
            f"{describe_schedule(self.schedule)}: {self.audit.summary()} It follows a loss: the learning rate was at most "
            f"{max(self.lrs):.4g}, and {self.lrs[-1]:.4g} at the last update."
        )


def _saved_updates(state: dict[str, Any], steps_per_update: int) -> int:
    """Updates done by any saved schedule. `steps_per_update` is for those other than [`CurveLR`], which saves its own."""
    if "num_updates" in state:  # feedback schedules of ours; others count losses in `last_epoch`
        return int(state["num_updates"])
    if "best" in state or "last_epoch" not in state:
        raise LabError(
            "The checkpoint's schedule does not record its number of updates. Resume with the --lr_scheduler that it was "
            "trained with."
        )
    return int(state["last_epoch"] // state.get("steps_per_update", steps_per_update))
