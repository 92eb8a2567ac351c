"""Steps of an optimizer, compilation, memory format and TF32.

Backward pass, clipping and step are done by accelerate if the precision needs it, by torch otherwise: accelerate's wrappers
inspect packages and signatures at every call, which is negligible for a UNet, but not for a small network on points.

Models are compiled for training: by accelerate as a whole, or block by block if the model declares repeated blocks.
Validation, samples and checkpoints use the original model, whose keys have no prefix.
"""

import math
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend, TorchDynamoPlugin

from ..data.batch import Batch

_MOST_OVERFLOWS = 30  # in a row
_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def do_one_update(trainer: Any, batch: Batch) -> bool:
    """An update, repeated with a smaller loss scale while fp16 gradients overflow; `False` if they always do."""
    return any(trainer.do_update(batch) for _ in range(_MOST_OVERFLOWS))


class Stepper:
    """Takes the steps of an optimizer, which accelerate prepares with the model, from the losses of micro-batches."""

    norm: torch.Tensor  # of the gradients of the last update, before clipping
    # An update with gradients that are not finite takes no step. Reading the norm at every update synchronizes a GPU.
    skips_bad = False
    was_skipped = False  # the last update

    def __init__(self, accelerator: Accelerator, model: Any, optimizer: Any, max_grad_norm: float):
        self.accelerator = accelerator
        self.model, self.optimizer = prepare_compiled(accelerator, model, optimizer)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.max_norm = max_grad_norm or math.inf  # infinite: measured, not clipped
        self.is_plain = accelerator.scaler is None and accelerator.distributed_type in _PLAIN

    def micro_batch(self) -> AbstractContextManager[Any]:
        """A block for forward pass and [`step`] of a micro-batch; processes exchange gradients after the last one only."""
        accelerator = self.accelerator
        return accelerator.accumulate(self.model) if accelerator.gradient_accumulation_steps > 1 else nullcontext()

    def step(self, loss: torch.Tensor) -> None:
        """Backward pass; after the last micro-batch of an update also clipping, and a step unless the update is skipped."""
        accelerator = self.accelerator
        if self.is_plain:
            steps = accelerator.gradient_accumulation_steps
            (loss if steps == 1 else loss / steps).backward()
        else:
            accelerator.backward(loss)
        if not accelerator.sync_gradients:
            return
        clip = torch.nn.utils.clip_grad_norm_ if self.is_plain else accelerator.clip_grad_norm_
        self.norm = clip(self.parameters, self.max_norm)
        self.was_skipped = self.skips_bad and not math.isfinite(self.norm)
        if not self.was_skipped:
            (self.optimizer.optimizer if self.is_plain else self.optimizer).step()
        if not self.is_plain:
            self.optimizer.zero_grad()
            return
        for parameter in self.parameters:
            parameter.grad = None


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
