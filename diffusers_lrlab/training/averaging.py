"""Averages of the weights: the EMA, and what a schedule-free optimizer makes by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.training_utils import EMAModel

from .config import TrainingConfig


def make_ema(model: Any, config: TrainingConfig, device: torch.device) -> EMAModel:
    """An EMA of the model's parameters; its decay n updates after its start is 1 - (1 + n / inv_gamma) ** -power."""
    ema = EMAModel(
        model.parameters(),
        decay=config.ema_max_decay,
        use_ema_warmup=True,
        update_after_step=config.ema_start_update,
        inv_gamma=config.ema_inv_gamma,
        power=config.ema_power,
        foreach=True,
        model_cls=type(model),
        model_config=model.config,
    )
    ema.to(device)
    return ema


@contextmanager
def ema_weights(parameters: list[torch.nn.Parameter], ema: EMAModel) -> Iterator[None]:
    """The parameters hold the EMA's weights inside this block."""
    ema.store(parameters)
    ema.copy_to(parameters)
    try:
        yield
    finally:
        ema.restore(parameters)


def averages_itself(optimizer: Any) -> bool:
    """Whether the optimizer is one whose weights are to be evaluated only after its `eval()`."""
    return "train_mode" in optimizer.param_groups[0]


@contextmanager
def own_average(parameters: list[torch.nn.Parameter], optimizer: Any) -> Iterator[None]:
    """The parameters hold the average of an optimizer that makes one; afterwards they are back to the bit."""
    if not averages_itself(optimizer) or not optimizer.param_groups[0]["train_mode"]:
        yield
        return
    # There and back by its own arithmetic would round, and validating more often would change the run.
    kept = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        torch._foreach_copy_([parameter.data for parameter in parameters], kept)
