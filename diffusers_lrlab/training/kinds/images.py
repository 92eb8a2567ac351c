"""Runs on images: a `UNet2DModel` in diffusers' own `DDPMPipeline`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...core.errors import LabError
from ...data.loading import TrainingData, load_image_data
from ...evaluation.frechet import digit_features, frechet_distance
from ...models.loading import load_model_config
from ...models.unet import check_resolution, default_down_blocks, default_unet_config
from ..config import TrainingConfig
from ..samples import draw_samples, load_previews
from .base import RunKind

if TYPE_CHECKING:
    from ..run_state import RunCore
    from ..trainer import Trainer


class ImageRuns(RunKind):
    """See [`RunKind`]."""

    things = "images"
    component = "unet"
    pipeline_name = "DDPMPipeline"
    sampling_batch = 250

    def model_class(self) -> Any:
        """The UNet of diffusers."""
        from diffusers import UNet2DModel

        return UNet2DModel

    def make_pipeline(self, model: Any, scheduler: Any) -> Any:
        """The one of diffusers."""
        from diffusers import DDPMPipeline

        return DDPMPipeline(unet=model, scheduler=scheduler)

    def load_data(self, config: TrainingConfig, num_processes: int) -> TrainingData:
        """Images, decoded if they fit into memory."""
        return load_image_data(config, num_processes)

    def load_model_config(self, config: TrainingConfig) -> dict[str, Any] | None:
        """Checked against resolution and channels."""
        name = config.model_config_name_or_path
        if name is None:
            check_resolution(config.resolution, len(default_down_blocks(config.resolution)))
            return None
        unet = load_model_config(self.model_class(), name, config.cache_dir)
        check_resolution(config.resolution, len(unet["block_out_channels"]))
        for key in ("in_channels", "out_channels"):
            if unet[key] != config.image_channels:
                raise LabError(
                    f"The model {name!r} has {key}={unet[key]}, the images have {config.image_channels} channels. Give "
                    f"--image_channels {unet[key]} or another model."
                )
        if unet["class_embed_type"] is not None or unet["num_class_embeds"] is not None:
            raise LabError(
                f"The model {name!r} wants class labels; this script trains without. Remove class_embed_type and "
                "num_class_embeds from its configuration."
            )
        size = unet["sample_size"]
        if size not in (None, config.resolution, [config.resolution] * 2):
            raise LabError(
                f"The model {name!r} has sample_size={size} and would draw samples of that size, not of --resolution "
                f"{config.resolution}. Give --resolution {size} or another model."
            )
        return {**unet, "sample_size": config.resolution}

    def settle_model_config(
        self, config: TrainingConfig, given: dict[str, Any] | None, data: TrainingData
    ) -> dict[str, Any]:
        """By default one whose size fits the images and their number."""
        return given or default_unet_config(config.resolution, config.image_channels, data.num_images)

    def describe_data(self, config: TrainingConfig, data: TrainingData) -> str:
        """Channels and size."""
        return f"{config.image_channels} x {config.resolution} x {config.resolution}"

    def describe_model(self, model_config: dict[str, Any]) -> str:
        """Channels of its levels."""
        return f"UNet2DModel {tuple(model_config['block_out_channels'])}"

    def sample(self, pipeline: Any, num: int, generator: torch.Generator, num_inference_steps: int) -> np.ndarray:
        """Images in [0, 1]."""
        output = pipeline(batch_size=num, generator=generator, num_inference_steps=num_inference_steps, output_type="np")
        return output.images

    def preview(self, samples: np.ndarray) -> np.ndarray:
        """As 8-bit images."""
        return to_uint8(samples)

    def as_pictures(self, trainer: Trainer, samples: np.ndarray) -> np.ndarray:
        """The images themselves."""
        return to_uint8(samples)

    def samples_to_evaluate(self, run: RunCore) -> np.ndarray | None:
        """As many as the Fréchet distance takes."""
        num_samples = run.config.frechet_samples
        if not num_samples:
            return None
        with run.averaged_weights():
            return draw_samples(run, num_samples, "frechet", show_progress=True)

    def evaluate(self, run: RunCore, samples: np.ndarray | None, metrics: Collection[str] | None = None) -> dict[str, Any]:
        """The Fréchet distance of samples to held-out images, and what real images score in their place."""
        if samples is None or (metrics is not None and "frechet_distance" not in metrics):
            return {}
        num_samples, features = len(samples), digit_features()
        of_samples = features(to_tensor(samples))
        held_out = features(run.data.held_out)
        training = features(run.data.all_in_memory())
        # In a random order: neighbours in the data set were written by the same people.
        training = training[np.random.default_rng(0).permutation(len(training))]
        return {
            "frechet_distance": frechet_distance(of_samples, held_out),
            "frechet_distance_of_training_images": frechet_distance(training[:num_samples], held_out),
            "frechet_distance_of_two_real_halves": frechet_distance(*_halves(training, held_out)),
            "frechet_num_samples": num_samples,
            "frechet_features": "32 penultimate units of scikit-learn's MLPClassifier((64, 32), random_state=0) on digits",
        }

    def draw(self, trainer: Trainer, samples: np.ndarray) -> None:
        """A grid of the last ones, and some of them over training."""
        from ..plots.run import plot_progress, plot_samples

        lab = trainer.folder.lab
        plot_progress(load_previews(lab / "samples"), trainer.plan.num_updates, lab / "progress.png")
        plot_samples(to_uint8(samples), lab / "samples.png")


def to_uint8(images: np.ndarray) -> np.ndarray:
    """Images in [0, 1] as 8-bit ones."""
    return np.rint(images * 255).astype(np.uint8)


def to_tensor(images: np.ndarray) -> torch.Tensor:
    """Images `(num, height, width, channels)` in [0, 1] as the tensors `(num, channels, height, width)` of training."""
    return torch.from_numpy(images).permute(0, 3, 1, 2) * 2 - 1


def _halves(training: np.ndarray, held_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    real = np.concatenate([training, held_out])
    order = np.random.default_rng(0).permutation(len(real))
    return real[order[: len(real) // 2]], real[order[len(real) // 2 :]]
