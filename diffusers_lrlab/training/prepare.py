"""Preparation of a run: configuration resolved and checked, accelerator, data and plan."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from typing import TYPE_CHECKING

from ..core.environment import OTHERS_WAIT, allowed_threads
from ..core.words import counted
from .combinations import check_launch
from .config import ResolvedConfig, TrainingConfig
from .kinds import kind_of
from .model import check_width, find_start, given_model_config
from .resolve import check_schedule, check_timesteps, resolve_config

if TYPE_CHECKING:
    from pathlib import Path

    from accelerate import Accelerator

    from ..data.loading import TrainingData
    from .plan import Plan


def resolve_and_check(config: TrainingConfig) -> ResolvedConfig:
    """A configuration with every option resolved, checked as far as possible without data and model."""
    resolved = resolve_config(config)
    check_launch(resolved)
    check_schedule(resolved)
    check_timesteps(resolved)
    check_width(resolved)
    return resolved


def launcher_compiles() -> bool:
    """Whether `accelerate launch --dynamo_backend` or its configuration file asks for a compiled model."""
    return os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no"


def prepare(asked: TrainingConfig, checkpoint: Path | None = None) -> tuple[Plan, TrainingData, Accelerator]:
    """
    Plan, data and accelerator of a run, which resumes if a checkpoint is given. A resolved configuration is taken as it is.
    Raises errors before it reads data, where that is possible.
    """
    import torch

    from .plan import make_plan

    config = asked if isinstance(asked, ResolvedConfig) else resolve_and_check(asked)
    start = find_start(config, checkpoint)
    model_config = given_model_config(config, start)
    # The launcher also passes "no" where no precision was asked for.
    is_chosen = config.mixed_precision is not None or os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no"
    if not is_chosen and torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False):
        config = dataclasses.replace(config, mixed_precision="bf16")
    accelerator = make_accelerator(config)
    config = dataclasses.replace(config, mixed_precision=accelerator.mixed_precision)  # which may be the launcher's
    with accelerator.main_process_first():
        data = kind_of(config).load_data(config, accelerator.num_processes)
    if data.skipped:
        accelerator.print(f"Left out {counted(len(data.skipped), 'corrupt image')}:", *data.skipped, sep="\n  ")
    processes = accelerator.num_processes, accelerator.process_index
    return make_plan(config, data, model_config, *processes, start=start), data, accelerator


def keep_freed_memory() -> None:
    """
    Lets glibc keep the memory of freed tensors for the next update.

    Otherwise it returns their pages and faults them in again at every update; `benchmarks/train_step.py` measures the cost
    on a CPU. The setting holds for the rest of the process.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except OSError:
        return  # another C library
    m_trim_threshold, m_mmap_threshold = -1, -3  # as in malloc.h
    mallopt(m_trim_threshold, 2**31 - 1)
    mallopt(m_mmap_threshold, 32 * 2**20)  # the largest allowed value


def make_accelerator(config: ResolvedConfig) -> Accelerator:
    """The accelerator of a run; sets the threads of this process, too."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import (
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        InitProcessGroupKwargs,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )

    on_cpu = not torch.accelerator.is_available()
    if on_cpu:
        # `accelerate launch` leaves a CPU process one thread unless told otherwise.
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(allowed_threads(processes))
        keep_freed_memory()
    folder, matmul = config.output_dir, torch.backends.cuda.matmul
    tf32 = matmul.fp32_precision == "tf32"  # torch refuses to read the older name once a program has set this one
    accelerator = Accelerator(
        # Otherwise accelerate would not put CPU processes into one process group.
        cpu=on_cpu,
        # A plugin, since the environment of `accelerate launch` overrides the argument.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=config.gradient_accumulation_steps),
        mixed_precision=config.mixed_precision,
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=os.path.join(folder, config.logging_dir)),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=OTHERS_WAIT),
            # Views save a copy of the gradients. No static graph: DDP does not see backward passes of preflight and probes.
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
    )
    if not on_cpu:
        matmul.allow_tf32 = tf32  # accelerate allows TF32 for compiled models
    # That of this launch: a process may have several runs.
    accelerator.state.dynamo_plugin = TorchDynamoPlugin(backend=os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no"))
    return accelerator
