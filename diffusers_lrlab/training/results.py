"""Results of a trained model by kind of data: samples, plots of them, metrics."""

import base64
import functools
import io
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image

from ..core.streams import stream_generator
from ..data.loading import TrainingData
from ..evaluation.registry import FEATURES_OF_DECODED, measures_samples
from .kinds import DataKind
from .pipeline import draw_samples, load_previews, make_pipeline
from .run_state import RunState

_FRAMES = 6  # of points, from noise to data


class Results(ABC):
    """Samples, metrics and plots of runs on one kind of data, which names its subclass."""

    num_recorded: ClassVar[int] = 16  # most samples in the record of a study's run
    stream: ClassVar[str] = "samples to evaluate"  # name of their random stream

    def preview(self, samples: np.ndarray) -> np.ndarray:
        """Samples as they are kept during training; 8-bit images `(num, height, width, channels)` go to trackers, too."""
        return samples

    def as_samples(self, run: RunState, data: torch.Tensor) -> np.ndarray:
        """Data in the form of samples, which are compared with them."""
        return data.numpy()

    def samples_to_show(self, run: RunState) -> np.ndarray:
        """Samples of the model as it is, for the plots at the end of a run."""
        return draw_samples(run, run.config.eval_batch_size)

    def samples_to_evaluate(self, run: RunState) -> np.ndarray | None:
        """Samples of the averaged weights; `None` if none are measured."""
        if not run.config.distance_samples:
            return None
        with run.averaged_weights():
            return draw_samples(run, run.config.distance_samples, self.stream, show_progress=True)

    def evaluate(self, run: RunState, samples: np.ndarray | None, metrics: Collection[str] | None = None) -> dict[str, Any]:
        """
        Metrics of a finished run beside the losses in its log: the named ones, or those of every run. `samples` are those of
        [`samples_to_evaluate`].
        """
        from ..evaluation.metrics import evaluate

        results, form = evaluate(run, samples, metrics, functools.partial(self.as_samples, run)), run.kind.form
        if samples is None or not measures_samples(form):
            return results
        num_held_out = min(len(samples), len(run.data.held_out))
        return results | {"distance_samples": len(samples), f"distance_held_out_{form}": num_held_out}

    def recorded(self, samples: np.ndarray) -> dict[str, Any]:
        """Samples for the record of a study's run, as "points" or a "png"; empty if it keeps none."""
        return {}

    @abstractmethod
    def draw(self, run: RunState, samples: np.ndarray, lab: Path) -> None:
        """Plots [`samples_to_show`], and samples over training, into the folder `lab`."""


def results_of(kind: DataKind) -> Results:
    return pkgutil.resolve_name(kind.results)()


class ImageResults(Results):
    """Grids of images."""

    stream = "frechet"

    def preview(self, samples: np.ndarray) -> np.ndarray:
        return to_uint8(samples)

    def as_samples(self, run: RunState, data: torch.Tensor) -> np.ndarray:
        return ((data.float() + 1) / 2).clamp(0, 1).permute(0, 2, 3, 1).numpy()

    def recorded(self, samples: np.ndarray) -> dict[str, Any]:
        """One PNG, four images in a row, in base64."""
        from .plots import image_grid

        grid = image_grid(to_uint8(samples), columns=min(4, len(samples)), gap=0)
        Image.fromarray(grid.squeeze()).save(file := io.BytesIO(), "PNG")
        return {"png": base64.b64encode(file.getvalue()).decode()}

    def draw(self, run: RunState, samples: np.ndarray, lab: Path) -> None:
        from .plots import plot_image_progress, plot_samples

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
        from ..evaluation.features import image_features  # needs scikit-learn, training does not

        name, known = run.data.image_set, run.data.known
        if name is not None and samples is not None and FEATURES_OF_DECODED not in known:
            decoded = torch.from_numpy(self.as_samples(run, run.data.held_out.data)).permute(0, 3, 1, 2) * 2 - 1
            known[FEATURES_OF_DECODED] = image_features(name)(decoded)
        return super().evaluate(run, samples, metrics)


def to_uint8(images: np.ndarray) -> np.ndarray:
    """From [0, 1]."""
    return np.rint(images * 255).astype(np.uint8)


class PointResults(Results):
    """Scatter plots."""

    num_recorded = 1000
    stream = "distances"

    def recorded(self, samples: np.ndarray) -> dict[str, Any]:
        return {"points": np.round(samples.astype(np.float64), 4).tolist()}

    def samples_to_show(self, run: RunState) -> np.ndarray:
        """The samples of the base class, with the frames that `draw` shows."""
        config, pipeline = run.config, make_pipeline(run)
        pipeline.set_progress_bar_config(disable=True)
        run.model.eval()
        self._sampled = pipeline(
            num_points=config.eval_batch_size,
            generator=stream_generator(config.seed, "samples", 0, device=run.model.device),
            num_inference_steps=config.num_inference_steps,
            num_frames=min(_FRAMES, config.num_inference_steps + 1),
        )
        return self._sampled.points

    def draw(self, run: RunState, samples: np.ndarray, lab: Path) -> None:
        from .plots import plot_beside, plot_point_progress, plot_trajectory

        real, sampled = _real_points(run.data, len(samples)), self._sampled
        plot_beside(real, samples, lab / "samples.png")
        plot_point_progress(load_previews(lab / "samples"), run.plan.num_updates, real, lab / "progress.png")
        plot_trajectory(sampled.frames, sampled.frame_timesteps, real, lab / "trajectory.png")


def _real_points(data: TrainingData, num: int) -> np.ndarray:
    """Held-out points to show beside samples, or training points if none are held out."""
    return (data.held_out if len(data.held_out) else data.all_in_memory(num)[:num]).data.numpy()
