"""Results of latents: decoded images, compared with the images that were encoded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from ..pipeline import make_pipeline
from ..run_state import RunState
from .images import ImageResults


class LatentResults(ImageResults):
    """Grids and metrics of decoded images."""

    def as_samples(self, run: RunState, data: torch.Tensor) -> np.ndarray:
        return make_pipeline(run).decoded(data.to(run.model.device), "np")

    def evaluate(self, run: RunState, samples: np.ndarray | None, metrics: Collection[str] | None = None) -> dict[str, Any]:
        """The metrics, which compare with the images themselves, and those of held-out images encoded and decoded."""
        from ...evaluation.frechet import image_features  # needs scikit-learn, training does not
        from ...evaluation.image_metrics import FEATURES_OF_DECODED

        name, known = run.data.image_set, run.data.known
        if name is not None and samples is not None and FEATURES_OF_DECODED not in known:
            decoded = torch.from_numpy(self.as_samples(run, run.data.held_out.data)).permute(0, 3, 1, 2) * 2 - 1
            known[FEATURES_OF_DECODED] = image_features(name)(decoded)
        return super().evaluate(run, samples, metrics)
