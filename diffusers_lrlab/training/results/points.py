"""Results of points: scatter plots, and the number of samples for distances."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from ...core.streams import stream_generator
from ...data.loading import TrainingData
from ..pipeline import load_previews, make_pipeline
from ..run_state import RunState
from . import Results

_FRAMES = 6


class PointResults(Results):
    """Scatter plots."""

    num_recorded = 1000
    stream = "distances"

    def as_pictures(self, run: RunState, samples: np.ndarray) -> np.ndarray:
        from ..plots import as_picture, limits_of

        return as_picture(samples, limits_of(_real_points(run.data, len(samples)), samples))[None]

    def evaluate(self, run: RunState, samples: np.ndarray | None, metrics: Collection[str] | None = None) -> dict[str, Any]:
        results = super().evaluate(run, samples, metrics)
        if samples is None:
            return results
        num_held_out = min(len(samples), len(run.data.held_out))
        return results | {"distance_samples": len(samples), "distance_held_out_points": num_held_out}

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
        from ..plots import plot_beside, plot_point_progress, plot_trajectory

        real, sampled = _real_points(run.data, len(samples)), self._sampled
        plot_beside(real, samples, lab / "samples.png")
        plot_point_progress(load_previews(lab / "samples"), run.plan.num_updates, real, lab / "progress.png")
        plot_trajectory(sampled.frames, sampled.frame_timesteps, real, lab / "trajectory.png")


def _real_points(data: TrainingData, num: int) -> np.ndarray:
    """Held-out points to show beside samples, or training points if none are held out."""
    return (data.held_out if len(data.held_out) else data.all_in_memory(num)[:num]).data.numpy()
