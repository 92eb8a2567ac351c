"""Points of any dimension: an `MLPDenoiser` in a `PointDDPMPipeline`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import must_be
from ...data.image_sets import IMAGE_DATASETS
from ..config import ResolvedConfig, TrainingConfig
from . import KINDS, DataKind

if TYPE_CHECKING:
    import torch

    from ...data.loading import TrainingData
    from ...data.options import BatchLayout

_DEFAULTS: dict[str, Any] = {
    "max_train_steps": 10_000,
    "num_validation_images": 10_000,
    "train_batch_size": 256,
    "learning_rate": 3e-4,
    "eval_batch_size": 2000,
    "dataloader_num_workers": 0,
}
_LOSS_BATCH = 10_000  # small passes take long, and this takes little memory
# Samples to measure after so many points, as of a run of the default length; fewer for fewer points.
_FULL_SAMPLES, _FULL_EVALUATION, _FEWEST_SAMPLES = 10_000, 2_560_000, 200


@KINDS.register("points", description="points of any dimension, by an MLPDenoiser", source="own")
class Points(DataKind):
    """Points of any dimension, which are not scaled."""

    name = form = "points"
    results = "diffusers_lrlab.training.results:PointResults"
    model = "diffusers_lrlab.models.mlp_denoiser:MLPDenoiser"
    pipeline = "diffusers_lrlab.pipelines.point_ddpm:PointDDPMPipeline"
    component = "denoiser"
    sampling_batch = 1_000_000
    num_train_timesteps = 100
    is_bounded = False
    has_neighbours = False

    def defaults(self, config: TrainingConfig) -> dict[str, Any]:
        if config.dataset_name in IMAGE_DATASETS:
            raise must_be(
                "--data_kind", config.data_kind, f"left out for the images of {config.dataset_name!r}", "leave it out"
            )
        return _DEFAULTS

    def load_data(self, config: ResolvedConfig, num_processes: int) -> TrainingData:
        from ...data.points import load_point_data

        return load_point_data(config, config.seed)

    def evaluation_batch(self, layout: BatchLayout) -> int:
        return _LOSS_BATCH

    def data_arguments(self, config: ResolvedConfig, data: TrainingData) -> dict[str, Any]:
        return {"dimension": data.image_shape[0]}

    def measured_samples(self, images_seen: int, num_held_out: int, num_images: int | None) -> int:
        at_most = num_held_out or min(_FULL_SAMPLES, num_images or _FULL_SAMPLES)
        if images_seen < _FULL_EVALUATION:
            affordable = int(_FULL_SAMPLES * images_seen / _FULL_EVALUATION) // 50 * 50
            at_most = min(at_most, max(_FEWEST_SAMPLES, affordable))
        return at_most

    def sample(
        self, pipeline: Any, num: int, generator: torch.Generator, num_inference_steps: int, **conditions: torch.Tensor
    ) -> np.ndarray:
        return pipeline(num_points=num, generator=generator, num_inference_steps=num_inference_steps).points
