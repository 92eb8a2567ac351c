"""Time of the metrics at the end of a run, estimated from a small part of each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from ..core.errors import failures_located
from ..evaluation.evaluate import metrics_of, sizes_for
from ..evaluation.registry import Metric
from ..evaluation.subject import NEIGHBOUR, Evaluation
from ..training.results.base import results_of
from .probes import Budget, grow, power_of

if TYPE_CHECKING:
    from ..training.run_state import RunState

_FIRST_SHARE = 32  # the first part of a comparison is a 32nd of it
_SMALLEST = 50  # samples


def forecast_evaluation(run: RunState, num_samples: int, budget: Budget) -> dict[str, float | None]:
    """Seconds of each metric of the run, by name; `None` if its time cannot be estimated from a part."""
    evaluation = Evaluation(run, None)
    metrics = metrics_of(run, bool(num_samples))
    seconds: dict[str, float | None] = {}
    for num_done, metric in enumerate(metrics):
        with budget.shown(f"the evaluation, {metric.name}"), failures_located(f"The metric {metric.name!r}"):
            share = budget.share(1 / (len(metrics) - num_done))
            if metric.of == "samples":
                seconds[metric.name] = _seconds_of_comparison(run, metric, num_samples, share)
            else:
                seconds[metric.name] = _seconds_by_part(metric, evaluation) if share else None
    return seconds


def _seconds_by_part(metric: Metric, evaluation: Evaluation) -> float | None:
    if metric.part is None:
        return None
    times = []
    for _ in range(2):  # the first time is slower
        started = time.perf_counter()
        factor = metric.part(evaluation)
        times.append(time.perf_counter() - started)
        if factor <= 1:
            break
    return factor * times[-1]


def _seconds_of_comparison(run: RunState, metric: Metric, num_samples: int, seconds: float) -> float | None:
    """Seconds to compare samples, and then held-out data, with data; measured on data alone."""
    data = run.data
    num_data = len(data.in_memory) if data.in_memory is not None else data.num_images or len(data.held_out)
    held_out = min(len(data.held_out), num_samples)
    num_real, num_generated = sizes_for(metric, num_data, num_samples)
    known = data.all_in_memory(num_generated) if data.in_memory is not None else data.held_out
    points = results_of(run.kind).as_samples(run, known.data)
    if min(num_real, num_generated) <= NEIGHBOUR or len(points) <= 2 * NEIGHBOUR or metric.function is None:
        return 0.0
    if (metric.most_dimensions or points.shape[1]) < points.shape[1]:
        return 0.0
    real, generated = np.array_split(points[np.random.default_rng(0).permutation(len(points))], 2)
    whole = max(num_real, num_generated)

    def compare(size: int) -> None:
        share, fewest = size / whole, NEIGHBOUR + 1
        metric(real[: max(fewest, int(share * num_real))], generated[: max(fewest, int(share * num_generated))])

    # The largest comparison that the data allow.
    most = min(whole, max(NEIGHBOUR + 1, int(whole * min(len(real) / num_real, len(generated) / num_generated))))
    readings = grow(compare, max(_SMALLEST, whole // _FIRST_SHARE), most, seconds)
    return power_of(readings, whole) * (1 + held_out / num_samples)
