"""The exponential moving average of the weights."""

from __future__ import annotations

import torch
from diffusers import UNet2DModel
from diffusers.training_utils import EMAModel

from .config import TrainingConfig


def make_ema(model: UNet2DModel, config: TrainingConfig, device: torch.device) -> EMAModel:
    """An EMA of the model's parameters on `device`; its decay after n updates is 1 - (1 + n / inv_gamma) ** -power."""
    ema = EMAModel(
        model.parameters(),
        decay=config.ema_max_decay,
        use_ema_warmup=True,
        inv_gamma=config.ema_inv_gamma,
        power=config.ema_power,
        foreach=True,
        model_cls=UNet2DModel,
        model_config=model.config,
    )
    ema.to(device)
    return ema
