"""Backward pass, clipping and the optimizer's step: accelerate's where precision asks for it, torch's own elsewhere.

accelerate's wrappers look for optional packages and at signatures at every call. That is nothing beside a UNet, but much
beside the small network of points.
"""

import math
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from ..data.batch import Batch

_MOST_OVERFLOWS = 30  # in a row
_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def do_one_update(trainer: Any, batch: Batch) -> bool:
    """An update, repeated with a smaller loss scale while fp16 gradients overflow; `False` if they always do."""
    return any(trainer.do_update(batch) for _ in range(_MOST_OVERFLOWS))


class Stepper:
    """What is done with a loss, inside `accelerator.accumulate`; model and optimizer are prepared by that accelerator."""

    norm: torch.Tensor  # of the gradients of the last update, before clipping
    # Whether updates with gradients that are not finite do nothing. Any optimizer can be spared a step, but only by a host
    # that knows: the norm is read at every update, which on a GPU waits for it.
    skips_bad = False
    was_skipped = False  # the last update

    def __init__(self, accelerator: Accelerator, model: Any, optimizer: Any, max_grad_norm: float):
        self.accelerator, self.optimizer = accelerator, optimizer
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.max_norm = max_grad_norm or math.inf  # then it is only measured
        self.is_plain = accelerator.scaler is None and accelerator.distributed_type in _PLAIN

    def __call__(self, loss: torch.Tensor) -> None:
        """Backward, and at the last micro-batch of an update clipping and a step."""
        self.backward(loss)
        if not self.accelerator.sync_gradients:
            return
        self.norm = self.clip()
        self.was_skipped = self.skips_bad and not math.isfinite(self.norm)
        self.take_step()

    def backward(self, loss: torch.Tensor) -> None:
        if self.is_plain:
            steps = self.accelerator.gradient_accumulation_steps
            (loss if steps == 1 else loss / steps).backward()
        else:
            self.accelerator.backward(loss)

    def clip(self) -> torch.Tensor:
        """The norm of the gradients before they are clipped."""
        if self.is_plain:
            return torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        norm = self.accelerator.clip_grad_norm_(self.parameters, self.max_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def take_step(self) -> None:
        """The optimizer's, unless the update is skipped; the gradients are gone afterwards."""
        if not self.was_skipped:
            (self.optimizer.optimizer if self.is_plain else self.optimizer).step()
        if not self.is_plain:
            self.optimizer.zero_grad()
            return
        for parameter in self.parameters:
            parameter.grad = None
