"""Whether runs learn the same function: samples from shared noise, and the loss between the weights of two runs.

arXiv 2404.07946 takes similar samples of separately trained models for a sign of a smooth loss; both are measured here.
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

_NUM_POINTS = 2000
_MOST_SEEDS = 10  # of which all pairs are compared
Pairs = Iterable[tuple[RunResult, RunResult]]


def consistency(runs: list[RunSpec], results: list[RunResult], study: StudyContext) -> list[dict[str, Any]]:
    """
    Distances between the samples that two runs generate from the same noise, next to those from unrelated noise.

    A row for the seeds of each arm on each data set, and one for each two arms on it with different architectures. Results
    without samples from shared noise are omitted.
    """
    by_cell: dict[tuple[str, str], list[RunResult]] = {}
    for result in results:
        if result.status == "finished" and "fixed_start" in result.record:
            by_cell.setdefault((result.dataset, result.arm), []).append(result)
    by_cell = dict(sorted(by_cell.items()))
    specs = {run.id: run for run in runs}
    rows = []
    for (dataset, arm), found in by_cell.items():
        if neighbours := list(itertools.pairwise(found)):
            pairs = itertools.combinations(found[:_MOST_SEEDS], 2)
            row = {"dataset": dataset, "between": f"seeds of {arm}", **_distances(pairs)}
            rows.append(row | _landscape(neighbours[:_MOST_SEEDS], specs, study))
    for ((dataset, arm), found), ((other_dataset, other_arm), others) in itertools.combinations(by_cell.items(), 2):
        of_seed = {result.seed: result for result in others}
        matched = [(result, of_seed[result.seed]) for result in found if result.seed in of_seed]
        if dataset == other_dataset and matched and _architecture(found[0]) != _architecture(others[0]):
            rows.append({"dataset": dataset, "between": f"{arm} and {other_arm}, by seed", **_distances(matched)})
    return rows


def _architecture(result: RunResult) -> Any:
    return result.record["train"]["model"], result.record["train"]["num_parameters"]


def _distances(pairs: Pairs) -> dict[str, Any]:
    """Mean distances of samples from the same noise, and of shuffled samples."""
    same, unrelated = [], []
    for first, second in pairs:
        x, y = (np.array(result.record["fixed_start"]["points"]) for result in (first, second))
        same.append(np.linalg.norm(x - y, axis=1).mean())
        unrelated.append(np.linalg.norm(x - np.roll(y, len(y) // 2, axis=0), axis=1).mean())
    distances = {"distance": float(np.mean(same)), "distance_of_unrelated_starts": float(np.mean(unrelated))}
    return {"pairs": len(same), **distances, "ratio": float(np.mean(same) / np.mean(unrelated))}


def _landscape(pairs: Pairs, specs: dict[str, RunSpec], study: StudyContext) -> dict[str, float | None]:
    """The held-out loss along the lines between the weights of neighbouring seeds."""
    barriers, curvatures = [], []
    for first, second in pairs:
        one, other = study.folder.read_weights(first.id), study.folder.read_weights(second.id)
        if first.config["num_validation_images"] and one is not None and other is not None:
            plan, data = study.plan(specs[first.id])
            process, model = objective_spec(plan.config).make_process(), plan.new_model()
            loss = ValidationLoss(data.held_out[:_NUM_POINTS], process, _NUM_POINTS, torch.device("cpu"))
            curve = losses_between(model, one, other, lambda model, loss=loss: loss(model).mean())
            barriers.append(barrier(curve))
            curvatures.append(curvature(curve))
    measured = {"loss_barrier": barriers, "curvature_of_the_loss": curvatures}
    return {name: float(np.mean(values)) if values else None for name, values in measured.items()}
