"""A whole run, from a configuration to a folder that can be loaded, read and repeated."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.environment import describe_environment, launch_command, peak_memory_mb
from ..core.errors import Interrupted, LabError
from ..core.signals import interrupts_raised
from ..data.sources import settle_point_column
from ..training.checks import check_launch, check_precision, check_source, resolve_config
from ..training.config import TrainingConfig
from ..training.kinds.base import kind_of
from ..training.resolve import check_schedule
from ..training.resolve_timesteps import check_timesteps
from ..training.run_folder import RunFolder, check_same_config, find_checkpoint, read_state

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.loading import TrainingData
    from ..finder.find import FinderResult
    from ..hub.beside import PushesBeside
    from ..training.plan import Plan
    from ..training.trainer import Trainer


def train(config: TrainingConfig) -> Path | None:
    """
    Trains a diffusers pipeline.

    Args:
        config ([`TrainingConfig`]): See its fields, or `training_scripts/train_ddpm.py --help`.

    Returns:
        `Path`: the folder of the run, for `DDPMPipeline.from_pretrained`; `None` after `dry_run`.

    Raises:
        LabError: if something cannot be done as asked; before data is read or a model is built where that is possible.
        Interrupted: after SIGINT or SIGTERM, with a checkpoint written.
    """
    config = settled(config)
    # Every process looks before any of them writes: building the Accelerator below makes them wait for each other.
    checkpoint = _look_at_output(config)
    plan, data, accelerator = _prepare(config)
    found = None
    if config.auto_learning_rate and not config.dry_run:
        plan, found = _with_found_rate(plan, data, accelerator)
        config = plan.config
    accelerator.print(plan.describe())
    if config.dry_run:
        from ..forecast.describe import describe_forecast

        for text in describe_forecast(plan, data, accelerator):
            accelerator.print(text, flush=True)
        return None

    folder = RunFolder(Path(config.output_dir), accelerator.is_main_process)
    previous = folder.read_record() if checkpoint else {}
    if accelerator.is_main_process and not checkpoint and config.overwrite_output_dir:
        folder.clear()
    accelerator.wait_for_everyone()
    if found is not None and accelerator.is_main_process:
        found.save(folder.lab)

    from ..training.trainer import Trainer

    pushes = _pushes_beside(folder, config) if config.push_to_hub and accelerator.is_main_process else None
    trainer = Trainer(plan, data, accelerator, folder, on_saved=pushes)
    if checkpoint:
        trainer.resume(checkpoint)
        accelerator.print(f"Resumed at update {trainer.update} from {checkpoint}.")
    # Only now is it certain that the folder is this run's.
    record = _start_record(plan, accelerator, previous)
    record["train"]["preflight"] = _looked_before(trainer, previous) if checkpoint else _look_at_run(trainer)
    folder.write_record(record)
    _start_trackers(accelerator, config, folder)
    try:
        _run_recorded(trainer, record)
    except BaseException:
        if pushes is not None:
            pushes.stop()
        raise
    accelerator.print(trainer.audit.summary())
    if trainer.observer is not None and trainer.observer.log.num_spikes:
        accelerator.print(f"Loss spikes by noise level: {trainer.observer.log.num_spikes}, see lrlab/timesteps.png.")
    # A distributed model that is freed after its process group can wait for ever inside gloo.
    del trainer
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if pushes is not None:
        from ..hub.publish import push_run

        with interrupts_raised(lambda number: Interrupted(number, folder.path / f"checkpoint-{plan.num_updates}")):
            pushes.finish()
        accelerator.print(f"Uploaded: {push_run(folder.path, config).url}")
    return folder.path


def _pushes_beside(folder: RunFolder, config: TrainingConfig) -> PushesBeside:
    from ..hub.beside import PushesBeside

    return PushesBeside(folder.path, config)


def _start_trackers(accelerator: Accelerator, config: TrainingConfig, folder: RunFolder) -> None:
    if config.logger != "none" and accelerator.is_main_process:
        (folder.path / config.logging_dir).mkdir(parents=True, exist_ok=True)
        flat = {key: value for key, value in config.to_dict().items() if isinstance(value, (int, float, str, bool))}
        accelerator.init_trackers("diffusers_lrlab", config=flat)


def _looked_before(trainer: Trainer, previous: dict[str, Any]) -> dict[str, str]:
    """What the checks said when a run began that now goes on; its signs are told once, too."""
    before = previous.get("train", {})
    trainer.signs = before.get("signs", {})
    if trainer.config.sanity:
        trainer.accelerator.print("The sanity run is for runs that begin; this one goes on without.")
    return before.get("preflight", {})


def settled(config: TrainingConfig) -> TrainingConfig:
    """A configuration with everything filled in that can be known without reading data."""
    check_source(config)
    return resolve_config(dataclasses.replace(config, point_column=settle_point_column(config)))


def _look_at_output(config: TrainingConfig) -> Path | None:
    """The checkpoint to go on from, if any, once it is known that the result can be put where it is to go."""
    check_launch()
    check_schedule(config)
    check_timesteps(config)
    checkpoint = find_checkpoint(config)
    if checkpoint:
        if config.auto_learning_rate:  # it was found when the run began
            config.learning_rate, config.auto_learning_rate = read_state(checkpoint)["config"]["learning_rate"], False
        check_same_config(config, checkpoint)
    if config.push_to_hub and int(os.environ.get("RANK", 0)) == 0:
        from ..hub.publish import check_can_push

        check_can_push(config)
    return checkpoint


def prepare(config: TrainingConfig) -> tuple[Plan, TrainingData, Accelerator]:
    """
    All of a run but its trainer and its folder, for what is to be known before it.

    Raises:
        LabError: if something cannot be done as asked; before data is read or a model is built where that is possible.
    """
    config = settled(config)
    check_launch()
    check_schedule(config)
    check_timesteps(config)
    return _prepare(config)


def _prepare(config: TrainingConfig) -> tuple[Plan, TrainingData, Accelerator]:
    from ..training.plan import make_plan

    check_precision(config)
    model_config = kind_of(config).load_model_config(config)
    accelerator = make_accelerator(config)
    with accelerator.main_process_first():
        data = kind_of(config).load_data(config, accelerator.num_processes)
    if data.skipped:
        accelerator.print(f"Left out {len(data.skipped)} corrupt images:", *data.skipped, sep="\n  ")
    _check_same_schedule(config)
    plan = make_plan(config, data, model_config, accelerator.num_processes, accelerator.process_index)
    return plan, data, accelerator


def _check_same_schedule(config: TrainingConfig) -> None:
    """Raises a `LabError` if a published schedule changed between two processes' looks at it."""
    from accelerate.utils import gather_object

    if config.lr_scheduler_source is not None and len(found := set(gather_object([config.lr_scheduler_source]))) > 1:
        raise LabError(
            f"The published schedule changed while the processes read it: {', '.join(sorted(found))}. Start again."
        )


