"""The forecast as text, for `lrlab plan` and `--dry_run`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..core.errors import Diverged
from ..core.words import counted, duration
from ..finder.range_test import FinderConfig
from ..optimizers.build import optimizer_state_bytes
from ..preflight.run import run_checks
from ..training.plan_text import slow_precision
from .memory import MemoryForecast, available_bytes, batch_that_fits, forecast_memory, optimizer_bytes, trained_bytes
from .probes import Budget
from .timing import SECONDS, TimeForecast, forecast_time

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.loading import TrainingData
    from ..training.plan import Plan

_MIB = 2**20
_PARTS = {"ema": "EMA", "held_out": "held-out data", "copies": "convolution buffers", "checkpoint": "checkpoint copy"}
# Share of the remaining seconds, and fewest seconds, to measure time; the rest is for the memory with other settings.
_FOR_TIME, _LEAST_FOR_TIME = 0.6, 2.0


def describe_forecast(plan: Plan, data: TrainingData, accelerator: Accelerator) -> Iterator[str]:
    """
    Memory, time and disk space of a run, and its memory with other settings, as texts.

    Memory comes first, before anything runs: a model that does not fit cannot be timed. Measurements share a few seconds.
    All processes call this, to its end. Restores the accelerator.
    """
    from ..training.run_folder import RunFolder
    from ..training.trainer import Trainer

    _ = plan.model_class  # imports before measurements
    budget = Budget(SECONDS)
    device = accelerator.device
    available = available_bytes(device)  # before this run takes any
    if device.type == "cpu":  # the processes share it
        available //= accelerator.num_processes
    with budget.shown("memory"):
        memory = forecast_memory(plan, device=device.type)
        lines = _memory_lines(plan, memory, available, device.type)
    yield "\n".join(lines)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(plan, data, accelerator, RunFolder(Path(folder), accelerator.is_main_process))
        if plan.config.preflight and accelerator.is_main_process:
            with budget.shown("the checks"):
                found = run_checks(trainer)
            for name, text in found.items():
                yield f"{'warning':>13}  {text} [{name}]"
        try:
            seconds = forecast_time(trainer, Budget(max(_LEAST_FOR_TIME, budget.share(_FOR_TIME))))
            times = _time_lines(plan, seconds, device.type)
        except Diverged as error:
            times = [f"{'warning':>13}  No forecast of the time, as the measured updates diverged: {error}"]
        state = max(memory.optimizer, optimizer_state_bytes(trainer.run.optimizer))
        trainer.release()
    yield "\n".join(times)
    trained = trained_bytes(plan, memory.parameters)
    base = memory.parameters - trained  # beside the checkpoints of a LoRA
    yield "\n".join(_disk_lines(plan, memory.parameters + base, trained + memory.ema + state, trained))
    yield "\n".join(["", *_alternatives(plan, memory, device.type, budget)])


def _memory_lines(plan: Plan, memory: MemoryForecast, available: float, device: str) -> list[str]:
    parts = ", ".join(f"{_PARTS.get(name, name)} {_size(size)}" for name, size in memory._asdict().items() if size)
    fits = batch_that_fits(plan, available, device, memory)
    if fits is None:
        largest = "not even --train_batch_size 1 fits"
    else:
        most = min(fits, plan.num_images or fits)
        largest = f"--train_batch_size up to {most:,} fits" + (", all of the data" if most == plan.num_images else "")
    return [
        f"{'memory':>13}  {_size(memory.total)} on the {device}: {parts}",
        f"{'':>13}  {_size(available)} free; {largest}",
    ]


def _time_lines(plan: Plan, seconds: TimeForecast, device: str) -> list[str]:
    num = torch.get_num_threads()
    threads = f" on {counted(num, 'thread')}" if device == "cpu" else ""
    rate = plan.layout.global_batch / seconds.update
    rest = ", ".join(f"{part} {duration(getattr(seconds, part))}" for part in ("validation", "sampling", "evaluation"))
    low, high = (duration(seconds.total - seconds.training + training) for training in (seconds.low, seconds.high))
    span = f" ({low} to {high})" if low != high else ""  # the same if a single update was measured
    lines = [
        f"{'time':>13}  {duration(seconds.total)}{span}: training {duration(seconds.training)}, {rest}",
        f"{'':>13}  {_of_update(seconds.update)} per update, {_rate(rate)} {plan.kind.name} per second{threads}",
    ]
    if seconds.compiling:
        lines.append(f"{'':>13}  of it {duration(seconds.compiling)} to compile the model, at each start")
    if seconds.snapshots:
        lines.append(
            f"{'':>13}  meanwhile {duration(seconds.snapshots)} to write {counted(len(plan.snapshot_updates), 'snapshot')} "
            "of the averages, in a thread"
        )
    if seconds.slowest:
        most = ", ".join(f"{name} {duration(took)}" for name, took in seconds.slowest)
        lines.append(f"{'':>13}  of the evaluation: {most}")
    parts = "validation, sampling and evaluation by small parts of each"
    if seconds.guessed:
        parts += f"; no time to measure {' and '.join(seconds.guessed)}, roughly estimated from the updates"
    lines.append(f"{'':>13}  measured in {duration(seconds.measured)}: {parts}")
    if seconds.unknown:
        lines.append(f"{'':>13}  not counted, as there was no time or nothing to measure: {', '.join(seconds.unknown)}")
    if plan.config.auto_learning_rate:
        settings = FinderConfig()
        tests = settings.repeats * settings.num_updates
        lines.append(
            f"{'':>13}  and before it {duration(tests * seconds.update)} to find the learning rate, in about "
            f"{counted(tests, 'update')}"
        )
    return lines


def _of_update(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else duration(seconds)


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _disk_lines(plan: Plan, pipeline: int, checkpoint: int, trained: int) -> list[str]:
    config = plan.config
    kept, for_good = _num_checkpoints(plan)
    checkpoints = f"{counted(kept, 'checkpoint')} of {_size(checkpoint)}"
    checkpoints += f", {for_good} of them kept permanently by --keep_every" if config.keep_every else ""
    folder = Path(config.output_dir).absolute()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    total, more = pipeline + kept * checkpoint, ""
    if config.posthoc is not None:
        known, num = config.posthoc.kwargs, len(plan.snapshot_updates)
        each = trained * len(known["sigma_rels"]) // (2 if known["dtype"] == "bf16" else 1)
        total, more = total + num * each, f", {counted(num, 'snapshot')} of {_size(each)} for `lrlab ema`"
    return [f"{'disk':>13}  {_size(total)}: pipeline {_size(pipeline)}, {checkpoints}{more}; {_size(free)} free"]


def _num_checkpoints(plan: Plan) -> tuple[int, int]:
    """Checkpoints at the end of a run, and those of them that are kept for good."""
    config, end = plan.config, plan.num_updates
    updates = {*range(config.checkpointing_steps, end, config.checkpointing_steps), end}
    for_good = set(range(config.keep_every, end + 1, config.keep_every)) if config.keep_every else set()
    newest = sorted(updates | for_good)[-(config.checkpoints_total_limit or 0) :]
    return len(for_good.union(newest)), len(for_good)


def _alternatives(plan: Plan, memory: MemoryForecast, device: str, budget: Budget) -> list[str]:
    """Total memory of the run with one setting changed, for as many settings as time allows."""
    config, changed = plan.config, partial(forecast_memory, plan, device=device)
    trained = trained_bytes(plan, memory.parameters)

    def with_sizes(**sizes: int) -> MemoryForecast:
        other = memory._replace(**sizes)
        return other._replace(checkpoint=memory.checkpoint and trained + other.optimizer + other.ema)

    def with_optimizer(name: str) -> MemoryForecast:
        return with_sizes(optimizer=optimizer_bytes(plan, name))

    rows: dict[str, Callable[[], MemoryForecast]] = {"this run": lambda: memory}
    if config.use_ema:
        rows["--no_use_ema"] = lambda: with_sizes(ema=0)
    for name in ("adamw", "sgd", "rmsprop", "adafactor"):
        if name != config.optimizer:
            rows[f"--optimizer {name}"] = partial(with_optimizer, name)
    if plan.model_class._supports_gradient_checkpointing and not config.gradient_checkpointing:
        rows["--gradient_checkpointing"] = partial(changed, gradient_checkpointing=True)
    if config.mixed_precision in (None, "no"):
        rows["--mixed_precision bf16"] = partial(changed, mixed_precision="bf16")
    if plan.layout.micro_batch > 1:
        half, twice = plan.layout.micro_batch // 2, 2 * plan.layout.accumulation
        flags = f"--train_batch_size {half} --gradient_accumulation_steps {twice}"
        rows[flags] = partial(changed, micro_batch=half, accumulation=twice)
    warning = slow_precision("bf16") if "--mixed_precision bf16" in rows else None
    notes = [warning] if warning else []
    width = max(map(len, rows))
    lines = [f"{'memory with':>{width}}  {'total':>10}  {'share':>6}"]
    for done, (name, forecast) in enumerate(rows.items()):
        if done and not budget.share(1.0):
            missing = f"No time left for {', '.join([*rows][done:])}. Give one of them to see its memory."
            return [*lines, missing, *notes]
        with budget.shown(f"memory with {name}"):
            row = forecast()
        lines.append(f"{name:>{width}}  {_size(row.total):>10}  {row.total / memory.total:>6.0%}")
    return [*lines, *notes]


def _size(size: float) -> str:
    return f"{size / _MIB:,.1f} MiB" if size < 1024 * _MIB else f"{size / _MIB / 1024:,.2f} GiB"
