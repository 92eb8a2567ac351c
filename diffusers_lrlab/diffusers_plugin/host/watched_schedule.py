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
from ...schedules.audit import TOLERANCE, ScheduleAudit, deviation
from ...schedules.momentum import default_lr, read_momentum, rounding_of, write_lrs
from ...schedules.schedule import Schedule, describe_schedule
from ...schedules.scheduler import CurveLR
from .run import HostRun


class AuditedSchedule:
    """A schedule of one optimizer, whose values are compared with the expected ones before each step."""

    def __init__(self, schedule: Schedule, optimizer: Optimizer, run: HostRun, strict: bool):
        self.schedule, self.optimizer, self.run, self.audit = schedule, optimizer, run, ScheduleAudit(strict)
        self.num_updates: int | None = None  # of the run, once known
        self._num_before: int | None = None  # updates before this process, once it has started to train

    @property
    def update(self) -> int:
        """Updates so far, including those before a resume."""
        return (self._num_before or 0) + self.run.steps.count(self.optimizer)

    def begin_at(self, update: int) -> None:
        self._num_before = update - self.run.steps.count(self.optimizer)

    def check(self, expected: list[tuple[Any, Any]], base_lrs: list[float]) -> None:
        """Audits the coming update by the expected learning rate and momentum of each group."""
        if self.audit.strict and self.update == self.num_updates:
            raise LabError(
                f"--strict_lr_audit: the script continues after {counted(self.num_updates, 'update')}, where its schedule "
                "ends. Give its real number of updates (--num_updates N before its name)."
            )
        groups = self.optimizer.param_groups[: len(expected)]
        applied = [(float(group["lr"]), read_momentum(group)) for group in groups]
        self.audit.check(self.update, applied, expected, base_lrs, rounding_of(self.optimizer.param_groups))

    def report(self) -> str:
        """The result of the audit, and a sentence if the script ended after another number of updates than expected."""
        text = f"{describe_schedule(self.schedule)}: {self.audit.summary()}"
        if not self.run.is_complete or self._num_before is None or self.num_updates in (None, self.update):
            return text
        return (
            f"{text} The script did {counted(self.update, 'update')} instead of the expected {self.num_updates}: if that is "
            f"its length, start it with --num_updates {self.update}."
        )


class WatchedSchedule(AuditedSchedule):
    """
    A schedule on the clock that the script gave it.

    accelerate steps a prepared schedule after an update, once per process. The script steps any other, perhaps in each
    micro-batch: an update then starts at a fraction of a step, since all its micro-batches but the last have already
    stepped the schedule.
    """

    def __init__(
        self,
        schedule: Schedule,
        scheduler: LRScheduler,
        optimizer: Optimizer,
        given: Progress,
        run: HostRun,
        strict: bool,
    ):
        super().__init__(schedule, optimizer, run, strict)
        self.scheduler = scheduler
        self.given = self.expected = given  # the script's clock and the intended one, both at update 0
        self.steps_per_update = self.own_steps_per_update = 1  # now, and by the script's clock
        self.base_lrs = [float(lr) for lr in scheduler.base_lrs]
        self.default_lr = default_lr(optimizer)
        self.base_momenta = [group.get("initial_momentum") for group in optimizer.param_groups]
        self.phase = 0.0  # position of the schedule within an update
        self.num_steps = 0  # of the schedule in this process
        self.is_by_update = False  # whether steps at other times than after an update are skipped
        # Compares or corrects the clock, once its steps and the length of the run are known.
        self.resolve_clock: Callable[[WatchedSchedule], None] | None = None
        self.wrapper: Any = None  # accelerate's, of a prepared schedule
        self.is_prepared = False  # whether accelerate steps it
        run.steps.before.append(self._before_step)

    @property
    def update(self) -> int:
        if self._num_before is None:
            return (self.scheduler.last_epoch - (0 if self.is_prepared else self.num_steps)) // self.steps_per_update
        return super().update

    def deviation(self, num_updates: int) -> str | None:
        """A message if the script's clock yields other learning rates than the intended one."""
        if not self.schedule.sets_lr:
            return None
        updates = np.arange(num_updates) + self.phase
        group = next((index for index, lr in enumerate(self.base_lrs) if lr), 0)  # the first that is not frozen
        counts = updates * self.steps_per_update
        if isinstance(self.scheduler, LambdaLR):
            factor = self.scheduler.lr_lambdas[group]
            applied = np.array([self.base_lrs[group] * factor(round(count)) for count in counts])
        else:
            applied = np.ones(num_updates) * self._at(self.given, counts, group)[0]
        expected = np.ones(num_updates) * self._at(self.expected, updates, group)[0]
        if deviation(applied, expected, max(self.base_lrs)).max() <= TOLERANCE:
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

    def takes_step(self) -> bool:
        """Counts a step that is about to be made, and returns whether the schedule takes it."""
        if self.is_by_update and self.scheduler.last_epoch >= self.update:
            return False
        self.num_steps += 1
        return True

    def begin(self) -> None:
        """Finds the first update of this process, which is not 0 in a resumed run."""
        steps = self.num_steps if self.num_steps <= self.steps_per_update else 0
        update, rest = divmod(self.scheduler.last_epoch - steps, self.steps_per_update)
        self.begin_at(update)
        self.phase = (rest + steps) / self.steps_per_update

    def _before_step(self, optimizer: Optimizer) -> None:
        if optimizer is not self.optimizer:
            return
        if self.resolve_clock is not None:
            self.resolve_clock(self)
        if self._num_before is None:
            self.begin()
        position = self.update + self.phase
        self.check([self._at(self.expected, position, index) for index in range(len(self.base_lrs))], self.base_lrs)

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
        if "best" in state or "last_epoch" not in state:  # schedules that follow a loss count losses, not updates
            raise LabError(
                "The checkpoint's schedule does not record its number of updates. Resume with the --lr_scheduler that it "
                "was trained with."
            )
        update = int(state["last_epoch"] // state.get("steps_per_update", self.own_steps_per_update))
        self.move_to(update * self.steps_per_update)
        return (
            f"the checkpoint was trained with another schedule or clock. From update {update} on, the learning rate "
            f"follows {describe_schedule(self.schedule)}: {scheduler.optimizer.param_groups[0]['lr']:.4g}."
        )

    def move_to(self, step: int) -> None:
        """Moves the schedule to a step, counted from its first one."""
        scheduler = self.scheduler
        if isinstance(scheduler, CurveLR):
            scheduler.move_to(step)
            return
        scheduler.last_epoch, scheduler._step_count = step, step + 1
        if isinstance(scheduler, LambdaLR):
            lambdas = zip(self.base_lrs, scheduler.lr_lambdas, strict=True)
            write_lrs(scheduler.optimizer.param_groups, [lr * function(step) for lr, function in lambdas])
