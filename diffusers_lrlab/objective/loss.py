"""The loss of each image of one forward pass. Shared by training, validation and measurements."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def denoising_losses(
    model: Any, noise_scheduler: Any, images: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
) -> torch.Tensor:
    """
    The denoising loss of each image.

    Args:
        model: Called as `model(noisy_images, timesteps).sample`.
        noise_scheduler: A diffusers scheduler with `add_noise`, whose `prediction_type` says what the model predicts.
        images (`torch.Tensor`): Clean images `(batch, channels, height, width)` in [-1, 1].
        noise (`torch.Tensor`): Standard normal, of the same shape.
        timesteps (`torch.Tensor`): int64 of shape `(batch,)`.

    Returns:
        `torch.Tensor`: float32 of shape `(batch,)`, means over pixels. For `sample` the squared error is weighted by
        the signal-to-noise ratio, as diffusers' example does (arXiv 2202.00512, section 4), which makes it the error
        of the noise that the predicted image implies.
    """
    noisy_images = noise_scheduler.add_noise(images, noise, timesteps)
    return prediction_losses(model(noisy_images, timesteps).sample, noise_scheduler, images, noise, timesteps)


def prediction_losses(
    prediction: torch.Tensor, noise_scheduler: Any, images: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
) -> torch.Tensor:
    """What [`denoising_losses`] makes of a prediction, of the shape of `images`."""
    prediction = prediction.float()
    prediction_type = noise_scheduler.config.prediction_type
    if prediction_type == "epsilon":
        target = noise
    elif prediction_type == "sample":
        target = images
    elif prediction_type == "v_prediction":
        target = noise_scheduler.get_velocity(images, noise, timesteps)
    else:
        raise ValueError(f"Unknown prediction type {prediction_type!r}; known: epsilon, sample, v_prediction.")
    losses = F.mse_loss(prediction, target.float(), reduction="none").mean(dim=tuple(range(1, images.ndim)))
    if prediction_type == "sample":
        alphas = noise_scheduler.alphas_cumprod.to(timesteps.device)[timesteps]
        losses = losses * (alphas / (1 - alphas))
    return losses
