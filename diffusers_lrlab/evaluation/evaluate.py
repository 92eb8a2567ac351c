"""The metrics of a trained run, and of any two sets of samples."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..core.errors import LabError
from .metrics import METRICS
from .registry import MOST_REAL, NEIGHBOUR, Evaluation, Metric


def evaluate(
    run: Any,
    samples: np.ndarray | None,
    names: Collection[str] | None = None,
    as_samples: Callable[[torch.Tensor], np.ndarray] = torch.Tensor.numpy,
) -> dict[str, Any]:
    """
    The metrics of a trained run (a [`RunState`]) besides those in its log: these `names`, or all.

    `samples` are of its averaged weights; without them, metrics that need some are omitted. `as_samples` converts data to
    arrays in the form of samples.
    """
    evaluation = Evaluation(run, samples)
    results: dict[str, Any] = {}
    chosen = metrics_of(run, samples is not None, names)
    for metric in chosen:
        if metric.of == "run" and metric.function:
            results |= metric(evaluation)
    compared = {metric.name: metric for metric in chosen if metric.of == "samples"}
    if samples is None or not compared:
        return results
    num_real = run.data.num_images or MOST_REAL
    most_real = max(sizes_for(metric, num_real, len(samples))[0] for metric in compared.values())
    real = as_samples(evaluation.some_real(most_real).data[:most_real])
    results |= compare_samples(real, samples, "distances of samples", compared, run.kind.form)
    # The score of held-out data in place of samples is the same for all runs on these data.
    items = run.kind.form if run.kind.form in ("images", "points") else "data"
    known, key = run.data.known, ("floors", len(samples), frozenset(compared))
    if key not in known:
        held_out = as_samples(run.data.held_out.data[: len(samples)])
        known[key] = compare_samples(real, held_out, f"of held-out {items}", compared, run.kind.form)
    return results | {f"{name}_of_held_out_{items}": value for name, value in known[key].items()}


def metrics_of(run: Any, has_samples: bool, names: Collection[str] | None = None) -> list[Metric]:
    """The metrics that [`evaluate`] computes."""
    metrics = [metric for metric in METRICS.values() if metric.form in (None, run.kind.form) and metric.function]
    metrics = [metric for metric in metrics if has_samples or "samples" not in metric.needs]
    if names is not None:
        return [metric for metric in metrics if metric.name in names]
    if run.data.classes is None:
        metrics = [metric for metric in metrics if "labels" not in metric.needs]
    measured = run.config.distance_samples or 0
    return [metric for metric in metrics if metric.fewest_samples <= measured]


def compare_samples(
    real: np.ndarray,
    generated: np.ndarray,
    progress: str | None = None,
    names: Collection[str] | None = None,
    form: str = "points",
) -> dict[str, float]:
    """
    Every comparison of samples with data, or those with these `names`; none for too few samples.

    Both are points `(num, dimension)`, or images `(num, height, width, channels)` in [0, 1], in random order. `progress` is
    the text of a progress bar in a terminal.
    """
    results: dict[str, float] = {}
    if form == "images":
        _check_images(real, generated)
    if min(len(real), len(generated)) <= NEIGHBOUR:
        return results
    metrics = [metric for metric in METRICS.values() if metric.of == "samples" and metric.form in (None, form)]
    chosen = [metric for metric in metrics if metric.function and (names is None or metric.name in names)]
    for metric in tqdm(chosen, desc=progress, leave=False, disable=None if progress else True):
        num_real, num_generated = sizes_for(metric, len(real), len(generated))
        results |= metric(real[:num_real], generated[:num_generated])
    return results


def _check_images(*sets: np.ndarray) -> None:
    for images in sets:
        lowest, highest = images.min(initial=1.0), images.max(initial=0.0)
        if images.ndim != 4 or images.shape[1:] != sets[0].shape[1:] or not (lowest >= 0 and highest <= 1):
            got = f"{images.shape}, from {lowest:g} to {highest:g}"
            raise LabError(f"Expected images (num, height, width, channels) of one size in [0, 1], got {got}.")


def sizes_for(metric: Metric, num_real: int, num_generated: int) -> tuple[int, int]:
    """How many of these real and generated samples a metric compares."""
    num_generated = min(num_generated, metric.num_generated or num_generated)
    return min(num_real, metric.num_real or num_generated), num_generated