def _with_found_rate(plan: Plan, data: TrainingData, accelerator: Accelerator) -> tuple[Plan, FinderResult]:
    """The plan with the learning rate that the finder takes, which is told with the reason."""
    from ..finder.find import find_rate_for
    from ..training.plan import make_plan

    found = find_rate_for(plan, data, accelerator)
    accelerator.print(found.describe())  # also where there is none, which the next line is an error for
    accelerator.print(f"Learning rate {found.lr:g}, as the finder has it.\n")
    config = dataclasses.replace(plan.config, learning_rate=found.lr, auto_learning_rate=False)
    layout = plan.layout
    return make_plan(config, data, plan.model_config, layout.num_processes, layout.rank), found


def _look_at_run(trainer: Trainer) -> dict[str, str]:
    """The checks before training, and what they say."""
    from ..preflight.model_checks import overfit_one_batch
    from ..preflight.run import run_checks
    from ..preflight.subject import Subject

    config, accelerator = trainer.config, trainer.accelerator
    found: dict[str, str] = {}
    if config.preflight and accelerator.is_main_process:
        found = run_checks(trainer)
        for name, message in found.items():
            print(f"warning: {message} [{name}]", file=sys.stderr)  # noqa: T201
    accelerator.wait_for_everyone()
    if config.sanity:
        accelerator.print(overfit_one_batch(Subject(trainer)))
    return found


