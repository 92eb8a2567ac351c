"""Points: pictures of the plane, distances to the training points, the exact density where it is known."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.streams import stream_generator
from ...data.loading import TrainingData
from ...data.toy2d_entries import LOG_PROBS
from ...evaluation.likelihood import exact_kl, log_likelihood
from ...evaluation.points import point_metrics
from ...evaluation.validation_loss import ValidationLoss
from ..run_state import RunState
from ..samples import draw_samples, load_previews
from .base import RESULTS, Results

_LIKELIHOOD_POINTS = 1000
_LOSS_BATCH = 10_000
_LOSS_DRAWS = 5  # one draw of noise for each point leaves too much to chance
_FRAMES = 41
_MOST_REAL = 100_000  # points of a stream, or of a set that is not in memory, to compare samples with


@RESULTS.register("points", description="distances to the training points, and pictures of the plane", source="own")
class PointResults(Results):
    """See [`Results`]."""

    def as_pictures(self, run: RunState, samples: np.ndarray) -> np.ndarray:
        from ..plots.points import as_picture, limits_of

        return as_picture(samples, limits_of(_real_points(run.data, len(samples)), samples))[None]

    def samples_to_evaluate(self, run: RunState) -> np.ndarray | None:
        num_samples = run.config.distance_samples
        if num_samples is None:
            num_samples = len(run.data.held_out) or min(10_000, run.data.num_images or 10_000)
        if not num_samples:
            return None
        with run.averaged_weights():
            return draw_samples(run, num_samples, "distances", show_progress=True)

    def evaluate(self, run: RunState, samples: np.ndarray | None, metrics: Collection[str] | None = None) -> dict[str, Any]:
        """Distances of samples to the training points with what held-out points score, exact KL, and the study's loss."""
        data, held_out = run.data, run.data.held_out.numpy()
        real = _shuffled(data.all_in_memory(_MOST_REAL))
        results: dict[str, Any] = {}
        if metrics is None or "training_set_loss" in metrics:
            results["training_set_loss"] = _training_set_loss(run, real)
        if samples is None:
            return results
        if metrics is None or "exact_kl" in metrics:
            with run.averaged_weights():
                results |= _exact_kl(run, held_out)
        results |= point_metrics(real.numpy(), samples, "distances of samples", metrics)
        results |= {f"{name}_of_held_out_points": value for name, value in _floors(run.data, real, samples, metrics).items()}
        return results | {
            "distance_samples": len(samples),
            "distance_held_out_points": min(len(samples), len(held_out)),
        }

    def draw(self, run: RunState, samples: np.ndarray, lab: Path) -> None:
        from ..plots.points import animate, plot_beside, plot_progress, plot_trajectory

        config = run.config
        real = _real_points(run.data, len(samples))
        plot_beside(real, samples, lab / "samples.png")
        plot_progress(load_previews(lab / "samples"), run.plan.num_updates, real, lab / "progress.png")
        with run.averaged_weights():
            pipeline = run.kind.make_pipeline(run.bare_model.eval(), run.noise_scheduler)
            pipeline.set_progress_bar_config(disable=True)
            output = pipeline(
                num_points=len(samples),
                generator=stream_generator(config.seed, "samples", 0, device=run.bare_model.device),
                num_inference_steps=config.ddpm_num_inference_steps,
                num_frames=min(_FRAMES, config.ddpm_num_inference_steps + 1),
            )
        plot_trajectory(output.frames, output.frame_timesteps, real, lab / "trajectory.png")
        animate(output.frames, output.frame_timesteps, real, lab / "sampling.gif")


def _real_points(data: TrainingData, num: int) -> np.ndarray:
    """What samples are shown beside: held-out points, or some to train on if none are held out."""
    return (data.held_out if len(data.held_out) else data.all_in_memory(num)[:num]).numpy()


def _shuffled(points: torch.Tensor) -> torch.Tensor:
    return points[torch.randperm(len(points), generator=torch.Generator().manual_seed(0))]


def _floors(
    data: TrainingData, real: torch.Tensor, samples: np.ndarray, metrics: Collection[str] | None
) -> dict[str, float]:
    """What held-out points score in the place of samples; the same for all runs on these data."""
    key = ("floors", len(samples), metrics if metrics is None else frozenset(metrics))
    if key not in data.known:
        data.known[key] = point_metrics(real.numpy(), data.held_out.numpy()[: len(samples)], "of held-out points", metrics)
    return data.known[key]


def _training_set_loss(run: RunState, real: torch.Tensor) -> float:
    """The loss of the raw weights on all training points: the study's "evaluation loss", here of fixed draws of noise."""
    model, scheduler = run.bare_model, run.noise_scheduler
    with run.raw_weights():
        losses = [ValidationLoss(real, scheduler, _LOSS_BATCH, model.device, draw)(model) for draw in range(_LOSS_DRAWS)]
    return float(np.mean(losses))


def _exact_kl(run: RunState, held_out: np.ndarray) -> dict[str, float]:
    """Where the density of the data is known."""
    log_prob = LOG_PROBS.get(run.config.dataset_name or "")
    points = held_out[:_LIKELIHOOD_POINTS]
    if log_prob is None or len(points) < 2 or run.config.ddpm_num_steps < 2:
        return {}  # the way of the ODE is from the first timestep to the last
    model = run.bare_model
    of_model = log_likelihood(model, run.noise_scheduler, torch.from_numpy(points).to(model.device))
    mean, error = exact_kl(log_prob(points), of_model.cpu().numpy())
    return {"exact_kl": mean, "exact_kl_standard_error": error}
