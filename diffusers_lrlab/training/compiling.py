"""Compilation.

Models are compiled for training: by accelerate as a whole, or block by block if the model declares repeated blocks.
Validation, samples and checkpoints use the original model, whose keys have no prefix.
"""

import os
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DynamoBackend, TorchDynamoPlugin


def make_dynamo_plugin() -> TorchDynamoPlugin:
    """The compilation of a run: by the backend of the launcher, if any."""
    return TorchDynamoPlugin(backend=os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no"))


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
