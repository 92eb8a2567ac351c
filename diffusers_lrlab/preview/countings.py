"""How programs count the steps of a schedule: its length, its warm-up, and its steps per update. Where these disagree, a
different curve runs from the one that was requested. Each row is what `lrlab audit` found in the program's own code
(docs/trainers, docs/reference/diffusers-scripts.md).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..core.progress import Progress


@dataclass(frozen=True)
class Counting:
    """
    A program's counting of a schedule: functions of the requested updates, the accumulation and the number of processes.
    """

    length: Callable[[int, int, int], int]
    warmup: Callable[[int, int, int], int]
    steps: Callable[[int], int]  # of the schedule at each update, by the number of processes
    schedules: frozenset[str] | None  # in which the program counts so; `None` for all
    one_process_only: bool  # others were not tested

    def is_tested(self, name: str, num_processes: int) -> bool:
        """Whether it is known what the program does with the schedule `name` on this many processes."""
        return (self.schedules is None or name in self.schedules) and not (self.one_process_only and num_processes > 1)

    def clock(self, num_updates: int, warmup_updates: int, accumulation: int, num_processes: int) -> Progress:
        """The progress that the program's schedule sees at each update, `(num_updates,)`, for the requested run."""
        layout = accumulation, num_processes
        return Progress(
            np.arange(num_updates) * self.steps(num_processes),
            self.length(num_updates, *layout),
            self.warmup(warmup_updates, *layout),
        )


COUNTINGS: dict[str, Counting] = {
    # accelerate steps the schedule once per process at each update.
    "diffusers' train_unconditional.py": Counting(
        length=lambda updates, accumulation, processes: updates * accumulation * processes,
        warmup=lambda updates, accumulation, processes: updates * accumulation,
        steps=lambda processes: processes,
        schedules=None,
        one_process_only=False,
    ),
    "sd-scripts, musubi-tuner": Counting(
        length=lambda updates, accumulation, processes: updates * processes,
        warmup=lambda updates, accumulation, processes: updates,
        steps=lambda processes: processes,
        schedules=frozenset({"linear", "cosine", "constant_with_warmup", "cosine_with_restarts"}),
        one_process_only=False,
    ),
    "OneTrainer": Counting(
        length=lambda updates, accumulation, processes: updates,
        warmup=lambda updates, accumulation, processes: updates // accumulation,
        steps=lambda processes: 1,
        schedules=frozenset({"linear", "cosine"}),
        one_process_only=True,
    ),
}
