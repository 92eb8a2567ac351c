"""FSDP2 by accelerate: parameters, averages and optimizer state are sharded over the processes.

Each process averages its own shards, without communication. Validation, samples, snapshots and saved pipelines need whole
weights, which all processes gather first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

from ..core.errors import LabError
from ..optimizers.entries import OPTIMIZERS
from .config import ResolvedConfig

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..averaging.averages import EMA
    from ..averaging.forms import EMAForm
    from .run_state import RunState

_ELEMENTWISE = ("adamw", "adam", "sgd", "nesterov", "rmsprop", "lion")  # a step of a shard is a part of the whole step
_STATE = "ema.json"


def _is_asked_for(name: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("1", "true")


def fsdp_is_asked_for() -> bool:
    """Whether the launcher asks for FSDP."""
    return _is_asked_for("FSDP")


def check_sharding(config: ResolvedConfig, finder: bool = False) -> None:
    """Raises a `LabError` for a launch that shards a model in a way, or for a run, that is not supported."""
    for name, shown in (("DEEPSPEED", "DeepSpeed"), ("MEGATRON_LM", "Megatron-LM")):
        if _is_asked_for(name):
            raise LabError(
                f"{shown} cannot be used here: it steps and clips by itself, so neither the learning rate nor the moving "
                "average would be those of the run. Launch with `--use_fsdp --fsdp_version 2` for a model that does not "
                "fit, or with `--multi_gpu`; `accelerate config` changes what is in a file."
            )
    if not fsdp_is_asked_for():
        return
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise LabError(
            "FSDP 1 cannot be used here: it hides the parameters that the moving average and the checkpoints need. Launch "
            "with `--use_fsdp --fsdp_version 2`, or write fsdp_version: 2 into the fsdp_config of accelerate's file."
        )
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        raise LabError("FSDP shards a model over processes, and there is one. Give --num_processes 2 or more, or no FSDP.")
    if os.environ.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT") != "SHARDED_STATE_DICT":
        raise LabError("Checkpoints of FSDP are written in shards here. Use `--fsdp_state_dict_type SHARDED_STATE_DICT`.")
    if config.optimizer not in _ELEMENTWISE:
        allowed = ", ".join(name for name in _ELEMENTWISE if name in OPTIMIZERS)
        raise LabError(f"--optimizer {config.optimizer} has not been tried on shards. With FSDP use one of {allowed}.")
    refused: dict[str, object] = {
        "--learning_rate auto": config.auto_learning_rate,
        "--sanity": config.sanity,
        "lrlab find-lr": finder,
        "--timestep_grad_every": config.timestep_grad_every,
        "--mixed_precision fp16": config.mixed_precision == "fp16",
        "--channels_last": config.channels_last,
        "--lora_rank": config.lora_rank,
        "--width_base": config.width_base,
    }
    for name, is_given in refused.items():
        if is_given:
            raise LabError(f"{name} needs a whole model, and FSDP shards it. Leave it out, or launch with `--multi_gpu`.")


def is_sharded(accelerator: Accelerator) -> bool:
    from accelerate.utils import DistributedType

    return accelerator.distributed_type == DistributedType.FSDP


def shard_on_cpu(accelerator: Accelerator) -> None:
    """Makes accelerate shard on a CPU, too: without a GPU it ignores FSDP silently."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    if fsdp_is_asked_for():
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def local_shard(tensor: Any) -> Any:
    """The local part of a tensor, in the same memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _sharded_like(local: Any, parameter: Any) -> Any:
    """The tensor with this local part, sharded like a parameter."""
    from torch.distributed.tensor import DTensor

    how = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, **how)


def shard_average(model: Any, form: EMAForm, device: Any) -> EMA:
    """The average of the local shards of a model."""
    from ..averaging.averages import EMA

    parameters = list(model.parameters())
    shards = [local_shard(value.detach()).requires_grad_(value.requires_grad) for value in parameters]
    return EMA(shards, form, device)


def _sharded_average(run: RunState, average: EMA) -> dict[str, Any]:
    """An average by names of parameters, sharded like them, in its own memory."""
    shadows = zip(run.model.named_parameters(), average.shadow_params, strict=True)
    return {name: _sharded_like(shadow, parameter) for (name, parameter), shadow in shadows}


def whole_values(run: RunState, average: EMA, is_kept: bool) -> list[Any]:
    """
    The whole values of an average. Those of a sharded one are gathered one after the other, into the host memory of the
    processes where they are to be kept, and all processes call this.
    """
    if not run.is_sharded:
        return average.shadow_params
    gathered = (value.full_tensor() for value in _sharded_average(run, average).values())
    return [value.cpu() for value in gathered if is_kept]


def save_sharded_average(run: RunState, average: EMA, folder: Path) -> None:
    """Writes the shards of an average; all processes call this."""
    import torch.distributed.checkpoint as dcp

    dcp.save(_sharded_average(run, average), checkpoint_id=folder)
    if os.environ.get("RANK", "0") == "0":
        own = {key: value for key, value in average.state_dict().items() if key != "shadow_params"}
        (folder / _STATE).write_text(json.dumps(own), encoding="utf-8")


def load_sharded_average(run: RunState, average: EMA, folder: Path) -> None:
    """Restores an average from [`save_sharded_average`]; all processes call this."""
    import torch.distributed.checkpoint as dcp

    tensors = _sharded_average(run, average)
    dcp.load(tensors, checkpoint_id=folder)
    own = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    average.load_state_dict({**own, "shadow_params": [local_shard(value) for value in tensors.values()]})


@contextmanager
def whole_weights(run: RunState, accelerator: Accelerator) -> Iterator[None]:
    """
    A block in which sharded model and first average of a run are replaced by whole copies; all processes enter it.
    """
    if not is_sharded(accelerator):
        yield
        return
    model, average = run.model, run.average
    run.model, run.average = _gather(run, accelerator)
    try:
        yield
    finally:
        run.model, run.average = model, average


def _gather(run: RunState, accelerator: Accelerator) -> tuple[Any, EMA | None]:
    """Whole copies of the current model and its first average, on the device of each process."""
    import torch
    from accelerate.utils import convert_outputs_to_fp32

    from ..averaging.averages import EMA

    with torch.random.fork_rng(devices=[]):  # building a model draws random numbers
        model = run.plan.new_model().to(accelerator.device)
    state = run.model.state_dict()
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    model.load_state_dict(whole)
    model.train(run.model.training)
    if accelerator.mixed_precision != "no":
        forward = convert_outputs_to_fp32(accelerator.autocast()(type(model).forward))
        model.forward = MethodType(forward, model)
    if run.average is None:
        return model, None
    average = EMA(model.parameters(), run.plan.ema_form, accelerator.device)
    shadows = [value.full_tensor() for value in _sharded_average(run, run.average).values()]
    average.load_state_dict({**run.average.state_dict(), "shadow_params": shadows})
    return model, average
