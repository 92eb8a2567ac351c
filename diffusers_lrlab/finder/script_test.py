"""The finder on the updates of a third-party script, by the losses of its batches."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
from torch.optim import SGD, Optimizer

from ..core.environment import describe_environment
from ..core.errors import LabError, is_first_process
from ..core.ranges import COUNT
from ..core.words import counted
from .find import resolve_settings
from .range_test import FinderConfig
from .readings import MEMORY, Readings, no_finite_gradient
from .result import FinderResult
from .suggestions import RULES

if TYPE_CHECKING:
    from ..diffusers_plugin.hooks.find_lr import FindLrHook


class ScriptTest:
    """
    One test: `lr` is the rate of the next update, after which `add` takes the loss of its batch, from before it. An
    `optimizer` replaces the script's.
    """

    def __init__(self, optimizer: str | None = None, num_updates: int | None = None):
        self.optimizer, self.done = optimizer, 0
        config = FinderConfig(mode="classic", repeats=1)
        self._config = config if num_updates is None else dataclasses.replace(config, num_updates=num_updates)
        self.started = time.perf_counter()
        # For AdamW until the script's optimizer is known; the number of rates is the same.
        self._resolve(optimizer or "adamw")

    def _resolve(self, optimizer: str) -> None:
        self.settings = resolve_settings(self._config, optimizer)
        self.lrs = self.settings.lrs()
        self.readings = Readings(self.settings.num_updates, self.settings.stop_factor, MEMORY[self.settings.mode])

    @property
    def most_updates(self) -> int:
        return len(self.lrs)

    @property
    def lr(self) -> float:
        return float(self.lrs[self.done])

    def begin(self, optimizer: Optimizer) -> None:
        """Called before the first update, with the script's optimizer."""
        if "d" in optimizer.param_groups[0]:
            raise LabError(f"{type(optimizer).__name__} finds its learning rate by itself: leave --find_lr out.")
        self.started = time.perf_counter()
        if self.optimizer is None and isinstance(optimizer, SGD):
            self._resolve("sgd")

    def add(self, loss: float) -> bool:
        """Adds the loss of an update. Returns whether another update follows."""
        lr, self.done = self.lr, self.done + 1
        return self.readings.add(self.done, lr, loss, np.empty(0)) and self.done < len(self.lrs)

    def fail(self) -> None:
        self.readings.ended = no_finite_gradient(self.lr)

    def result(self) -> FinderResult:
        if self.done < self.settings.num_updates and self.readings.ended is None:
            self.readings.ended = f"the script ended after {self.done} of {counted(self.settings.num_updates, 'update')}"
        sweep = self.readings.sweep(self.done, 0)
        suggestions = {name: rule(sweep.lrs, sweep.losses) for name, rule in RULES.items()}
        about = {"script": sys.argv, "optimizer": self.optimizer, "meta": describe_environment()}
        return FinderResult(self.settings, (sweep,), suggestions, time.perf_counter() - self.started, about)

    def finish(self, hook: FindLrHook) -> None:
        """Writes and prints the result, and how to train with it."""
        if not self.done:
            raise LabError("--find_lr: the script ended before its first update, or without a loss at accelerator.backward.")
        if is_first_process():
            result = self.result()
            result.save(folder := hook.run.lab_folder)
            lines = [result.describe(), f"Wrote {folder}/lr_finder.json and .png; the test left no other files."]
            if result.suggestion.lr is not None:
                rate = f"{result.lr / hook.lr_per_option:.2g}"
                lines.append(f"To train with it, start the script without --find_lr and with --learning_rate {rate}.")
            elif result.suggestion.is_noise:
                lines.append(self._remedy())
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()
        hook.end()

    def _remedy(self) -> str:
        """Remedies against noise."""
        updates = min(4 * self.settings.num_updates, int(COUNT.bounds[1]))
        return (
            f"For half the noise, add --num_updates {updates} before the script's name, or use a batch four times as large "
            "(--train_batch_size, --gradient_accumulation_steps)."
        )
