"""Whether runs learn the same thing: samples from one starting noise, and the loss between the weights of two runs.

That diffusion models trained apart turn one noise into much the same sample is what arXiv 2404.07946 takes for a sign of a
smooth loss; both are measured here.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ...evaluation.landscape import barrier, curvature, losses_between
from ...evaluation.validation_loss import ValidationLoss
from ...training.resolve_timesteps import objective_spec
from ..runs.context import StudyContext
from ..runs.results import RunResult
from ..spec.spec import RunSpec

_POINTS = 2000
_MOST_SEEDS = 10  # of which all pairs are compared


def consistency(runs: list[RunSpec], results: list[RunResult], study: StudyContext) -> list[dict[str, Any]]:
    """
    Distances between the samples that two runs make from the same noise, beside those of unrelated noise.

    A row for the seeds of each arm on each data set, and one for each two arms on it with different architectures; results
    without samples from the fixed start are left out.
    """
    by_place: dict[tuple[str, str], list[RunResult]] = {}
    for result in results:
        if result.status == "finished" and "fixed_start" in result.record:
            by_place.setdefault((result.dataset, result.arm), []).append(result)
    specs = {run.id: run for run in runs}
    rows = []
    for (dataset, arm), some in sorted(by_place.items()):
        if neighbours := list(itertools.pairwise(some)):
            pairs = list(itertools.combinations(some[:_MOST_SEEDS], 2))
            row = {"dataset": dataset, "between": f"seeds of {arm}", **_distances(pairs)}
            rows.append(row | _landscape(neighbours[:_MOST_SEEDS], specs, study))
    for (dataset, arm), some in sorted(by_place.items()):
        for other in sorted({place[1] for place in by_place if place[0] == dataset and place[1] > arm}):
            others = {result.seed: result for result in by_place[dataset, other]}
            pairs = [(result, others[result.seed]) for result in some if result.seed in others]
            if pairs and _architecture(some[0]) != _architecture(by_place[dataset, other][0]):
                rows.append({"dataset": dataset, "between": f"{arm} and {other}, by seed", **_distances(pairs)})
    return rows


def _architecture(result: RunResult) -> Any:
    return result.record["train"]["model"], result.record["train"]["num_parameters"]


def _distances(pairs: Iterable[tuple[RunResult, RunResult]]) -> dict[str, Any]:
    """Mean distances of samples from the same noise, and of samples that were shuffled."""
    same, unrelated = [], []
    for first, second in pairs:
        x, y = (np.array(result.record["fixed_start"]["points"]) for result in (first, second))
        same.append(np.linalg.norm(x - y, axis=1).mean())
        unrelated.append(np.linalg.norm(x - np.roll(y, len(y) // 2, axis=0), axis=1).mean())
    distances = {"distance": float(np.mean(same)), "distance_of_unrelated_starts": float(np.mean(unrelated))}
    return {"pairs": len(same), **distances, "ratio": float(np.mean(same) / np.mean(unrelated))}


def _landscape(
    pairs: Iterable[tuple[RunResult, RunResult]], specs: dict[str, RunSpec], study: StudyContext
) -> dict[str, float | None]:
    """The held-out loss along the lines between neighbouring seeds' weights."""
    barriers, curvatures = [], []
    for first, second in pairs:
        one, other = study.folder.read_weights(first.id), study.folder.read_weights(second.id)
        if first.config["num_validation_images"] and one is not None and other is not None:
            plan, data = study.plan(specs[first.id])
            process, model = objective_spec(plan.config).make_process(), plan.model_class(**plan.model_config)
            loss = ValidationLoss(data.held_out[:_POINTS], process, _POINTS, torch.device("cpu"))
            curve = losses_between(model, one, other, lambda model, loss=loss: loss(model).mean())
            barriers.append(barrier(curve))
            curvatures.append(curvature(curve))
    if not barriers:
        return {"loss_barrier": None, "curvature_of_the_loss": None}
    return {"loss_barrier": float(np.mean(barriers)), "curvature_of_the_loss": float(np.mean(curvatures))}
