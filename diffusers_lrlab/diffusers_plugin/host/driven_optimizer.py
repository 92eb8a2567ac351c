"""A program's optimizer whose learning rates follow a schedule of the launcher, by its real steps."""

import sys
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, ReduceLROnPlateau

from ...audit.recorder.steps import bare_optimizer
from ...core.errors import LabError, is_first_process
from ...core.words import counted
from ...schedules.momentum import read_momentum, write_lrs, write_momentum
from ...schedules.schedule import Schedule
from ...schedules.scheduler import CurveLR
from .run import HostRun
from .watched_schedule import AuditedSchedule

COUNT = "lrlab_update"
"""The number of updates done: a key of parameter groups, and an attribute of schedulers, so that checkpoints contain it."""


class DrivenOptimizer(AuditedSchedule):
    """
    An optimizer, and the schedulers that the program makes for it.

    Schedulers keep their own state and do what they always do, but what they write into the optimizer is replaced. Once
    `curve` is there, the rates are those of the schedule at the number of steps that the optimizer has taken.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule, run: HostRun, strict: bool):
        super().__init__(schedule, optimizer, run, strict)
        self.schedulers: list[LRScheduler] = []
        self._num_scheduler_steps = 0  # by the program, since it set their position
        self.curve: CurveLR | None = None
        self.last_update: int | None = None  # of the curve, whose rates are those of all updates after it
        self._has_said_end = False
        self._momenta = [read_momentum(group) for group in optimizer.param_groups]  # before any scheduler
        self._rates: list[Any] = []  # of the curve, as written
        self._base_lrs: list[float] = []
        self._may_differ = True  # the coming step may find other rates, as after a resume
        self._parts: list[int] = []
        self._weight_version: int | None = None

    # --- the program's schedulers -------------------------------------------------------------------------------------

    def note_scheduler_step(self, scheduler: LRScheduler, *given: Any) -> None:
        """Counts a step; one with a position, such as `scheduler.step(100)`, starts the count anew."""
        sets_position = any(type(each) is int and each == scheduler.last_epoch for each in given)
        sets_position = sets_position and not isinstance(scheduler, ReduceLROnPlateau)
        self._num_scheduler_steps = 0 if sets_position else self._num_scheduler_steps + 1

    def rates(self) -> list[Any]:
        """Copies of the learning rates, to be put back after a scheduler has written its own."""
        rates = (group["lr"] for group in self.optimizer.param_groups)
        return [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]

    def put_back(self, rates: list[Any]) -> None:
        """Replaces what a scheduler has written."""
        curve = self.curve
        if curve is not None and curve.schedule.sets_momentum:
            self._write(curve)
            return
        groups = self.optimizer.param_groups
        for group, momentum in zip(groups, self._momenta, strict=False):
            if momentum is not None and read_momentum(group) != momentum:
                write_momentum(group, momentum)
        write_lrs(groups, self._rates or rates)
        self._publish()

    def _publish(self) -> None:
        """Shows schedulers the real rates, which programs print, and the number of updates, which they save."""
        for scheduler in self.schedulers:
            scheduler._last_lr = self.rates()
            if self.curve is not None:
                vars(scheduler)[COUNT] = self.update

    # --- the schedule of the launcher ---------------------------------------------------------------------------------

    @property
    def rate(self) -> float:
        """The highest learning rate of the groups, as written."""
        return max(map(float, self._rates))

    def drive(self, num_warmup_steps: int, num_updates: int) -> None:
        """Begins to set the rates, at the update from which the program resumes."""
        groups = self.optimizer.param_groups
        if any(group["lr"] is None for group in groups):
            name = type(self.optimizer).__name__
            raise LabError(
                f"--lr_scheduler: {name} has no learning rate (lr=None), but computes its own. Give it one, such as "
                "relative_step=False and lr=1e-5 of Adafactor."
            )
        done = self._updates_before()
        for group, peak in zip(groups, self._peaks(done), strict=True):
            group["initial_lr"] = peak
        self.curve = CurveLR(self.optimizer, self.schedule, num_warmup_steps, num_updates)
        self._base_lrs = [float(lr) for lr in self.curve.base_lrs]
        self.begin_at(done)
        self.optimizer.register_load_state_dict_post_hook(self._expect_other_rates)
        self._write(self.curve)

    def _updates_before(self) -> int:
        """Updates before this process: of a checkpoint, by the best evidence there is."""
        group, schedulers = self.optimizer.param_groups[0], self.schedulers
        counts = [each[COUNT] for each in (group, *map(vars, schedulers)) if COUNT in each]
        if counts:
            return int(counts[0])
        # A checkpoint that was made without this option: Adam and its relatives count their steps.
        steps = next((state["step"] for state in self.optimizer.state.values() if "step" in state), 0)
        last = max((int(getattr(each, "last_epoch", 0)) for each in schedulers), default=0)
        return int(steps) or max(last - self._num_scheduler_steps, 0)

    def _peaks(self, done: int) -> list[float]:
        groups = self.optimizer.param_groups
        peaks = [group.get("initial_lr", group["lr"]) if done else group["lr"] for group in groups]
        peaks = [group.get("max_lr", peak) for group, peak in zip(groups, peaks, strict=True)]  # of OneCycleLR
        for scheduler in self.schedulers:
            peaks = scheduler.max_lrs if isinstance(scheduler, CyclicLR) else peaks
        return [float(peak) for peak in peaks]

    def _write(self, curve: CurveLR) -> None:
        """Sets the rates of the coming update."""
        curve.move_to(self._position)
        curve.last_epoch = self.update  # which an audit reads
        for group in self.optimizer.param_groups:
            group[COUNT] = self.update
        self._rates = self.rates()
        self._publish()

    @property
    def _position(self) -> int:
        """The coming update, or the last one of the curve."""
        return self.update if self.last_update is None else min(self.update, self.last_update)

    def _expect_other_rates(self, *_: Any) -> None:
        self._may_differ = True

    def before_step(self, option: str) -> None:
        """Sets and audits the rates of the coming update."""
        self._check_parts()
        assert self.curve is not None
        update = int(self.optimizer.param_groups[0].get(COUNT, self.update))
        if update != self.update:  # its state was loaded
            self.begin_at(update)
            self._may_differ = True
        if self._may_differ or not self._has_its_rates():
            self._write(self.curve)
            self._may_differ = False
        self._say_if_past_end(option)
        self.check([self.curve.values(self._position, group) for group in range(len(self._base_lrs))], self._base_lrs)

    def after_step(self) -> None:
        if self.curve is not None:
            self._write(self.curve)

    @property
    def num_past_end(self) -> int:
        """Updates of this process after the last one of the curve."""
        if self.last_update is None:
            return 0
        return max(self.update - max(self.last_update + 1, self._num_before or 0), 0)

    def _say_if_past_end(self, option: str) -> None:
        """Before an update: a line if it is the first one after the last of the curve."""
        if self.last_update is None or self.update <= self.last_update or self._has_said_end:
            return
        self._has_said_end = True
        if is_first_process():
            sys.stderr.write(
                f"diffusers_lrlab: {option} has ended after {counted(self.last_update + 1, 'update', ',')}, and the program "
                f"goes on. The learning rate stays that of the last update, {self.rate:.4g}.\n"
            )

    # --- errors -------------------------------------------------------------------------------------------------------

    def _check_parts(self) -> None:
        parts = [id(group["params"][0]) if group["params"] else 0 for group in self.optimizer.param_groups]
        self._parts = self._parts or parts
        if parts != self._parts:
            raise LabError(
                "--lr_scheduler: the parameter groups of the optimizer are not those of its first step. Either its engine "
                "updates them one at a time, as ZeRO of DeepSpeed does (use its stage 0, or a single parameter group), or "
                "the program has added a group, whose rate would follow no schedule."
            )

    def _has_its_rates(self) -> bool:
        """Whether the rates are those that were written; a `LabError` if other code has set them."""
        for group, lr in zip(self.optimizer.param_groups, self._rates, strict=True):
            if isinstance(lr, torch.Tensor):  # comparing would wait for its device
                return False
            if group["lr"] != lr:
                raise LabError(
                    f"--lr_scheduler: the program itself set a learning rate of {group['lr']:.4g} where the schedule has "
                    f"{lr:.4g}, but not with a torch scheduler, which would be replaced. Switch that off in the program, "
                    "or remove --lr_scheduler."
                )
        return True

    def check_steps_are_seen(self) -> None:
        """Before a scheduler's step: raises a `LabError` if weights change by steps without hooks."""
        groups = self.optimizer.param_groups
        weight = next((weight for group in groups for weight in group["params"] if weight.requires_grad), None)
        before, self._weight_version = self._weight_version, None if weight is None else weight._version
        if before is not None and before != self._weight_version:
            name = type(self.optimizer).__name__
            raise LabError(f"--lr_scheduler: the weights change, but no step of {name} is seen: {UNSEEN}.")


UNSEEN = (
    "its step is fused into the backward pass or compiled, or the program does not call it. Switch that off in the program, "
    "or make the schedule there, by diffusers_lrlab.get_scheduler"
)


# --- the schedulers of programs --------------------------------------------------------------------------------------


def optimizers_in(values: Any) -> list[Optimizer]:
    """The optimizers among a constructor's arguments, or of schedulers among them."""
    found: list[Optimizer] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += optimizers_in(value)
        elif isinstance(value, Optimizer):
            found += [bare_optimizer(value)]
        elif isinstance(value, LRScheduler):
            found += [bare_optimizer(value.optimizer)]
    return found
