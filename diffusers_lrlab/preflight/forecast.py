"""What a run will cost, from its first updates, a validation and a few samples: `lrlab plan` and `--dry_run`."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..core.environment import peak_memory_mb
from ..core.errors import Diverged
from ..core.streams import stream_generator
from ..core.words import counted, duration
from ..optimizers.build import optimizer_state_bytes
from ..training.pipeline import make_pipeline, sample_conditions
from ..training.prepare import launcher_compiles
from ..training.run_folder import RunFolder
from ..training.trainer import Trainer
from .checks import run_checks

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.loading import TrainingData
    from ..training.plan import Plan

_UPDATES, _WARM, _COMPILED = 20, 4, 2  # timed; of these not counted; updates that a compiled model takes to compile
_MOST_SECONDS = 30.0  # of timed updates
_STEPS = 2  # of a batch of samples


def describe_forecast(plan: Plan, data: TrainingData, accelerator: Accelerator) -> Iterator[str]:
    """
    Warnings of the checks, then the time, memory and disk space of a run, as lines of its plan.

    Times 20 updates (fewer, if they take more than 30 s), a validation and a few steps of sampling, and multiplies;
    metrics and plots at the end are not counted. All processes call this, to its end. Restores the accelerator.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(plan, data, accelerator, RunFolder(Path(folder), accelerator.is_main_process))
        if plan.config.preflight and accelerator.is_main_process:
            for name, text in run_checks(trainer).items():
                yield f"{'warning':>13}  {text} [{name}]"
        try:
            yield _time_in_words(trainer)
        except Diverged as error:
            yield f"{'warning':>13}  No forecast of the time, as the timed updates diverged: {error}"
        yield f"{'memory':>13}  {_size(peak_memory_mb() * 2**20)} at the peak of these updates, in one process"
        yield _disk_in_words(trainer)
        trainer.release()


def _time_in_words(trainer: Trainer) -> str:
    plan, config = trainer.run.plan, trainer.run.config
    first, update = _seconds_of_updates(trainer)
    # Those shown during the run, and those shown and measured at its end.
    num_samples = config.eval_batch_size * (plan.num_pictures - (not config.evaluation))
    num_samples += (config.distance_samples or 0) * config.evaluation
    parts = {
        "compiling": max(0.0, first - _COMPILED * update) if launcher_compiles() else 0.0,
        "training": update * plan.num_updates,
        "validation": seconds_of_validation(trainer) * plan.num_validations,
        "sampling": _seconds_of_samples(trainer, num_samples) if num_samples else 0.0,
    }
    each = f"{1e3 * update:.3g} ms" if update < 1 else duration(update)
    rate = plan.layout.global_batch / update
    shown_rate = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    shown = ", ".join(f"{part} {duration(seconds)}" for part, seconds in parts.items() if seconds)
    return (
        f"{'time':>13}  {duration(sum(parts.values()))}: {shown}\n{'':>13}  {each} per update, "
        f"{shown_rate} {plan.kind.name} per second; metrics and plots at the end are not counted"
    )


def _seconds_of_updates(trainer: Trainer) -> tuple[float, float]:
    """Seconds of the first updates, in which a model is compiled, and the median of an update after them."""
    run, times = trainer.run, []
    config, validation = run.config, run.validation
    run.validation, run.config = None, dataclasses.replace(config, save_images_epochs=sys.maxsize)
    started = time.perf_counter()
    for _ in islice(trainer.updates(show_progress=False), _UPDATES):
        trainer.log.sums.sum().item()  # waits for the device
        times.append(time.perf_counter() - started)
        started += times[-1]
        spent = torch.tensor(sum(times), device=trainer.accelerator.device)
        if trainer.accelerator.reduce(spent, "mean").item() > _MOST_SECONDS:  # the same on all processes
            break
    run.validation, run.config = validation, config
    return sum(times[:_COMPILED]), float(np.median(times[_WARM:] or times[-1:]))


def seconds_of_validation(trainer: Trainer) -> float:
    """Seconds of a validation; 0 without held-out data."""
    started = time.perf_counter()
    trainer.run.validation_losses()
    return time.perf_counter() - started if trainer.run.validation is not None else 0.0


def _seconds_of_samples(trainer: Trainer, num: int) -> float:
    """Seconds of so many samples, by a few steps of one batch of them."""
    run = trainer.run
    size, steps = min(num, run.kind.sampling_batch), min(_STEPS, run.config.num_inference_steps)
    pipeline = make_pipeline(run)
    pipeline.set_progress_bar_config(disable=True)
    generator = stream_generator(0, "forecast", device=run.model.device)
    started = time.perf_counter()
    run.kind.sample(pipeline, size, generator, steps, **sample_conditions(run, size))
    return (time.perf_counter() - started) * num / size * run.config.num_inference_steps / steps


def _disk_in_words(trainer: Trainer) -> str:
    run, plan, config = trainer.run, trainer.run.plan, trainer.run.config
    pipeline = 4 * plan.num_parameters
    checkpoint = pipeline * (1 + len(run.averages)) + optimizer_state_bytes(run.optimizer)
    updates = {*range(config.checkpointing_steps, plan.num_updates, config.checkpointing_steps), plan.num_updates}
    kept = set(sorted(updates)[-(config.checkpoints_total_limit or 0) :])
    if config.keep_every:
        kept |= set(range(config.keep_every, plan.num_updates + 1, config.keep_every))
    snapshots = len(plan.snapshot_updates) * pipeline * len(run.averages)
    folder = Path(config.output_dir).absolute()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    return (
        f"{'disk':>13}  {_size(pipeline + len(kept) * checkpoint + snapshots)}, with {counted(len(kept), 'checkpoint')} of "
        f"{_size(checkpoint)}; {_size(free)} free"
    )


def _size(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB" if size < 2**30 else f"{size / 2**30:,.2f} GiB"