def _run_recorded(trainer: Trainer, record: dict[str, Any]) -> None:
    """Runs to the end; `run.json` tells what became of the run, whatever that is."""
    from .finish import finish_run

    started = time.perf_counter()
    try:
        for _ in trainer.updates():
            pass
        last = trainer.folder.path / f"checkpoint-{trainer.update}"
        with interrupts_raised(lambda number: Interrupted(number, last)):
            finish_run(trainer, record)
        record["run"]["status"] = "finished"
    except (Interrupted, KeyboardInterrupt):
        record["run"]["status"] = "cancelled"
        raise
    except BaseException as error:
        record["run"]["status"] = "failed"
        record["run"]["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        record["run"]["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
        record["run"]["seconds"] += time.perf_counter() - started
        record["train"]["updates_done"] = trainer.update
        record["train"]["training_seconds"] = trainer.training_seconds
        record["train"]["peak_memory_mb"] = peak_memory_mb()
        record["train"]["schedule_audit"] = trainer.audit.state_dict()
        record["train"]["skipped_corrupt_images"] = trainer.data.skipped
        record["train"]["signs"] = trainer.signs
        try:
            if trainer.observer is not None:
                trainer.observer.write()
                record["train"]["loss_spikes"] = trainer.observer.log.num_spikes
            trainer.folder.write_record(record)
        except LabError:
            # A full disk must not hide the error that says so.
            if sys.exc_info()[0] is None:
                raise


def _start_record(plan: Plan, accelerator: Accelerator, previous: dict[str, Any]) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    before = previous.get("run", {})
    return {
        "run": {
            "status": "running",
            "command": before.get("command", launch_command()),
            "started": before.get("started", now),
            "starts": [*before.get("starts", []), now],
            "seconds": before.get("seconds", 0.0),
            "ended": None,
        },
        "train": {
            "num_updates": plan.num_updates,
            "num_epochs": plan.num_epochs,
            "warmup_updates": plan.warmup_updates,
            "peak_learning_rate": plan.learning_rate,
            "global_batch": plan.layout.global_batch,
            "num_processes": accelerator.num_processes,
            "num_training_images": plan.num_images,
            "num_held_out_images": plan.num_held_out,
            "data_shape": plan.data_shape,
            "num_parameters": plan.num_parameters,
            "device": str(accelerator.device),
            "mixed_precision": accelerator.mixed_precision,
        },
        "config": plan.config.to_dict(),
        "meta": describe_environment(),
    }


def keep_freed_memory() -> None:
    """
    Lets glibc keep the memory of freed tensors for the next update.

    It would give their pages back and fault them in again at every update; `benchmarks/train_step.py` measures what that
    costs on a CPU. This holds for the whole process from then on.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except OSError:
        return  # another C library
    m_trim_threshold, m_mmap_threshold = -1, -3
    mallopt(m_trim_threshold, 2**31 - 1)
    mallopt(m_mmap_threshold, 32 * 2**20)  # the largest that glibc takes


def make_accelerator(config: TrainingConfig) -> Accelerator:
    """Device, precision and processes of a run, and the threads of this process."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, ProjectConfiguration

    on_cpu = not torch.accelerator.is_available()
    if on_cpu:
        # `accelerate launch` leaves a CPU process one thread unless told otherwise.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(config.cpu_threads or max(1, cores // processes))
        keep_freed_memory()
    folder = config.output_dir
    accelerator = Accelerator(
        # Without this, accelerate takes several processes on a CPU for so many lonely ones.
        cpu=on_cpu,
        # A plugin, since the environment of `accelerate launch` overrides the plain argument.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=config.gradient_accumulation_steps),
        mixed_precision=config.mixed_precision,
        log_with=None if config.logger == "none" else config.logger,
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=os.path.join(folder, config.logging_dir)),
        # Other processes wait while one of them samples.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))],
    )
    config.mixed_precision = accelerator.mixed_precision  # the launcher's, if none was asked for
    return accelerator
