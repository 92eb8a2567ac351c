"""
What the horizons of a study cost and reach: runs that share their beginning, compared with separate runs for each length.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ...core.words import counted
from ..runs.results import RunResult
from ..spec.horizons import families, source_of, why_separate
from ..spec.spec import RunSpec, StudySpec


def prices_in_words(runs: list[RunSpec]) -> list[str]:
    """For each arm, the updates that all of its horizons take for a seed on a data set, and why it shares none."""
    of_arm: dict[str, list[RunSpec]] = {}
    for run in runs:
        if (run.horizon_of, run.seed) == (runs[0].horizon_of, runs[0].seed):
            of_arm.setdefault(run.arm, []).append(run)
    lines = []
    for arm, own in of_arm.items():
        in_all = sum(run.config.max_train_steps or 0 for run in own)
        known = families(own)
        updates = sum(sum(family.own_updates.values()) for family in known)
        if leaves := [str(update) for family in known for update in family.branches]:
            how = f"one trunk, which branches leave at update {', '.join(leaves)}: {counted(updates, 'update', ',')}"
            how += f" in place of {in_all:,}"
        else:
            reason = why_separate(own[0].config, own[-1].config)
            how = f"separate runs, as {reason}: {counted(updates, 'update', ',')}"
        lines.append(f"{arm}: {how}")
    return lines


def horizon_rows(spec: StudySpec, results: list[RunResult], metrics: list[str]) -> list[dict[str, Any]]:
    """
    A row for each arm, data set and horizon: the updates that its runs cost, and mean and standard deviation by metric.

    `branch_at` is the update at which its runs left a trunk, `None` for runs from the beginning.
    """
    rows = []
    for dataset in spec.datasets:
        for arm in spec.arms:
            some = [result for result in results if (result.arm, result.dataset) == (arm, dataset)]
            finished = [result for result in some if result.status == "finished"]
            if not some:
                continue
            row: dict[str, Any] = {"arm": arm, "dataset": source_of(dataset), "horizon": _length(some[0])}
            row |= {"runs": len(finished), "branch_at": _branch_at(some[0]), "updates": _mean(map(_updates, some))}
            for metric in metrics:
                values = [result.results[metric] for result in finished if metric in result.results]
                row |= {metric: _mean(values), f"{metric}_std": float(np.std(values, ddof=1)) if len(values) > 1 else None}
            rows.append(row)
    return rows


def price_rows(spec: StudySpec, results: list[RunResult], tuning: list[RunResult]) -> list[dict[str, Any]]:
    """
    A row for each arm and data set: the updates of all horizons for a seed, as computed and as separate runs, and those of
    all runs that tuned its rate.
    """
    rows = []
    for dataset in dict.fromkeys(map(source_of, spec.datasets)):
        for arm in spec.arms:
            own = [result for result in results if (result.arm, source_of(result.dataset)) == (arm, dataset)]
            tuned = [result for result in tuning if (result.arm, source_of(result.dataset)) == (arm, dataset)]
            if seeds := {result.seed for result in own}:
                row = {"arm": arm, "dataset": dataset, "updates": sum(map(_updates, own)) / len(seeds)}
                row |= {"separate": sum(map(_length, own)) / len(seeds), "tuning": sum(map(_updates, tuned))}
                rows.append(row)
    return rows


def _length(result: RunResult) -> int:
    return int(result.record["train"]["num_updates"])


def _branch_at(result: RunResult) -> int | None:
    return (result.record["run"]["executor"].get("branch") or {}).get("update")


def _updates(result: RunResult) -> int:
    """The updates that a run cost: a branch those after its trunk."""
    return _length(result) - (_branch_at(result) or 0)


def _mean(values: Iterable[float]) -> float | None:
    found = [*values]
    return float(np.mean(found)) if found else None
