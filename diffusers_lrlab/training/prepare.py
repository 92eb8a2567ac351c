"""Everything of a run but its trainer and its folder: resolved, planned, data loaded, device and processes known."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from typing import TYPE_CHECKING, Literal

from ..core.environment import OTHERS_WAIT, allowed_threads, asked_threads
from ..core.errors import LabError
from ..core.words import counted
from .config import ResolvedConfig, TrainingConfig
from .kinds.select import kind_of
from .model import find_start, given_model_config
from .resolve import resolve_config
from .resolve_schedules import check_schedule
from .resolve_timesteps import check_timesteps
from .sharding import check_sharding, shard_on_cpu

if TYPE_CHECKING:
    from pathlib import Path

    from accelerate import Accelerator

    from ..data.loading import TrainingData
    from .plan import Plan


def resolve_and_check(config: TrainingConfig, finder: bool = False) -> ResolvedConfig:
    """A configuration with nothing left open, held against everything but data and model."""
    resolved = resolve_config(config, find_columns=True)
    _check_launch()
    check_precision(resolved)
    check_sharding(resolved, finder)
    check_schedule(resolved)
    check_timesteps(resolved)
    return resolved


def _check_launch() -> None:
    """`accelerate launch --cpu --num_processes N` starts one process whatever N is: say so instead of obeying half."""
    launched = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    if launched and "MASTER_ADDR" in os.environ and not {"WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"} & {*os.environ}:
        raise LabError(
            "accelerate launch was asked for several processes on the CPU, but it starts only one of them. Write "
            "`accelerate launch --multi_gpu --num_processes N ...` (it works on CPUs too) or "
            "`torchrun --nproc_per_node N ...`. If MASTER_ADDR is set in your environment for another reason, unset it."
        )


def check_precision(config: ResolvedConfig) -> None:
    """What the device cannot do is an error: float16 has no use on a CPU, and TF32 is a matter of some GPUs."""
    precision = config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision == "fp16" and config.skip_bad_updates is not None:
        raise LabError(
            f"--skip_bad_updates {config.skip_bad_updates} has no place beside fp16, which repeats updates that "
            "overflow with a smaller scale of the loss. Leave it out, or use --mixed_precision bf16."
        )
    if precision == "fp16":
        import torch

        if not torch.accelerator.is_available():
            raise LabError("fp16 needs a GPU, and there is none here. Use --mixed_precision bf16 or no.")
    if config.allow_tf32:
        import torch

        if not (torch.cuda.is_available() and torch.version.cuda and torch.cuda.get_device_capability() >= (8, 0)):
            raise LabError("--allow_tf32 needs an NVIDIA GPU of Ampere or later, and there is none here. Leave it out.")


def usual_precision() -> Literal["bf16"] | None:
    """bfloat16 on a GPU that computes in it; `None` for the launcher's, whose "no" is also what it passes unasked."""
    import torch

    if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no" or not torch.cuda.is_available():
        return None
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else None


def prepare(config: TrainingConfig) -> tuple[Plan, TrainingData, Accelerator]:
    """Plan, data and accelerator of a run; what cannot be done is an error before data are read, where that is possible."""
    return prepare_resolved(resolve_and_check(config))


def prepare_resolved(config: ResolvedConfig, checkpoint: Path | None = None) -> tuple[Plan, TrainingData, Accelerator]:
    """[`prepare`] of what is resolved and checked, for a run that goes on from a checkpoint if one is given."""
    from .compiling import launcher_compiles, use_tf32
    from .plan import make_plan

    start = find_start(config, checkpoint)
    model_config = given_model_config(config, start)
    precision = config.mixed_precision or usual_precision()
    config = dataclasses.replace(config, compile=config.compile or launcher_compiles(), mixed_precision=precision)
    accelerator = make_accelerator(config)
    use_tf32(config.allow_tf32)  # not for the runs of a study, which says by itself how products are computed
    # The launcher's, if none was asked for.
    config = dataclasses.replace(config, mixed_precision=accelerator.mixed_precision)
    with accelerator.main_process_first():
        data = kind_of(config).load_data(config, accelerator.num_processes)
    if data.skipped:
        accelerator.print(f"Left out {counted(len(data.skipped), 'corrupt image')}:", *data.skipped, sep="\n  ")
    _check_same_schedule(config)
    processes = accelerator.num_processes, accelerator.process_index
    return make_plan(config, data, model_config, *processes, start=start), data, accelerator


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
    from accelerate.utils import (
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        InitProcessGroupKwargs,
        ProjectConfiguration,
    )

    from .compiling import make_dynamo_plugin

    on_cpu = not torch.accelerator.is_available()
    if on_cpu:
        # `accelerate launch` leaves a CPU process one thread unless told otherwise.
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(config.cpu_threads or allowed_threads(processes))
        keep_freed_memory()
    folder, matmul = config.output_dir, torch.backends.cuda.matmul
    tf32 = matmul.fp32_precision == "tf32"  # its older name cannot be read if a program has set this one
    accelerator = Accelerator(
        # Without this, accelerate takes several processes on a CPU for so many lonely ones.
        cpu=on_cpu,
        # A plugin, since the environment of `accelerate launch` overrides the plain argument.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=config.gradient_accumulation_steps),
        mixed_precision=config.mixed_precision,
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=os.path.join(folder, config.logging_dir)),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=OTHERS_WAIT),
            # No copy of the gradients. No static graph: preflight and probes do backward passes that DDP does not see.
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
    )
    if on_cpu:
        shard_on_cpu(accelerator)
    else:
        matmul.allow_tf32 = tf32  # accelerate allows it to what is compiled
    accelerator.state.dynamo_plugin = make_dynamo_plugin(config)  # of this run, where a process has several
    if on_cpu and config.cpu_threads and (asked := asked_threads()) not in (None, config.cpu_threads):
        accelerator.print(f"Threads: {config.cpu_threads}, by --cpu_threads, though OMP_NUM_THREADS is {asked}.")
    return accelerator
