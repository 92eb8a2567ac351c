"""The torch schedulers of a program: their optimizers, their parts, and the length of the run by one of them."""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler

from ...audit.recorder.schedulers import bare_optimizer, describe_scheduler
from ...core.errors import LabError
from ...core.words import counted


class SchedulerLength:
    """The steps of a scheduler, which may be epochs or micro-batches: only its moves between updates tell."""

    def __init__(self, scheduler: LRScheduler, num_steps: int):
        self.scheduler, self.num_steps = scheduler, num_steps
        self._last: tuple[int, float] | None = None  # updates and position before the last step of the optimizer
        self._fault = ""

    def check(self, num_seen: int, update: int, option: str) -> None:
        """
        Before an update, the one after `num_seen` others: a `LabError` if the scheduler has not taken a step since the last.

        After the second update it may take more than one, as for updates that a gradient scaler skips.
        """
        last, position = self._last, position_of(self.scheduler)
        self._last = num_seen, position
        if last is not None and last[0] != num_seen:
            moved = position - last[1]
            if moved != 1 if last[0] == 0 else moved == 0 and position < self.num_steps:
                self._fault = f"It took {counted(moved, 'step', 'g')} between update {update - 1} and update {update}."
        if self._fault:  # again, if the program has caught it
            raise LabError(
                f"{option}: the {counted(self.num_steps, 'step', ',')} of {type(self.scheduler).__name__} are not updates: "
                f"give --num_updates N before the program's name. {self._fault}"
            )


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


def parts_of(scheduler: LRScheduler) -> list[LRScheduler]:
    """The schedulers that a scheduler holds, such as those of a `SequentialLR` or the one after a warm-up."""
    held = [each for value in vars(scheduler).values() for each in (value if isinstance(value, list | tuple) else [value])]
    return [each for each in held if isinstance(each, LRScheduler)]


def position_of(scheduler: LRScheduler) -> float:
    """The steps that a scheduler has taken; a `ChainedScheduler` counts only in its parts."""
    own = vars(scheduler).get("last_epoch")
    return max(map(position_of, parts_of(scheduler)), default=0) if own is None else own


def length_of(scheduler: Any) -> int | None:
    """The length that a scheduler was made for, in its own steps; not that of one that it holds, which may begin later."""
    parts = getattr(scheduler, "_schedulers", [])
    if parts and not hasattr(scheduler, "_milestones"):  # ChainedScheduler
        return max((length for part in parts if (length := length_of(part))), default=None)
    length = describe_scheduler(scheduler)["length"]
    last = parts[-1] if parts else scheduler
    if length is None and isinstance(last, LinearLR) and last.end_factor < last.start_factor:  # not a warm-up
        length = last.total_iters + (scheduler._milestones[-1] if parts else 0)
    return int(length) if length else None
