"""Tuning of learning rates: the runs it needs, in rounds, and the rates that follow from their results."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..results import RunResult, StudyFolder
from ..spec.expansion import expand_tuning
from ..spec.spec import Cell, RunSpec, StudySpec, next_beyond


def tuning_rounds(spec: StudySpec, folder: StudyFolder) -> list[list[RunSpec]]:
    """
    The runs for tuning, round by round, as far as they follow from the results in the folder.

    The first round has the rates of the specification. Each later round adds a rate for every arm and data set whose best
    rate is at the edge of those tried. It starts when the previous round is complete, so a resumed study computes the same
    rounds and stacks. Tuning is done if no run of the last round is missing.
    """
    if spec.tune is None:
        return []
    rounds: list[list[RunSpec]] = []
    results: list[RunResult] = []
    grids = dict.fromkeys(itertools.product(spec.arms, spec.datasets), spec.tune.grid)
    added: dict[Cell, Sequence[float]] = dict(grids)
    while new := expand_tuning(spec, added):
        rounds.append(new)
        results += (of_round := folder.results(new))
        if len(of_round) < len(new):
            break
        added = {cell: _numbers_beyond(spec, results, cell, grid) for cell, grid in grids.items()}
        grids = {cell: (*grid, *added[cell]) for cell, grid in grids.items()}
    return rounds


def most_tuning_runs(spec: StudySpec) -> int:
    """The runs for tuning if every grid is extended to its limit: on one side; a single rate starts on both."""
    if spec.tune is None:
        return 0
    extensions = spec.tune.extensions + (len(spec.tune.grid) == 1 and spec.tune.extensions > 0)
    return len(spec.arms) * len(spec.datasets) * len(spec.tune.seeds) * (len(spec.tune.grid) + extensions)


def chosen_rates(spec: StudySpec, tuning: list[RunResult]) -> dict[Cell, float] | None:
    """
    The learning rate of each arm on each data set with the best mean of the metric, without divergence.

    If runs diverged at all rates, it is the lowest.
    """
    if spec.tune is None:
        return None
    return {cell: _best(_scores(spec, tuning, cell)) for cell in itertools.product(spec.arms, spec.datasets)}


def tuning_rows(spec: StudySpec, results: list[RunResult], tuning: list[RunResult]) -> list[dict[str, Any]]:
    """A row for each rate that was tried; "at_edge" if it is chosen and is the lowest or the highest."""
    chosen = {(result.arm, result.dataset): result.learning_rate for result in results}
    rows = []
    for arm, dataset in itertools.product(spec.arms, spec.datasets):
        scores = _scores(spec, tuning, (arm, dataset))
        for rate, score in scores.items():
            is_chosen = chosen.get((arm, dataset)) == rate
            row = {"arm": arm, "dataset": dataset, "learning_rate": rate, "score": score, "chosen": is_chosen}
            rows.append({**row, "at_edge": is_chosen and rate in (min(scores), max(scores))})
    return rows


def _numbers_beyond(spec: StudySpec, tuning: list[RunResult], cell: Cell, grid: Sequence[float]) -> list[float]:
    """The numbers that extend a grid below and above; none if the best rate is inside, or the limit is reached."""
    assert spec.tune is not None
    scores = _scores(spec, tuning, cell)
    best, first = _best(scores), spec.tune.grid
    below, above = sum(number < min(first) for number in grid), sum(number > max(first) for number in grid)
    sides = [(False, below, min(scores)), (True, above, max(scores))]
    sides = [(higher, tried, edge) for higher, tried, edge in sides if best == edge and tried < spec.tune.extensions]
    numbers = (next_beyond(grid, higher) for higher, *_ in sides)
    return [number for number in numbers if number is not None]


def _best(scores: dict[float, float]) -> float:
    return min(scores, key=lambda rate: (scores[rate], rate))


def _scores(spec: StudySpec, tuning: list[RunResult], cell: Cell) -> dict[float, float]:
    """From learning rates to the mean of the metric over the seeds for tuning; infinite if one of them diverged."""
    assert spec.tune is not None
    values: dict[float, list[float]] = {}
    for result in tuning:
        if (result.arm, result.dataset) == cell:
            figure = result.results.get(spec.tune.metric)
            values.setdefault(result.learning_rate, []).append(math.inf if figure is None else figure)
    return {rate: float(np.mean(values[rate])) for rate in sorted(values)}
