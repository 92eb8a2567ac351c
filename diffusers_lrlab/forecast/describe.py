"""The forecast in words and tables, of `lrlab plan` and `--dry_run`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..optimizers import optimizer_state_bytes
from .memory import MemoryForecast, available_bytes, batches_that_fit, forecast_memory, optimizer_bytes
from .timing import TimeForecast, forecast_time

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.loading import TrainingData
    from ..training.loop import Trainer
    from ..training.plan import Plan

_MIB = 2**20


def describe_forecast(plan: Plan, data: TrainingData, accelerator: Accelerator) -> str:
    """
    Memory, time and disk of a run, and what other choices would make of the memory, as text; takes some seconds.

    All processes call this; the accelerator is as it was afterwards.
    """
    from ..training.loop import Trainer
    from ..training.run_folder import RunFolder

    memory = forecast_memory(plan)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(plan, data, accelerator, RunFolder(Path(folder), accelerator.is_main_process))
        seconds = forecast_time(trainer)
        lines = [*_memory_lines(plan, memory, accelerator), *_time_lines(plan, seconds), *_disk_lines(plan, memory, trainer)]
    del trainer
    accelerator.free_memory()
    return "\n".join([*lines, "", *_alternatives(plan, memory)])


def _memory_lines(plan: Plan, memory: MemoryForecast, accelerator: Accelerator) -> list[str]:
    parts = ", ".join(f"{name} {_size(size)}" for name, size in memory._asdict().items() if size)
    available = available_bytes(accelerator.device)
    fits = batches_that_fit(plan, available)
    things, device = plan.kind.things, accelerator.device.type
    if fits is None:
        largest = f"not even one of the {things} fits"
    else:
        most = min(fits[0], plan.num_images or fits[0])
        largest = f"--train_batch_size up to {most:,} fits" + (", all there are" if most == plan.num_images else "")
    return [
        f"{'memory':>13}  {_size(memory.total)} on the {device}: {parts}",
        f"{'':>13}  {_size(available)} are free there; {largest}",
    ]


def _time_lines(plan: Plan, seconds: TimeForecast) -> list[str]:
    rate = plan.layout.global_batch / seconds.update
    return [
        f"{'time':>13}  {_duration(seconds.total)}: training {_duration(seconds.training)} ({_duration(seconds.low)} to "
        f"{_duration(seconds.high)}), validation {_duration(seconds.validation)}, sampling {_duration(seconds.sampling)}",
        f"{'':>13}  {1e3 * seconds.update:.3g} ms an update, {rate:,.0f} {plan.kind.things} a second, as measured now",
    ]


def _disk_lines(plan: Plan, memory: MemoryForecast, trainer: Trainer) -> list[str]:
    config = plan.config
    state = max(memory.optimizer, optimizer_state_bytes(trainer.optimizer))
    checkpoint = memory.parameters + memory.ema + state
    written = max(1, plan.num_updates // config.checkpointing_steps) if plan.num_updates >= config.checkpointing_steps else 0
    kept = min(written, config.checkpoints_total_limit) if config.checkpoints_total_limit else written
    return [
        f"{'disk':>13}  {_size(memory.parameters + kept * checkpoint)}: the pipeline {_size(memory.parameters)}, {kept} "
        "checkpoints "
        f"of {_size(checkpoint)} each"
    ]


def _alternatives(plan: Plan, memory: MemoryForecast) -> list[str]:
    """Total memory of the run with one thing changed."""
    config = plan.config
    rows = [("as it is", memory)]
    if config.point_column is None and not config.gradient_checkpointing:
        rows.append(("--gradient_checkpointing", forecast_memory(plan, gradient_checkpointing=True)))
    if config.mixed_precision in (None, "no"):
        rows.append(("--mixed_precision bf16", forecast_memory(plan, mixed_precision="bf16")))
    if plan.layout.micro_batch > 1:
        half = plan.layout.micro_batch // 2
        rows.append((f"--train_batch_size {half} and twice the micro-batches", forecast_memory(plan, micro_batch=half)))
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
