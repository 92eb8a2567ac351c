"""Samples and the saved pipeline, both of diffusers' own `DDPMPipeline`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DDPMPipeline
from tqdm.auto import tqdm

from ..files import atomic_file, full_disk_explained
from ..streams import stream_generator
from .config import TrainingConfig


def draw_samples(
    unet: Any,
    noise_scheduler: Any,
    num_images: int,
    config: TrainingConfig,
    purpose: str = "samples",
    batch_size: int = 250,
    show_progress: bool = False,
) -> np.ndarray:
    """
    Samples by the DDPM pipeline, always from the same starting noise.

    Args:
        unet (`UNet2DModel`): The model; its mode is restored.
        noise_scheduler (`DDPMScheduler`): Its noise schedule.
        num_images (`int`): How many.
        config ([`TrainingConfig`]): `ddpm_num_inference_steps` and `seed` are used.
        purpose (`str`): Names the stream of starting noise.
        batch_size (`int`): Images per pass through the model.
        show_progress (`bool`): A bar over passes.

    Returns:
        `np.ndarray`: float32 of shape `(num_images, height, width, channels)` in [0, 1].
    """
    was_training = unet.training
    unet.eval()
    pipeline = DDPMPipeline(unet=unet, scheduler=type(noise_scheduler).from_config(noise_scheduler.config))
    pipeline.set_progress_bar_config(disable=True)
    parts = []
    for start in tqdm(range(0, num_images, batch_size), desc=purpose, disable=not show_progress):
        generator = stream_generator(config.seed, purpose, start, device=unet.device)
        output = pipeline(
            batch_size=min(batch_size, num_images - start),
            generator=generator,
            num_inference_steps=config.ddpm_num_inference_steps,
            output_type="np",
        )
        parts.append(output.images)
    unet.train(was_training)
    return np.concatenate(parts)


def to_uint8(images: np.ndarray) -> np.ndarray:
    """Images in [0, 1] as 8-bit ones."""
    return np.rint(images * 255).astype(np.uint8)


def to_tensor(images: np.ndarray) -> torch.Tensor:
    """Images `(num, height, width, channels)` in [0, 1] as the tensors `(num, channels, height, width)` of training."""
    return torch.from_numpy(images).permute(0, 3, 1, 2) * 2 - 1


def save_preview(folder: Path, update: int, images: np.ndarray) -> None:
    """Keeps samples of one moment as an array, from which the plots are drawn."""
    with atomic_file(folder / f"update-{update:08d}.npy") as path:
        np.save(path, to_uint8(images))


def load_previews(folder: Path) -> dict[int, np.ndarray]:
    """Update -> samples, in order."""
    return {int(path.stem.split("-")[1]): np.load(path) for path in sorted(folder.glob("update-*.npy"))}


def save_pipeline(unet: Any, noise_scheduler: Any, folder: Path) -> None:
    """Writes a pipeline that `DDPMPipeline.from_pretrained` loads; each part appears whole, the index last."""
    temporary = folder / f".tmp-{os.getpid()}-pipeline"
    try:
        with full_disk_explained(folder / "model_index.json"):
            DDPMPipeline(unet=unet, scheduler=noise_scheduler).save_pretrained(temporary)
        for part in ("unet", "scheduler"):
            if (folder / part).exists():
                os.replace(folder / part, temporary / f"old-{part}")
            os.replace(temporary / part, folder / part)
        os.replace(temporary / "model_index.json", folder / "model_index.json")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
