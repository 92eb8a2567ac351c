"""From the results of a study to its summary: rows, ranks, findings, cost."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from ..files import atomic_file, write_text
from ..training.environment import describe_environment
from .bench import Bench
from .consistency import consistency
from .findings import SPEEDUP, findings, speedup_findings
from .metrics import DEFAULT_METRICS, metric_label, metric_labels
from .paper import nearest_arms
from .ranks import ranks
from .results import RunResult, StudyFolder, finite
from .spec import RunSpec, StudySpec
from .speedups import speedups
from .statistics import NEITHER_IS_BETTER, compare

Values = dict[str, dict[str, dict[int, float]]]


def values_of(spec: StudySpec, results: list[RunResult], metric: str) -> Values:
    """Arm -> data set -> seed -> figure, of the runs that have one; no arm and no data set is missing."""
    values: Values = {arm: {dataset: {} for dataset in spec.datasets} for arm in spec.arms}
    for result in results:
        figure = result.results.get(metric)
        if figure is not None:
            values[result.arm][result.dataset][result.seed] = figure
    return values


def _measured(results: list[RunResult]) -> list[str]:
    """Metrics that any of the runs has, sample quality first."""
    known = dict.fromkeys([*DEFAULT_METRICS, *metric_labels()])
    return [name for name in known if any(name in result.results for result in results)]


def summarise(
    spec: StudySpec, runs: list[RunSpec], results: list[RunResult], tuning: list[RunResult], bench: Bench, command: str
) -> dict[str, Any]:
    """
    Everything that the report and the card say, as data.

    Args:
        spec ([`StudySpec`]): The study.
        runs (`list` of [`RunSpec`]): Of the comparison.
        results (`list` of [`RunResult`]): Theirs.
        tuning (`list` of [`RunResult`]): Of the runs that learning rates were chosen by.
        bench ([`Bench`]): Has data and weights.
        command (`str`): How the study was started.
    """
    rows: list[dict[str, Any]] = []
    told, ranked = {}, {}
    for metric in spec.metrics or _measured(results):
        values = values_of(spec, results, metric)
        of_metric = compare(values, spec.baseline, metric)
        for row in of_metric:
            row["diverged"] = _num_diverged(results, row["arm"], row["dataset"])
            row["floor"] = _floor(results, row["arm"], row["dataset"], metric)
        rows += of_metric
        told[metric] = findings(of_metric, metric, spec.baseline, metric_label(metric))
        if metric not in NEITHER_IS_BETTER:
            ranked[metric] = ranks(values, metric)
    summary: dict[str, Any] = {
        "study": _study(spec, results, tuning, command),
        "rows": rows,
        "ranks": ranked,
        "findings": told,
    }
    if spec.speedup_metric:
        faster, label = speedups(_quality(spec, results), spec.baseline), metric_label(spec.speedup_metric)
        summary["speedups"] = faster
        told[SPEEDUP] = speedup_findings(faster, spec.baseline, f"final {label[0].lower()}{label[1:]}")
    if spec.tune:
        summary["tuning"] = _tuning_rows(spec, results, tuning)
    if spec.paper == "nearest":
        summary["search"] = nearest_arms(results)
    if between := consistency(runs, results, bench):
        summary["consistency"] = between
    return finite(summary)


def _quality(spec: StudySpec, results: list[RunResult]) -> dict[str, Any]:
    """Arm -> data set -> seed -> (updates, quality) at the evaluation points; a baseline that diverged sets no target."""
    curves: dict[str, Any] = {arm: {dataset: {} for dataset in spec.datasets} for arm in spec.arms}
    for result in results:
        quality = result.curves["quality"]
        if spec.speedup_metric in quality and not (result.arm == spec.baseline and result.status == "diverged"):
            curves[result.arm][result.dataset][result.seed] = (quality["update"], quality[spec.speedup_metric])
    return curves


def _tuning_rows(spec: StudySpec, results: list[RunResult], tuning: list[RunResult]) -> list[dict[str, Any]]:
    """The scores that learning rates were chosen by."""
    assert spec.tune is not None
    chosen = {(result.arm, result.dataset): result.learning_rate for result in results}
    rows = []
    for arm in spec.arms:
        for dataset in spec.datasets:
            scores = tuning_scores(spec, tuning, arm, dataset)
            for rate, score in scores.items():
                is_chosen = chosen.get((arm, dataset)) == rate
                row = {"arm": arm, "dataset": dataset, "learning_rate": rate, "score": score, "chosen": is_chosen}
                rows.append({**row, "at_edge": is_chosen and rate in (min(scores), max(scores))})
    return rows


def chosen_rates(spec: StudySpec, results: list[RunResult]) -> dict[tuple[str, str], float] | None:
    """
    The learning rate of each arm on each data set, by the mean of the metric; rates at which a run diverged are out.

    The lowest one where there is no other: what the arm comes to with it belongs into the comparison too.
    """
    if spec.tune is None:
        return None
    chosen = {}
    for arm in spec.arms:
        for dataset in spec.datasets:
            scores = tuning_scores(spec, results, arm, dataset)
            chosen[arm, dataset] = min(scores, key=lambda rate: (scores[rate], rate))
    return chosen


def tuning_scores(spec: StudySpec, results: list[RunResult], arm: str, dataset: str) -> dict[float, float]:
    """From learning rates to the mean of the metric over the seeds for tuning; infinite if one of them diverged."""
    assert spec.tune is not None
    scores = {}
    of_arm = [result for result in results if (result.arm, result.dataset) == (arm, dataset)]
    for rate in sorted({result.learning_rate for result in of_arm}):
        values = [result.results.get(spec.tune.metric) for result in of_arm if result.learning_rate == rate]
        scores[rate] = math.inf if None in values or not values else float(np.mean(np.array(values, float)))
    return scores


def _num_diverged(results: list[RunResult], arm: str, dataset: str) -> int:
    return sum((result.arm, result.dataset, result.status) == (arm, dataset, "diverged") for result in results)


def _floor(results: list[RunResult], arm: str, dataset: str, metric: str) -> float | None:
    """What held-out points, or training images, score in the place of samples; as many as the arm holds out."""
    for key in (f"{metric}_of_held_out_points", f"{metric}_of_training_images"):
        for result in results:
            if (result.arm, result.dataset) == (arm, dataset) and key in result.results:
                return result.results[key]
    return None


def write_summary(folder: StudyFolder, summary: dict[str, Any]) -> None:
    """`summary.json`, and its rows as `summary.parquet`."""
    import pyarrow as pa
    from pyarrow import parquet

    write_text(folder.path / "summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")
    flat = [{**row, "seeds_needed": json.dumps(row["seeds_needed"])} for row in summary["rows"]]
    with atomic_file(folder.path / "summary.parquet") as path:
        parquet.write_table(pa.Table.from_pylist(flat), path)


def _study(spec: StudySpec, results: list[RunResult], tuning: list[RunResult], command: str) -> dict[str, Any]:
    everything = [*results, *tuning]
    seconds = {
        part: sum(result.record["train"][f"{part}_seconds"] for result in everything)
        for part in ("training", "sampling", "evaluation")
    }
    return {
        "name": spec.name,
        "title": spec.title,
        "baseline": spec.baseline,
        "paper": spec.paper,
        "arms": spec.arms,
        "datasets": list(spec.datasets),
        "seeds": list(spec.seeds),
        "metrics": list(spec.metrics or _measured(results)),
        "primary_metric": spec.primary_metric or next(iter(_measured(results)), ""),
        "command": command,
        "seconds": seconds,
        "hours": sum(seconds.values()) / 3600,
        "runs": {
            "finished": sum(result.status == "finished" for result in everything),
            "diverged": sum(result.status == "diverged" for result in everything),
        },
        "meta": describe_environment(),
    }
