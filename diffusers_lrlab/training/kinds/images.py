"""Images: a `UNet2DModel` in diffusers' own `DDPMPipeline`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import LabError
from ...core.words import counted
from ...data.image_sets import IMAGE_DATASETS
from ...data.image_sets import check_resolution as check_size
from ...data.toy2d_entries import TOY_DATASETS
from ...evaluation.registry import measures_samples
from ...models.loading import load_model_config
from ...models.unet import check_resolution, default_down_blocks, default_unet_config
from ..config import ResolvedConfig, TrainingConfig
from .base import KINDS, DataKind

if TYPE_CHECKING:
    import torch

    from ...data.loading import TrainingData

_DEFAULTS: dict[str, Any] = {
    "resolution": 64,
    "image_channels": 3,
    "num_validation_images": 256,
    "train_batch_size": 16,
    "learning_rate": 1e-4,
    "frechet_samples": 0,
    "eval_batch_size": 16,
}
# Samples for the Fréchet distance of digits, after so many images; fewer in proportion before, and none below the fewest.
_FULL_FRECHET, _FULL_EVALUATION, _FEWEST_FRECHET = 1000, 150_000, 100


@KINDS.register("images", description="images, by a UNet2DModel", source="diffusers")
class Images(DataKind):
    """Images of one size, and the UNet of diffusers' example for them."""

    name = "images"
    results = "diffusers_lrlab.training.results.images:ImageResults"
    model = "diffusers:UNet2DModel"
    pipeline = "diffusers:DDPMPipeline"
    component = "unet"
    sampling_batch = 250
    is_bounded = True
    has_neighbours = True
    default_length = {"num_epochs": 100}
    form = "images"
    default_metrics = ("frechet_distance", "validation_loss_ema", "validation_loss")
    not_stackable = "stacks are of MLPDenoisers on points, and this is a UNet on images"

    def defaults(self, config: TrainingConfig) -> dict[str, Any]:
        embedded = IMAGE_DATASETS[config.dataset_name].facts["defaults"] if config.dataset_name in IMAGE_DATASETS else {}
        defaults = _DEFAULTS | embedded
        return defaults | ({"frechet_samples": None} if measures_samples(self.form) else {})

    def check(self, config: TrainingConfig) -> dict[str, Any]:
        if config.point_column is not None or config.dataset_name in TOY_DATASETS:
            raise LabError(
                f"--data_kind images, but {config.dataset_name or config.train_data_dir!r} is asked for as points. Leave "
                "--data_kind out."
            )
        if config.dataset_name in IMAGE_DATASETS and config.resolution is not None:
            check_size(config.dataset_name, config.resolution)
        if measures_samples(self.form):
            return {}
        asked, held_out = config.frechet_samples, config.num_validation_images
        held_out = _DEFAULTS["num_validation_images"] if held_out is None else held_out
        if asked is None and held_out < 2:
            return {"frechet_samples": 0}
        if asked == 1 or (asked and held_out < 2):
            raise LabError(
                f"--frechet_samples {asked} against {counted(held_out, 'held-out image')}: both sets need 2 at least. Raise "
                "--num_validation_images, or leave --frechet_samples out."
            )
        if asked and config.dataset_name not in IMAGE_DATASETS:
            raise LabError(
                f"--frechet_samples {asked} needs features that suit the data; only embedded sets have them. Leave it out "
                f"for {config.dataset_name or config.train_data_dir!r}, or register features or a metric of images by "
                "--import."
            )
        return {}

    def measured_samples(self, images_seen: int, num_held_out: int, num_images: int | None) -> dict[str, int]:
        affordable = int(_FULL_FRECHET * min(1.0, images_seen / _FULL_EVALUATION)) // 50 * 50
        return {"frechet_samples": affordable if affordable >= _FEWEST_FRECHET else 0}

    def folder_name(self, dataset: str, config: TrainingConfig) -> str:
        return f"{super().folder_name(dataset, config)}-{config.resolution}"

    def load_data(self, config: ResolvedConfig, num_processes: int) -> TrainingData:
        from ...data.image_loading import load_image_data

        return load_image_data(config, config.seed, config.layout(num_processes))

    def describe_data(self, config: ResolvedConfig, data: TrainingData) -> str:
        channels, resolution = config.image_shape
        return f"{channels} x {resolution} x {resolution}"

    def load_model_config(self, config: ResolvedConfig) -> dict[str, Any] | None:
        name, (channels, resolution) = config.model_config_name_or_path, config.image_shape
        if self.denoiser is not None:
            return None
        if name is None:
            check_resolution(resolution, len(default_down_blocks(resolution)))
            return None
        unet = load_model_config(self.model_class(), name, config.cache_dir)
        check_resolution(resolution, len(unet["block_out_channels"]))
        for key in ("in_channels", "out_channels"):
            if unet[key] != channels:
                raise LabError(
                    f"The model {name!r} has {key}={unet[key]}, the images have {counted(channels, 'channel')}. Give "
                    f"--image_channels {unet[key]} or another model."
                )
        if unet["class_embed_type"] is not None or unet["num_class_embeds"] is not None:
            raise LabError(
                f"The model {name!r} wants class labels; this script trains without. Remove class_embed_type and "
                "num_class_embeds from its configuration."
            )
        size = unet["sample_size"]
        if size not in (None, resolution, [resolution] * 2):
            raise LabError(
                f"The model {name!r} has sample_size={size} and would draw samples of that size, not of --resolution "
                f"{resolution}. Give --resolution {size} or another model."
            )
        return {**unet, "sample_size": resolution}

    def resolve_model_config(
        self, config: ResolvedConfig, given: dict[str, Any] | None, data: TrainingData
    ) -> dict[str, Any]:
        channels, resolution = config.image_shape
        return given or default_unet_config(resolution, channels, data.num_images)

    def arguments_of_data(self, config: ResolvedConfig, data: TrainingData) -> dict[str, Any]:
        channels, resolution = config.image_shape
        return {"sample_size": resolution, "in_channels": channels, "out_channels": channels}

    def describe_model(self, model_config: dict[str, Any]) -> str:
        if self.denoiser is not None:
            return super().describe_model(model_config)
        return f"UNet2DModel {tuple(model_config['block_out_channels'])}"

    def sample(self, pipeline: Any, num: int, generator: torch.Generator, num_inference_steps: int) -> np.ndarray:
        output = pipeline(batch_size=num, generator=generator, num_inference_steps=num_inference_steps, output_type="np")
        return output.images

    def preview(self, samples: np.ndarray) -> np.ndarray:
        return to_uint8(samples)

    def lacks_samples(self, config: ResolvedConfig) -> str | None:
        return "needs samples: give frechet_samples above 0" if config.frechet_samples == 0 else None

    def num_compared_samples(self, config: ResolvedConfig) -> int | None:
        return config.frechet_samples

    def as_samples(self, data: torch.Tensor) -> np.ndarray:
        return ((data.float() + 1) / 2).clamp(0, 1).permute(0, 2, 3, 1).numpy()

    card_task = "unconditional-image-generation"
    card_tags = (card_task,)
    card_example = """```python
from diffusers import DDPMPipeline

pipeline = DDPMPipeline.from_pretrained("{location}")
images = pipeline(batch_size=16, num_inference_steps={inference_steps}).images
```
"""
    preflight_checks = ("value_range", "constant_images", "image_sizes")

    def thumbnails(self, data: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import adaptive_avg_pool2d

        return adaptive_avg_pool2d(data, min(8, data.shape[-1])).flatten(1)


def to_uint8(images: np.ndarray) -> np.ndarray:
    """From [0, 1]."""
    return np.rint(images * 255).astype(np.uint8)
