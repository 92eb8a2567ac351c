"""The forecast in words and tables, of `lrlab plan` and `--dry_run`."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..finder.range_test import FinderConfig
from ..optimizers.entries import optimizer_state_bytes
from ..preflight.run import run_checks
from .memory import MemoryForecast, available_bytes, batch_that_fits, forecast_memory, optimizer_bytes
from .timing import TimeForecast, forecast_time

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.loading import TrainingData
    from ..training.plan import Plan

_MIB = 2**20


def describe_forecast(plan: Plan, data: TrainingData, accelerator: Accelerator) -> Iterator[str]:
    """
    Memory, time and disk of a run, and its memory with other settings, as texts; takes some seconds.

    Memory comes first, before anything is run: a model that does not fit cannot be timed. All processes call this, to its
    end; the accelerator is as it was afterwards.
    """
    from ..training.run_folder import RunFolder
    from ..training.trainer import Trainer

    device = accelerator.device
    available = available_bytes(device)  # before this run takes any
    if device.type == "cpu":  # the processes share it
        available //= accelerator.num_processes
    memory = forecast_memory(plan, device=device.type)
    yield "\n".join(_memory_lines(plan, memory, available, device.type))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(plan, data, accelerator, RunFolder(Path(folder), accelerator.is_main_process))
        if plan.config.preflight and accelerator.is_main_process:
            for name, text in run_checks(trainer).items():
                yield f"{'warning':>13}  {text} [{name}]"
        seconds = forecast_time(trainer)
        state = max(memory.optimizer, optimizer_state_bytes(trainer.optimizer))
        trainer.release()
    yield "\n".join(_time_lines(plan, seconds))
    yield "\n".join(_disk_lines(plan, memory.parameters, memory.parameters + memory.ema + state))
    yield "\n".join(["", *_alternatives(plan, memory, device.type)])


def _memory_lines(plan: Plan, memory: MemoryForecast, available: float, device: str) -> list[str]:
    parts = ", ".join(f"{name} {_size(size)}" for name, size in memory._asdict().items() if size)
    things, fits = plan.kind.name, batch_that_fits(plan, available, device)
    if fits is None:
        largest = f"not even one of the {things} fits"
    else:
        most = min(fits, plan.num_images or fits)
        largest = f"--train_batch_size up to {most:,} fits" + (", all there are" if most == plan.num_images else "")
    return [
        f"{'memory':>13}  {_size(memory.total)} on the {device}: {parts}",
        f"{'':>13}  {_size(available)} are free there; {largest}",
    ]


def _time_lines(plan: Plan, seconds: TimeForecast) -> list[str]:
    rate = plan.layout.global_batch / seconds.update
    rest = ", ".join(f"{part} {_duration(getattr(seconds, part))}" for part in ("validation", "sampling", "evaluation"))
    low, high = (_duration(seconds.total - seconds.training + training) for training in (seconds.low, seconds.high))
    lines = [
        f"{'time':>13}  {_duration(seconds.total)} ({low} to {high}): training {_duration(seconds.training)}, {rest}",
        f"{'':>13}  {1e3 * seconds.update:.3g} ms an update, {rate:,.0f} {plan.kind.name} a second, as measured now",
    ]
    if plan.config.auto_learning_rate:
        settings = FinderConfig()
        tests = settings.repeats * settings.num_updates
        lines.append(
            f"{'':>13}  {_duration(tests * seconds.update)} before it, of some {tests} updates, to find the learning rate"
        )
    return lines


def _disk_lines(plan: Plan, pipeline: int, checkpoint: int) -> list[str]:
    config = plan.config
    kept = math.ceil(plan.num_updates / config.checkpointing_steps)  # one is written at the end
    kept = min(kept, config.checkpoints_total_limit or kept)
    checkpoints = f"{kept} checkpoint{'s' if kept > 1 else ''} of {_size(checkpoint)}"
    folder = Path(config.output_dir).absolute()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    return [
        f"{'disk':>13}  {_size(pipeline + kept * checkpoint)}: the pipeline {_size(pipeline)}, {checkpoints}; "
        f"{_size(free)} are free"
    ]


def _alternatives(plan: Plan, memory: MemoryForecast, device: str) -> list[str]:
    """Total memory of the run with one setting changed."""
    config = plan.config
    rows = [("as it is", memory)]
    if plan.kind.model_class()._supports_gradient_checkpointing and not config.gradient_checkpointing:
        rows.append(("--gradient_checkpointing", forecast_memory(plan, gradient_checkpointing=True, device=device)))
    if config.mixed_precision in (None, "no"):
        rows.append(("--mixed_precision bf16", forecast_memory(plan, mixed_precision="bf16", device=device)))
    if plan.layout.micro_batch > 1:
        half, twice = plan.layout.micro_batch // 2, 2 * plan.layout.accumulation
        flags = f"--train_batch_size {half} --gradient_accumulation_steps {twice}"
        rows.append((flags, forecast_memory(plan, micro_batch=half, accumulation=twice, device=device)))
    rows += [
        (f"--optimizer {name}", memory._replace(optimizer=optimizer_bytes(plan, name)))
        for name in ("adamw", "sgd", "rmsprop", "adafactor")
        if name != config.optimizer
    ]
    if config.use_ema:
        rows.append(("--no_use_ema", memory._replace(ema=0)))
    width = max(len(name) for name, _ in rows)
    head = f"{'memory with':>{width}}  {'total':>10}  {'share':>6}"
    return [head, *(f"{name:>{width}}  {_size(row.total):>10}  {row.total / memory.total:>6.0%}" for name, row in rows)]


def _size(size: float) -> str:
    return f"{size / _MIB:,.1f} MiB" if size < 1024 * _MIB else f"{size / _MIB / 1024:,.2f} GiB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
