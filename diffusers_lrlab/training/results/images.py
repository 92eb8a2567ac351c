"""Results of images and latents: grids, and the number of samples for metrics."""

import base64
import io
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ...evaluation.registry import FEATURES_OF_DECODED, measures_samples
from ..pipeline import load_previews, make_pipeline
from ..run_state import RunState
from . import Results


class ImageResults(Results):
    """Grids of images."""

    stream = "frechet"

    def as_pictures(self, run: RunState, samples: np.ndarray) -> np.ndarray:
        return to_uint8(samples)

    def preview(self, samples: np.ndarray) -> np.ndarray:
        return to_uint8(samples)

    def as_samples(self, run: RunState, data: torch.Tensor) -> np.ndarray:
        return ((data.float() + 1) / 2).clamp(0, 1).permute(0, 2, 3, 1).numpy()

    def evaluate(self, run: RunState, samples: np.ndarray | None, metrics: Collection[str] | None = None) -> dict[str, Any]:
        results = super().evaluate(run, samples, metrics)
        if samples is None or not measures_samples(run.kind.form):
            return results
        num_held_out = min(len(samples), len(run.data.held_out))
        return results | {"distance_samples": len(samples), "distance_held_out_images": num_held_out}

    def recorded(self, samples: np.ndarray) -> dict[str, Any]:
        """One PNG, four images in a row, in base64."""
        images = to_uint8(samples)
        rows = [np.concatenate(list(images[start : start + 4]), axis=1) for start in range(0, len(images), 4)]
        grid = np.concatenate([row for row in rows if row.shape == rows[0].shape])
        file = io.BytesIO()
        Image.fromarray(grid.squeeze(-1) if grid.shape[-1] == 1 else grid).save(file, "PNG")
        return {"png": base64.b64encode(file.getvalue()).decode()}

    def draw(self, run: RunState, samples: np.ndarray, lab: Path) -> None:
        from ..plots import plot_image_progress, plot_samples

        classes = run.plan.classes
        columns = None if classes is None else classes.num_shown_of_each(run.config.eval_batch_size)
        plot_image_progress(load_previews(lab / "samples"), run.plan.num_updates, lab / "progress.png", classes is not None)
        plot_samples(to_uint8(samples), lab / "samples.png", columns)


class LatentResults(ImageResults):
    """Grids and metrics of decoded images, which are compared with the images that were encoded."""

    def as_samples(self, run: RunState, data: torch.Tensor) -> np.ndarray:
        return make_pipeline(run).decoded(data.to(run.model.device), "np")

    def evaluate(self, run: RunState, samples: np.ndarray | None, metrics: Collection[str] | None = None) -> dict[str, Any]:
        """The metrics, which compare with the images themselves, and those of held-out images encoded and decoded."""
        from ...evaluation.features import image_features  # needs scikit-learn, training does not

        name, known = run.data.image_set, run.data.known
        if name is not None and samples is not None and FEATURES_OF_DECODED not in known:
            decoded = torch.from_numpy(self.as_samples(run, run.data.held_out.data)).permute(0, 3, 1, 2) * 2 - 1
            known[FEATURES_OF_DECODED] = image_features(name)(decoded)
        return super().evaluate(run, samples, metrics)


def to_uint8(images: np.ndarray) -> np.ndarray:
    """From [0, 1]."""
    return np.rint(images * 255).astype(np.uint8)
