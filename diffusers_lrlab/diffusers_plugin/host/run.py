"""A script that is not ours, while it runs: what it was asked for and has prepared, and the moments that hooks wait for."""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from ...core.errors import LabError
from ..script.source import NotRecognised
from .patches import Patches


class HostRun:
    """
    The run of the script in this process.

    Args:
        strict (`bool`): Whether it is an error if a hook does not recognise what it is for.
        patches (`Patches`, *optional*): What hooks replace, until it is closed.

    Attributes:
        arguments: Those of the script, as they were parsed.
        accelerator: The script's own, once something is prepared.
        models: What it trains, once prepared: as the script made it, without accelerate's wrappers.
        optimizer: The first one that was prepared, as the script made it. Its steps are the updates.
        num_updates: Steps of the optimizer in this process, without those before a resume.
        num_skipped: Steps of the script in this process whose update a gradient scaler left out.
        training_loader: The prepared loader that came together with an optimizer.
        on_parsed: Called with the script's arguments, which may be changed, once they are remembered.
        on_prepared: Called after each `accelerator.prepare`.
        on_update: Called after each step of the optimizer: not after micro-batches that only accumulate.
        on_step: Called after each step of the script, also where a gradient scaler left the update out.
        on_end: Called before `accelerator.end_training`, in all processes.
    """

    def __init__(self, strict: bool = False, patches: Patches | None = None):
        self.strict = strict
        self.patches = Patches() if patches is None else patches
        self.arguments: dict[str, Any] = {}
        self.accelerator: Any = None
        self.models: list[torch.nn.Module] = []
        self.optimizer: Optimizer | None = None
        self.training_loader: Any = None
        self.num_updates = self.num_skipped = 0
        self._first_step: int | None = None  # the script's count when this process began to train
        self.on_parsed: list[Callable[[argparse.Namespace], None]] = []
        self.on_prepared: list[Callable[[], None]] = []
        self.on_update: list[Callable[[], None]] = []
        self.on_step: list[Callable[[], None]] = []
        self.on_end: list[Callable[[], None]] = []

    def install(self) -> None:
        """Hooks into the places where scripts parse arguments, prepare what they train, update it, and end."""
        from accelerate import Accelerator
        from accelerate.optimizer import AcceleratedOptimizer

        def parse_and_remember(parse: Any, *args: Any, **kwargs: Any) -> Any:
            namespace, rest = parse(*args, **kwargs)
            # A copy: scripts write the length that they compute into their namespace.
            self.arguments = dict(vars(namespace))
            for call in self.on_parsed:
                call(namespace)
            return namespace, rest

        def prepare_and_remember(prepare: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            self.accelerator = accelerator
            prepared = prepare(accelerator, *args, **kwargs)
            self._remember(args, prepared if len(args) > 1 else [prepared])
            for call in self.on_prepared:
                call()
            return prepared

        def step_and_notify(step: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._remember_first_step()
            updates = self.num_updates
            step(optimizer, *args, **kwargs)
            if optimizer.optimizer is self.optimizer and optimizer.gradient_state.sync_gradients:
                self.num_skipped += self.num_updates == updates
                for call in self.on_step:
                    call()

        def notify_and_end(end_training: Any, accelerator: Any) -> None:
            for call in self.on_end:
                call()
            end_training(accelerator)

        self.patches.wrap(argparse.ArgumentParser, "parse_known_args", parse_and_remember)
        self.patches.wrap(Accelerator, "prepare", prepare_and_remember)
        self.patches.wrap(Accelerator, "end_training", notify_and_end)
        self.patches.wrap(AcceleratedOptimizer, "step", step_and_notify)

    def _remember(self, given: Any, prepared: Any) -> None:
        known = [model for model in given if isinstance(model, torch.nn.Module) and model not in self.models]
        self.models += [model for model in known if any(each.requires_grad for each in model.parameters())]
        optimizers = [part for part in given if isinstance(part, Optimizer)]
        if not optimizers:
            return
        if self.optimizer is None:
            self.optimizer = optimizers[0]
            self.optimizer.register_step_post_hook(self._notify_of_update)
        # Scripts that make images of a class first prepare a loader for these too, without an optimizer.
        loaders = {id(loader) for loader in self.accelerator._dataloaders}
        self.training_loader = next((part for part in prepared if id(part) in loaders), self.training_loader)

    def _notify_of_update(self, *step: Any) -> None:
        self.num_updates += 1
        for call in self.on_update:
            call()

    def _remember_first_step(self) -> None:
        """Where a script is resumed, it has set its count when it begins to train."""
        if not self.num_updates and not self.num_skipped:
            count = _variable_of_script("global_step")  # of this name in all of diffusers' scripts
            self._first_step = count if isinstance(count, int) else None  # a tensor would go on counting by itself

    # --- how long it is, and how often it steps a schedule -------------------------------------------------------------

    def count_updates(self) -> int | None:
        """The optimizer updates of the whole run, from the script's arguments and its prepared data."""
        if self.arguments.get("max_train_steps"):
            return int(self.arguments["max_train_steps"])
        epochs = self.arguments.get("num_train_epochs") or self.arguments.get("num_epochs")
        # One that was prepared by itself is known when the script takes batches from it.
        loader = self.training_loader
        if loader is None and self.accelerator is not None:
            loader = self.accelerator.gradient_state.active_dataloader
        if not epochs or not hasattr(loader, "__len__"):
            return None
        return int(epochs) * math.ceil(len(loader) / self.accelerator.gradient_accumulation_steps)

    def steps_per_update(self, wrapper: Any) -> int:
        """How often accelerate steps a schedule in an update, by itself; `wrapper` is its own, of that schedule."""
        if not wrapper.step_with_optimizer:
            return int(self.accelerator.gradient_accumulation_steps)
        return 1 if wrapper.split_batches else int(self.accelerator.num_processes)

    def steps_by_script(self, num_steps: int) -> int:
        """
        How often the script steps a schedule in an update, told at the first one, before which it did so `num_steps` times:
        if all micro-batches but the last have stepped it, then each does.
        """
        accumulated = int(getattr(self.accelerator, "gradient_accumulation_steps", 1))
        if accumulated == 1:  # or by hand
            accumulated = int(self.arguments.get("gradient_accumulation_steps") or 1)
        if hasattr(self.training_loader, "__len__"):
            accumulated = min(accumulated, len(self.training_loader))  # an update ends with the epoch
        return accumulated if 0 < accumulated - 1 <= num_steps else 1

    @property
    def lab_folder(self) -> Path:
        """Where results of ours are: in the script's `--output_dir`, which it must have."""
        return Path(self.arguments["output_dir"]) / "lrlab"

    def log(self, values: dict[str, Any], update: int) -> None:
        """
        Into the script's trackers, after so many updates.

        A script counts updates that a gradient scaler leaves out, too, and trackers pass over what comes with a smaller
        number than the last. So the step is that of a `global_step` that counts them, or else as far as it is known here.
        """
        self._remember_first_step()
        updates = update if self._first_step is None else self._first_step + self.num_updates
        self.accelerator.log(values, step=updates + self.num_skipped)

    def refuse(self, option: str, reason: NotRecognised) -> None:
        """Says that an option of ours leaves this script alone; an error if hooks are strict."""
        text = f"{option} cannot be used in this script: {reason}."
        if self.strict:
            raise LabError(f"{text} (--strict)")
        self.warn(text[0].upper() + text[1:] + " It is left alone.")

    def warn(self, text: str) -> None:
        """Once for all processes."""
        from accelerate.state import PartialState

        if PartialState().is_main_process:
            sys.stderr.write(f"diffusers_lrlab: {text}\n")


def _variable_of_script(name: str) -> Any:
    """Of the innermost of the script's functions that are running and have it; else `None`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals is vars(sys.modules["__main__"]) and name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back
    return None
