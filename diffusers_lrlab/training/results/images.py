"""Images: a grid of them, and the Fréchet distance on digits."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...evaluation.frechet import digit_features, frechet_distance
from ..kinds.images import to_uint8
from ..run_state import RunState
from ..samples import draw_samples, load_previews
from .base import RESULTS, Results


@RESULTS.register("images", description="grids, and the Fréchet distance on digits", source="own")
class ImageResults(Results):
    """See [`Results`]."""

    def as_pictures(self, run: RunState, samples: np.ndarray) -> np.ndarray:
        return to_uint8(samples)

    def samples_to_evaluate(self, run: RunState) -> np.ndarray | None:
        num_samples = run.config.frechet_samples
        if not num_samples:
            return None
        with run.averaged_weights():
            return draw_samples(run, num_samples, "frechet", show_progress=True)

    def evaluate(self, run: RunState, samples: np.ndarray | None, metrics: Collection[str] | None = None) -> dict[str, Any]:
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

    def draw(self, run: RunState, samples: np.ndarray, lab: Path) -> None:
        from ..plots.run import plot_progress, plot_samples

        plot_progress(load_previews(lab / "samples"), run.plan.num_updates, lab / "progress.png")
        plot_samples(to_uint8(samples), lab / "samples.png")


def to_tensor(images: np.ndarray) -> torch.Tensor:
    """Images `(num, height, width, channels)` in [0, 1] as the tensors `(num, channels, height, width)` of training."""
    return torch.from_numpy(images).permute(0, 3, 1, 2) * 2 - 1


def _halves(training: np.ndarray, held_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    real = np.concatenate([training, held_out])
    order = np.random.default_rng(0).permutation(len(real))
    return real[order[: len(real) // 2]], real[order[len(real) // 2 :]]
