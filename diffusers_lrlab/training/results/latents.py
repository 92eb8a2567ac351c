"""Results of latents: decoded images, compared with the images that were encoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from ...data.image_loading import load_image_data
from ...data.layout import BatchLayout
from ..pipeline import make_pipeline
from ..run_state import RunState
from .images import ImageResults


class LatentResults(ImageResults):
    """Grids and metrics of decoded images."""

    def as_samples(self, run: RunState, data: torch.Tensor) -> np.ndarray:
        return make_pipeline(run).decoded(data.to(run.model.device), "np")

    def evaluate(self, run: RunState, samples: np.ndarray | None, metrics: Collection[str] | None = None) -> dict[str, Any]:
        """The Fréchet distance is to the images of an embedded set, not to what the autoencoder makes of them."""
        from ...evaluation.frechet import image_features  # needs scikit-learn, training does not
        from ...evaluation.metrics import FEATURES_OF_DECODED, FEATURES_OF_IMAGES, features_of

        name, known = run.data.image_set, run.data.known
        if name is not None and samples is not None and FEATURES_OF_IMAGES not in known:
            features, config = image_features(name), run.config
            # The same rows are held out as of their latents.
            config = dataclasses.replace(config, dataset_name=name, train_data_dir=None, data_kind=None)
            images = load_image_data(config, config.seed, BatchLayout(1))
            known[FEATURES_OF_IMAGES] = features_of(features, images)
            decoded = torch.from_numpy(self.as_samples(run, run.data.held_out.data)).permute(0, 3, 1, 2) * 2 - 1
            known[FEATURES_OF_DECODED] = features(decoded)
        return super().evaluate(run, samples, metrics)
