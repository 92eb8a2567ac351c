"""The finder on the updates of a third-party script, by the losses of its batches or of held-out rows."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Literal

import numpy as np
from torch.optim import SGD, Optimizer

from ..core.environment import describe_environment
from ..core.errors import LabError, is_first_process
from ..core.ranges import COUNT
from ..core.words import counted
from .find import resolve_settings
from .range_test import FinderConfig
from .readings import MEMORY, Readings, no_finite_gradient
from .result import FINDER_FILES, FinderResult
from .suggestions import RULES

if TYPE_CHECKING:
    from ..diffusers_plugin.hooks.find_lr import FindLrHook


class ScriptTest:
    """
    One test: `lr` is the rate of the next update, after which `add` takes a loss if `is_read_next`, else `None`.

    In the mode "classic" a loss is that of the batch of an update, before it; in the mode "probe" losses are of fixed rows,
    timesteps and noise: one before the first update, for `start`, and one after every fourth. An `optimizer` replaces the
    script's.
    """

    def __init__(
        self, optimizer: str | None = None, num_updates: int | None = None, mode: Literal["classic", "probe"] = "classic"
    ):
        self.optimizer, self.done = optimizer, 0
        config = FinderConfig(mode=mode, repeats=1)
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

    def start(self, loss: float) -> None:
        self.readings.start(self.lrs, loss, np.empty(0))

    @property
    def is_read_next(self) -> bool:
        return self.settings.is_read_after(self.done + 1)

    def add(self, loss: float | None) -> bool:
        """Adds the loss after an update. Returns whether another update follows."""
        lr, self.done = self.lr, self.done + 1
        goes_on = loss is None or self.readings.add(self.done, lr, loss, np.empty(0))
        return goes_on and self.done < len(self.lrs)

    def fail(self) -> None:
        self.readings.ended = no_finite_gradient(self.lr)

    def result(self, probe: str | None = None) -> FinderResult:
        """`probe` describes the losses of mode "probe"."""
        if self.done < self.settings.num_updates and self.readings.ended is None:
            self.readings.ended = f"the script ended after {self.done} of {counted(self.settings.num_updates, 'update')}"
        sweep = self.readings.sweep(self.done, 0)
        suggestions = {name: rule(sweep.lrs, sweep.losses) for name, rule in RULES.items()}
        about = {"script": sys.argv, "optimizer": self.optimizer, "meta": describe_environment()}
        about |= {} if probe is None else {"probe": probe}
        return FinderResult(self.settings, (sweep,), suggestions, time.perf_counter() - self.started, about)

    def finish(self, hook: FindLrHook) -> None:
        """Writes and prints the result, and how to train with it."""
        if not self.done:
            raise LabError("--find_lr: the script ended before its first update, or without a loss at accelerator.backward.")
        if is_first_process():
            from ..diffusers_plugin.host.files import problem_with

            result = self.result(hook.probe)
            result.save(folder := hook.run.lab_folder)
            if problem := next(filter(None, (problem_with(folder / name) for name in FINDER_FILES)), None):
                raise LabError(
                    f"--find_lr: the saved result is not readable: {problem}. Check the disk, and repeat the test."
                )
            lines = [result.describe(), f"Wrote {folder}/lr_finder.json and .png; the test left no other files."]
            if result.suggestion.lr is not None:
                rate = f"{result.lr / hook.lr_per_option:.2g}"
                lines.append(f"To train with it, start the script without --find_lr and with --learning_rate {rate}.")
            elif result.suggestion.is_noise:
                lines.append(self._remedy(hook))
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()
        hook.end()

    def _remedy(self, hook: FindLrHook) -> str:
        """Remedies against noise, the best one first."""
        larger = "use a batch four times as large (--train_batch_size, --gradient_accumulation_steps)."
        if hook.probe is not None:
            return f"The updates themselves are too noisy: {larger}"
        updates = min(4 * self.settings.num_updates, int(COUNT.bounds[1]))
        more = f"add --num_updates {updates} before the script's name, or {larger}"
        if not hook.can_hold_rows_back:
            return f"For half the noise, {more}"
        return (
            "To avoid the noise of batches, add --validation_fraction 0.1 before the script's name: the test then reads the "
            f"loss of held-out rows, with fixed timesteps and noise. Or, for half the noise, {more}"
        )
