"""Everything of a run but its trainer and its folder: resolved, planned, data loaded, device and processes known."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from datetime import timedelta
from typing import TYPE_CHECKING

from ..core.environment import allowed_threads, asked_threads
from ..core.errors import LabError
from .checks import check_launch, check_precision
from .config import ResolvedConfig, TrainingConfig
from .kinds.select import kind_of
from .resolve import resolve_config
from .resolve_schedules import check_schedule
from .resolve_timesteps import check_timesteps

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.loading import TrainingData
    from .plan import Plan


def resolve_and_check(config: TrainingConfig) -> ResolvedConfig:
    """A configuration with nothing left open, held against everything but data and model."""
    if not isinstance(config, TrainingConfig):
        raise LabError(
            f"train() and find_lr() take a TrainingConfig, not {type(config).__name__}. Write TrainingConfig(**options), or "
            "TrainingConfig(lr_scheduler='cosine', ...)."
        )
    resolved = resolve_config(config, find_columns=True)
    check_launch()
    check_schedule(resolved)
    check_timesteps(resolved)
    check_precision(resolved)
    return resolved


def prepare(config: TrainingConfig) -> tuple[Plan, TrainingData, Accelerator]:
    """Plan, data and accelerator of a run; what cannot be done is an error before data are read, where that is possible."""
    return prepare_resolved(resolve_and_check(config))


def prepare_resolved(config: ResolvedConfig) -> tuple[Plan, TrainingData, Accelerator]:
    """[`prepare`] of what is resolved and checked."""
    from .plan import make_plan

    kind = kind_of(config)
    model_config = kind.load_model_config(config)
    accelerator = make_accelerator(config)
    # The launcher's, if none was asked for.
    config = dataclasses.replace(config, mixed_precision=accelerator.mixed_precision)
    with accelerator.main_process_first():
        data = kind.load_data(config, accelerator.num_processes)
    if data.skipped:
        accelerator.print(f"Left out {len(data.skipped)} corrupt images:", *data.skipped, sep="\n  ")
    _check_same_schedule(config)
    return make_plan(config, data, model_config, accelerator.num_processes, accelerator.process_index), data, accelerator


def _check_same_schedule(config: ResolvedConfig) -> None:
    """Raises a `LabError` if a published schedule changed between two processes' looks at it."""
    from accelerate.utils import gather_object

    if config.lr_scheduler_source is not None and len(found := set(gather_object([config.lr_scheduler_source]))) > 1:
        raise LabError(
            f"The published schedule changed while the processes read it: {', '.join(sorted(found))}. Start again."
        )


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


def make_accelerator(config: ResolvedConfig) -> Accelerator:
    """Device, precision and processes of a run, and the threads of this process."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, ProjectConfiguration

    on_cpu = not torch.accelerator.is_available()
    if on_cpu:
        # `accelerate launch` leaves a CPU process one thread unless told otherwise.
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(config.cpu_threads or allowed_threads(processes))
        keep_freed_memory()
    folder = config.output_dir
    accelerator = Accelerator(
        # Without this, accelerate takes several processes on a CPU for so many lonely ones.
        cpu=on_cpu,
        # A plugin, since the environment of `accelerate launch` overrides the plain argument.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=config.gradient_accumulation_steps),
        mixed_precision=config.mixed_precision,
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=os.path.join(folder, config.logging_dir)),
        # Other processes wait while one of them samples.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))],
    )
    if on_cpu and config.cpu_threads and (asked := asked_threads()) not in (None, config.cpu_threads):
        accelerator.print(f"Threads: {config.cpu_threads}, by --cpu_threads, though OMP_NUM_THREADS is {asked}.")
    return accelerator
