"""Compilation, memory format and TF32.

Models are compiled for training: by accelerate as a whole, or block by block if the model declares repeated blocks.
Validation, samples and checkpoints use the original model, whose keys have no prefix.
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
    """The compilation of a run: by the backend of the launcher, or by inductor."""
    if not config.compile:
        return TorchDynamoPlugin(backend="no")
    return TorchDynamoPlugin(backend=os.environ[_BACKEND] if launcher_compiles() else "inductor")


def compile_backend(accelerator: Accelerator) -> str:
    """The name of the compiler backend; "no" without compilation."""
    return accelerator.state.dynamo_plugin.backend.value.lower()


def prepare_compiled(accelerator: Accelerator, model: Any, optimizer: Any) -> tuple[Any, Any]:
    """`accelerator.prepare` that compiles the repeated blocks of a model once for all of them, if it declares any."""
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO or not getattr(model, "_repeated_blocks", None):
        return accelerator.prepare(model, optimizer)
    model.compile_repeated_blocks(**plugin.to_kwargs())
    accelerator.state.dynamo_plugin = TorchDynamoPlugin(
        backend="no"
    )  # otherwise accelerate compiles the other modules one by one
    try:
        return accelerator.prepare(model, optimizer)
    finally:
        accelerator.state.dynamo_plugin = plugin


def make_channels_last(model: torch.nn.Module) -> None:
    """Converts a model; call it before optimizer and average are made, whose states take the memory format of parameters."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.register_state_dict_post_hook(_plain_layout)  # for safetensors


def _plain_layout(_model: Any, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
    state.update({key: value.contiguous() for key, value in state.items() if isinstance(value, torch.Tensor)})


def use_tf32(allowed: bool) -> None:
    """Sets whether float32 matrix products use TF32 on NVIDIA GPUs; each run sets it, since a process may have several."""
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = allowed
