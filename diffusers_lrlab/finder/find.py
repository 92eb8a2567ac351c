"""Finds a learning rate for a configuration, a trainer or a third-party script, with the evidence for it."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import SGD, Optimizer
from tqdm.auto import tqdm

from ..core.environment import describe_environment, is_watched, launch_command
from ..core.errors import LabError, arguments_named, is_first_process
from ..core.options import defaults_of, names_where
from ..core.plugins import registered_code_located
from ..core.streams import random_states_kept
from ..core.values import checked
from ..core.words import counted
from ..optimizers.entries import OPTIMIZERS
from ..training.config import TrainingConfig, as_call
from ..training.plan import Plan, make_plan
from ..training.prepare import prepare, resolve_and_check
from ..training.resume import locked_folder
from ..training.run_folder import RunFolder
from ..training.trainer import Trainer
from .on_trainer import range_test_of
from .range_test import OF_BATCHES, FinderConfig, RangeTest, Sweep
from .result import FinderResult, combine, deciding, minimum_tenth

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.loading import TrainingData
    from ..diffusers_plugin.hooks.find_lr import FindLrHook

_RANGE = (1e-7, 1e-2)  # for AdamW


@checked
def find_lr(config: TrainingConfig, settings: FinderConfig | None = None) -> FinderResult:
    """
    Tests learning rates with the model, data, optimizer and objective of a run, without starting it.

    Args:
        config ([`TrainingConfig`]): The run; its learning rate and schedule do not matter.
        settings ([`FinderConfig`], *optional*): Options of the finder.

    Returns:
        [`FinderResult`]: with `.lr`, `.describe()` and `.save(folder)`.

    Raises:
        LabError: for invalid options; where possible before data is read or a model is built.
    """
    # Making a model, and some imports, draw random numbers.
    with arguments_named(), random_states_kept():
        resolved = resolve_and_check(config)
        found = find_rate_for(*prepare(resolved), resolve_settings(settings or FinderConfig(), resolved.optimizer))
        if not launch_command():
            found.about["command"] = as_call(config, "find_lr", settings)  # with unresolved settings
        return found


def find_lr_for_folder(config: TrainingConfig, settings: FinderConfig | None = None) -> tuple[FinderResult, Path]:
    """
    Calls [`find_lr`] and saves the result in `lrlab/` of the run's folder, for the run and its card. If that folder holds a
    run already, a folder beside it is used.
    """
    settings = resolve_settings(settings or FinderConfig(), config.optimizer)
    changed = {name for name, default in defaults_of(TrainingConfig).items() if getattr(config, name) != default}
    for name in names_where(TrainingConfig, finder="refuses"):
        if name in changed:
            raise LabError(f"--{name} is for training and has no effect on the finder. Leave it out.")
    idle = [f"--{name}" for name in names_where(TrainingConfig, finder="ignores") if name in changed]
    resolved = resolve_and_check(config)
    own = resolved.output_dir
    while RunFolder(path := Path(own)).holds_run():  # whose record and card belong to an earlier test
        own = f"{path if path.name not in ('', '..') else path.resolve()}-find-lr"
    if own != resolved.output_dir and is_first_process():
        sys.stderr.write(f"{resolved.output_dir!r} holds a run and is not changed. The result goes to {own!r}.\n")
    resolved = dataclasses.replace(resolved, output_dir=own)
    with locked_folder(resolved):
        plan, data, accelerator = prepare(resolved)
        folder = RunFolder(Path(plan.config.output_dir), accelerator.is_main_process)
        result = find_rate_for(plan, data, accelerator, settings)
        if accelerator.is_main_process:
            if idle:
                sys.stderr.write(f"Options that affect the run and not the finder: {', '.join(idle)}.\n")
            result.save(folder.lab)
    return result, folder.path


@registered_code_located()
def find_rate_for(
    plan: Plan, data: TrainingData, accelerator: Accelerator, settings: FinderConfig | None = None
) -> FinderResult:
    """[`find_lr`] for a planned run; restores the accelerator."""
    with random_states_kept(), tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(plan, data, accelerator, RunFolder(Path(folder), accelerator.is_main_process))
        try:
            return find_lr_of(trainer, settings)
        finally:
            trainer.release()


def plan_with_found_rate(plan: Plan, data: TrainingData, accelerator: Accelerator) -> tuple[Plan, FinderResult]:
    """The plan with the learning rate that the finder suggests, printed with the reason."""
    found = find_rate_for(plan, data, accelerator)
    accelerator.print(found.describe())  # also without a suggestion, where `found.lr` raises
    accelerator.print(f"Learning rate {found.lr:g}, as the finder suggests.\n")
    config = dataclasses.replace(plan.config, learning_rate=found.lr, finds_learning_rate=False)
    layout = plan.layout
    return make_plan(config, data, plan.model_config, layout.num_processes, layout.rank, start=plan.start), found


def find_lr_of(trainer: Trainer, settings: FinderConfig | None = None) -> FinderResult:
    """Tests learning rates with a trainer at any update, and restores its state, to the bit."""
    settings = resolve_settings(settings or FinderConfig(), trainer.run.config.optimizer)
    started, sweeps = time.perf_counter(), []
    quiet = not trainer.accelerator.is_main_process
    for repeat in tqdm(range(settings.repeats), desc="find learning rate", unit="test", disable=quiet or not is_watched()):
        sweeps.append(range_test_of(trainer, settings, repeat))
    config, plan = trainer.run.config, trainer.run.plan
    about = {
        "data": trainer.run.data.name,
        "model": plan.model_config,
        "num_parameters": plan.num_parameters,
        "deciding": deciding(config.to_dict(), plan.num_parameters, plan.layout.global_batch),
        "optimizer": config.optimizer,
        "optimizer_kwargs": config.optimizer_kwargs,
        "global_batch": plan.layout.global_batch,
        "seed": config.seed,
        "at_update": trainer.run.update,
        "command": launch_command() or as_call(config, "find_lr"),
    }
    return _result(settings, sweeps, started, about)


def _result(settings: FinderConfig, sweeps: list[Sweep], started: float, about: dict[str, Any]) -> FinderResult:
    suggestion = combine([minimum_tenth(sweep.lrs, sweep.losses) for sweep in sweeps])
    seconds, about = time.perf_counter() - started, about | {"meta": describe_environment()}
    return FinderResult(settings, tuple(sweeps), suggestion, seconds, about)


def resolve_settings(settings: FinderConfig, optimizer: str) -> FinderConfig:
    """Checked settings with both rates; a `LabError` for an optimizer that finds its rate by itself."""
    settings.check()
    name = optimizer.partition(":")[0]
    facts = OPTIMIZERS[name].facts if name in OPTIMIZERS else {}
    if "learning_rate" in facts:
        raise LabError(f"{name!r} finds its learning rate by itself: leave --learning_rate at {facts['learning_rate']:g}.")
    scale = facts.get("learning_rate_factor", 1)
    low, high = (end * scale for end in _RANGE)
    resolved = dataclasses.replace(settings, start_lr=settings.start_lr or low, end_lr=settings.end_lr or high)
    resolved.check()
    return resolved


class ScriptTest(RangeTest):
    """
    A test on the updates of a third-party script, by the losses of its batches, which [`add`] takes after each update. An
    `optimizer` replaces the script's.
    """

    def __init__(self, optimizer: str | None = None, num_updates: int | None = None):
        self.optimizer, self.num_updates = optimizer, num_updates or FinderConfig().num_updates
        self._begin_as(optimizer or "adamw")  # until the script's is known; the number of rates is the same

    def _begin_as(self, optimizer: str) -> None:
        config = FinderConfig(repeats=1, num_updates=self.num_updates)
        super().__init__(resolve_settings(config, optimizer), OF_BATCHES)
        self.started = time.perf_counter()

    def begin(self, optimizer: Optimizer) -> None:
        """Called before the first update, with the script's optimizer."""
        if "d" in optimizer.param_groups[0]:
            raise LabError(f"{type(optimizer).__name__} finds its learning rate by itself: leave --find_lr out.")
        self._begin_as(self.optimizer or ("sgd" if isinstance(optimizer, SGD) else "adamw"))

    def result(self) -> FinderResult:
        if self.done < self.num_updates and self.ended is None:
            self.ended = f"the script ended after {self.done} of {counted(self.num_updates, 'update')}"
        return _result(self.settings, [self.sweep()], self.started, {"script": sys.argv, "optimizer": self.optimizer})

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
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()
        hook.end()
