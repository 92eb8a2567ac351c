"""Finds a learning rate for a configuration or a trainer, with the evidence for it."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from ..core.environment import describe_environment, is_watched, launch_command
from ..core.errors import LabError, arguments_named, is_first_process
from ..core.options import defaults_of, names_where
from ..core.random_states import random_states_kept
from ..core.registered import registered_code_located
from ..core.signatures import checked
from ..optimizers.entries import OPTIMIZERS
from ..training.config import TrainingConfig, as_call
from ..training.resume import locked_folder
from ..training.run_folder import RunFolder
from .range_test import FinderConfig, range_test
from .result import FinderResult
from .saved_result import deciding
from .suggestions import RULES, combine

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.batch import Batch
    from ..data.loading import TrainingData
    from ..training.plan import Plan
    from ..training.trainer import Trainer

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
    from ..training.prepare import prepare_resolved, resolve_and_check

    # Making a model, and some imports, draw random numbers.
    with arguments_named(), random_states_kept():
        resolved = resolve_and_check(config)
        found = find_rate_for(*prepare_resolved(resolved), resolve_settings(settings or FinderConfig(), resolved.optimizer))
        if not launch_command():
            found.about["command"] = as_call(config, "find_lr", settings)  # with unresolved settings
        return found


def find_lr_for_folder(config: TrainingConfig, settings: FinderConfig | None = None) -> tuple[FinderResult, Path]:
    """
    Calls [`find_lr`] and saves the result in `lrlab/` of the run's folder, for the run and its card. If that folder holds a
    run already, a folder beside it is used.
    """
    from ..training.prepare import prepare_resolved, resolve_and_check

    settings = resolve_settings(settings or FinderConfig(), config.optimizer)
    changed = {name for name, default in defaults_of(TrainingConfig).items() if getattr(config, name) != default}
    for name in names_where(TrainingConfig, finder="refuses"):
        if name in changed:
            raise LabError(f"--{name} is for training and has no effect on the finder. Leave it out.")
    idle = [f"--{name}" for name in names_where(TrainingConfig, finder="ignores") if name in changed]
    resolved = resolve_and_check(config)
    own = _own_folder(resolved.output_dir)
    if own != resolved.output_dir and is_first_process():
        sys.stderr.write(f"{resolved.output_dir!r} holds a run and is not changed. The result goes to {own!r}.\n")
    resolved = dataclasses.replace(resolved, output_dir=own)
    with locked_folder(resolved):
        plan, data, accelerator = prepare_resolved(resolved)
        folder = RunFolder(Path(plan.config.output_dir), accelerator.is_main_process)
        result = find_rate_for(plan, data, accelerator, settings)
        if accelerator.is_main_process:
            if idle:
                sys.stderr.write(f"Options that affect the run and not the finder: {', '.join(idle)}.\n")
            result.save(folder.lab)
    return result, folder.path


def _own_folder(output_dir: str) -> str:
    """`output_dir`, or a folder beside it if that holds a run, whose record and card belong to an earlier test."""
    while RunFolder(path := Path(output_dir)).holds_run():
        output_dir = f"{path if path.name not in ('', '..') else path.resolve()}-find-lr"
    return output_dir


@registered_code_located()
def find_rate_for(
    plan: Plan, data: TrainingData, accelerator: Accelerator, settings: FinderConfig | None = None
) -> FinderResult:
    """[`find_lr`] for a planned run; restores the accelerator."""
    from ..training.trainer import Trainer

    with random_states_kept(), tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(plan, data, accelerator, RunFolder(Path(folder), accelerator.is_main_process))
        try:
            return find_lr_of(trainer, settings)
        finally:
            trainer.release()


def plan_with_found_rate(plan: Plan, data: TrainingData, accelerator: Accelerator) -> tuple[Plan, FinderResult]:
    """The plan with the learning rate that the finder suggests, printed with the reason."""
    from ..training.plan import make_plan

    found = find_rate_for(plan, data, accelerator)
    accelerator.print(found.describe())  # also without a suggestion, where `found.lr` raises
    accelerator.print(f"Learning rate {found.lr:g}, as the finder suggests.\n")
    config = dataclasses.replace(plan.config, learning_rate=found.lr, finds_learning_rate=False)
    layout = plan.layout
    return make_plan(config, data, plan.model_config, layout.num_processes, layout.rank, start=plan.start), found


def find_lr_of(
    trainer: Trainer, settings: FinderConfig | None = None, batches: Iterable[Batch] | None = None
) -> FinderResult:
    """
    Tests learning rates with a trainer at any update, and restores its state, to the bit.

    `batches` are those of [`range_test`], for a single test.
    """
    settings = resolve_settings(settings or FinderConfig(), trainer.run.config.optimizer)
    started, sweeps = time.perf_counter(), []
    repeats = settings.repeats if batches is None else 1
    quiet = not trainer.accelerator.is_main_process
    for repeat in tqdm(range(repeats), desc="find learning rate", unit="test", disable=quiet or not is_watched()):
        sweeps.append(range_test(trainer, settings, repeat, batches))
    suggestions = {name: combine([rule(sweep.lrs, sweep.losses) for sweep in sweeps]) for name, rule in RULES.items()}
    return FinderResult(settings, tuple(sweeps), suggestions, time.perf_counter() - started, _about(trainer))


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


def _about(trainer: Trainer) -> dict[str, Any]:
    config, plan = trainer.run.config, trainer.run.plan
    return {
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
        "meta": describe_environment(),
    }
