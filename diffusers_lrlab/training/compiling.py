"""How a device computes a model: compiled, channels last, in TF32.

Models are compiled for training: by accelerate as a whole, or block by block where the model says what repeats. Whatever
is not an update (validation, samples, checkpoints) takes the bare model, whose keys are plain.
"""

import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, TorchDynamoPlugin

from .config import ResolvedConfig

_BACKEND = "ACCELERATE_DYNAMO_BACKEND"


def launcher_compiles() -> bool:
    """Whether `accelerate launch --dynamo_backend` or its configuration file asks for a compiled model."""
    return os.environ.get(_BACKEND, "no").lower() != "no"


def make_dynamo_plugin(config: ResolvedConfig) -> TorchDynamoPlugin:
    """How a run compiles: by the launcher's backend, and inductor if it has none."""
    if not config.compile:
        return TorchDynamoPlugin(backend="no")
    return TorchDynamoPlugin(backend=os.environ[_BACKEND] if launcher_compiles() else "inductor")


def compile_backend(accelerator: Accelerator) -> str:
    """The name of what compiles, "no" for nothing."""
    return accelerator.state.dynamo_plugin.backend.value.lower()


def prepare_compiled(accelerator: Accelerator, model: Any, optimizer: Any) -> tuple[Any, Any]:
    """`accelerator.prepare`, with the blocks compiled that a model declares to repeat: all of them by one compilation."""
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO or not getattr(model, "_repeated_blocks", None):
        return accelerator.prepare(model, optimizer)
    model.compile_repeated_blocks(**plugin.to_kwargs())
    accelerator.state.dynamo_plugin = TorchDynamoPlugin(backend="no")  # or accelerate compiles the rest, leaf by leaf
    try:
        return accelerator.prepare(model, optimizer)
    finally:
        accelerator.state.dynamo_plugin = plugin


def make_channels_last(model: torch.nn.Module) -> None:
    """Before an optimizer or an average sees the parameters, whose memory format their states take."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.register_state_dict_post_hook(_plain_layout)  # which safetensors asks for


def _plain_layout(_model: Any, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
    state.update({key: value.contiguous() for key, value in state.items() if isinstance(value, torch.Tensor)})


def use_tf32(allowed: bool) -> None:
    """Products of float32 matrices on NVIDIA GPUs, of this run, where a process has several."""
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = allowed
