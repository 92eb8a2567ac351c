"""A whole run, from a configuration to a folder that can be loaded, read and repeated."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import (
    Interrupted,
    arguments_named,
    continued_by,
    is_first_process,
    printable,
    system_errors_explained,
    warn,
)
from ..core.plugins import registered_code_located
from ..core.program import interrupts_raised
from ..core.values import checked
from ..core.words import counted
from ..training.config import TrainingConfig
from ..training.prepare import prepare, resolve_and_check
from ..training.resume import check_agreed, check_fresh, choose_start, locked_folder
from ..training.run_folder import RunFolder
from ..training.trackers import start_trackers

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.loading import TrainingData
    from ..training.plan import Plan


@checked
def train(config: TrainingConfig) -> Path | None:
    """
    Trains a diffusers pipeline.

    Args:
        config ([`TrainingConfig`]): The options; `lrlab train --help` describes them.

    Returns:
        `Path`: the folder of the run, for `DDPMPipeline.from_pretrained`; `None` after `dry_run`.

    Raises:
        LabError: for invalid options; where possible before data is read or a model is built.
        Interrupted: after SIGINT or SIGTERM, with a checkpoint written.
    """
    with arguments_named():
        return run_training(config)


@dataclass(frozen=True)
class Start:
    """A checkpoint of another run, from which a run starts."""

    checkpoint: Path
    record: dict[str, Any]  # what the record of the new run takes over


@continued_by("give the same command again with --resume_from_checkpoint latest")
@registered_code_located()
def run_training(config: TrainingConfig, start: Start | None = None) -> Path | None:
    """[`train`] with errors that name flags, perhaps from a checkpoint of another run."""
    resolved = resolve_and_check(config)
    with locked_folder(resolved), system_errors_explained():
        # All processes look before any writes: building the Accelerator synchronizes them.
        resolved, checkpoint = choose_start(resolved)
        if resolved.push_to_hub and is_first_process():
            from ..hub.transfer import check_can_push

            resolved = dataclasses.replace(resolved, hub_model_id=check_can_push(resolved))
        begins_at = start.checkpoint if checkpoint is None and start is not None else checkpoint
        plan, data, accelerator = prepare(resolved, begins_at)
        check_agreed(checkpoint, resolved)
        found = None
        if resolved.finds_learning_rate and not resolved.dry_run:
            from ..finder.find import plan_with_found_rate

            plan, found = plan_with_found_rate(plan, data, accelerator)
        from ..training.plan_text import describe_plan

        accelerator.print(printable(describe_plan(plan)))
        if resolved.dry_run:
            from ..preflight.forecast import describe_forecast

            for text in describe_forecast(plan, data, accelerator):
                accelerator.print(text, flush=True)
            return None
        folder = RunFolder(Path(plan.config.output_dir), accelerator.is_main_process)
        if folder.is_writer and checkpoint is None:
            # Other files may have appeared while data were read.
            check_fresh(folder, resolved.overwrite_output_dir or resolved.resume_from_checkpoint is not None)
            folder.clear()
        accelerator.wait_for_everyone()
        if found is not None and folder.is_writer:
            found.save(folder.lab)
        previous = folder.read_record() if checkpoint is not None else {} if start is None else start.record
        _train_and_record(config, plan, data, accelerator, folder, begins_at, previous)
        if resolved.push_to_hub and accelerator.is_main_process:
            from ..hub.transfer import push_folder, target_of_training

            accelerator.print(f"Uploaded: {push_folder(folder.path, target_of_training(plan.config))}")
        return folder.path


def _train_and_record(
    asked: TrainingConfig,
    plan: Plan,
    data: TrainingData,
    accelerator: Accelerator,
    folder: RunFolder,
    checkpoint: Path | None,
    previous: dict[str, Any],
) -> None:
    """Does all updates and finishes the run; `run.json` records the outcome."""
    from ..optimizers.build import optimizer_parts, untrained_in_words
    from ..optimizers.layers import parts_in_words
    from ..preflight.checks import check_before_training
    from ..training.trainer import Trainer
    from .record import finish_run, recorded, start_record

    trainer = Trainer(plan, data, accelerator, folder)
    if checkpoint is not None:
        trainer.resume(checkpoint)
        accelerator.print(f"Resumed at update {trainer.run.update} from {checkpoint}.")
    # Only now does the folder certainly belong to this run.
    record = start_record(asked, plan, accelerator, previous)
    if (parts := optimizer_parts(trainer.run.optimizer)) is not None:
        record["train"]["optimizer_parts"] = parts
        accelerator.print(f"Optimizer: {parts_in_words(parts)}.")
    if untrained := untrained_in_words(trainer.run.optimizer, trainer.run.trained):
        warn(untrained)
    if checkpoint is None:
        record["train"]["preflight"] = check_before_training(trainer)
    else:  # as at the beginning of the run
        before = previous.get("train", {})
        trainer.log.lr_warnings, record["train"]["preflight"] = before.get("warnings", {}), before.get("preflight", {})
    folder.write_record(record)
    # Inside `recorded`, so that the record has the error as it is printed.
    with recorded(trainer, record), system_errors_explained(), registered_code_located():
        if accelerator.is_main_process and plan.config.logger != "none":
            logs, name = folder.path / plan.config.logging_dir, folder.path.resolve().name
            accelerator.trackers = start_trackers(plan.config, logs, name)
        last = folder.path / f"checkpoint-{plan.num_updates}"
        with interrupts_raised(lambda number: Interrupted(number, last)):
            for _ in trainer.updates():
                pass
            finish_run(trainer, record)
    accelerator.print(trainer.run.audit.summary())
    if trainer.run.objective.sampler.began() == 0:
        name, before = plan.config.timestep_sampler, plan.config.timestep_sampler_kwargs["before"]
        updates = counted(plan.num_updates, "update", ",")
        accelerator.print(f"{name}: its own density of the timesteps never began; {before} was used for {updates}.")
    if (observer := trainer.log.observer) is not None and observer.num_spikes:
        accelerator.print(f"Loss spikes by noise level: {observer.num_spikes}, see lrlab/timesteps.png.")
    # A distributed model freed after its process group can hang in gloo.
    del trainer
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()
