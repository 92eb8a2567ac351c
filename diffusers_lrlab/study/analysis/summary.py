"""From the results of a study to its summary: rows, ranks, findings, cost."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from ...core.environment import describe_environment
from ...core.files import atomic_file, write_text
from ...evaluation.metrics import better_of, metric_label
from ..runs.results import RunResult, StudyFolder, finite
from ..runs.study_data import StudyData
from ..spec.spec import RunSpec, StudySpec, controlled
from .consistency import consistency
from .controls import against_controls
from .findings import SPEEDUP, findings, speedup_findings
from .paper import nearest_arms
from .ranks import ranks
from .speedups import speedups
from .statistics import compare

Rows = list[dict[str, Any]]
Values = dict[str, dict[str, dict[int, float]]]


def values_of(spec: StudySpec, results: list[RunResult], metric: str) -> Values:
    """Arm -> data set -> seed -> figure, of the runs that have one; no arm and no data set is missing."""
    values: Values = {arm: {dataset: {} for dataset in spec.datasets} for arm in spec.arms}
    for result in results:
        figure = result.results.get(metric)
        if figure is not None:
            values[result.arm][result.dataset][result.seed] = figure
    return values


def _measured(runs: list[RunSpec], results: list[RunResult]) -> list[str]:
    """Metrics that any of the runs has, the primary one first."""
    asked = dict.fromkeys(name for run in runs for name in run.metrics)
    return [name for name in asked if any(name in result.results for result in results)]


def summarise(
    spec: StudySpec, runs: list[RunSpec], results: list[RunResult], tuning: list[RunResult], study: StudyData, command: str
) -> dict[str, Any]:
    """Everything that report and card say, as data; `results` are of `runs`, `tuning` of runs that chose learning rates."""
    rows: Rows = []
    sentences, ranked, controls = {}, {}, {}
    metrics = list(spec.metrics) or _measured(runs, results)
    for metric in metrics:
        values = values_of(spec, results, metric)
        of_metric = _compare(results, metric, values, spec.baseline)
        rows += of_metric
        beside = partial(_beside_control, results, metric, values)
        controls[metric], of_controls = against_controls(controlled(spec.arms), beside, partial(_sentences, metric))
        sentences[metric] = _sentences(metric, of_metric, spec.baseline) + of_controls
        if better_of(metric) != "neither":
            ranked[metric] = ranks(values, metric)
    summary: dict[str, Any] = {
        "study": _study(spec, metrics, results, tuning, command),
        "rows": rows,
        "ranks": ranked,
        "findings": sentences,
    }
    if spec.speedup_metric:
        summary["speedups"], controls[SPEEDUP], sentences[SPEEDUP] = _compare_speed(spec, results)
    if controlled(spec.arms):
        summary["controls"] = controls
    if spec.tune:
        summary["tuning"] = _tuning_rows(spec, results, tuning)
    if spec.paper == "nearest":
        summary["search"] = nearest_arms(results)
    if between := consistency(runs, results, study):
        summary["consistency"] = between
    return finite(summary)


def _sentences(metric: str, rows: Rows, reference: str) -> list[str]:
    return findings(rows, metric, reference, metric_label(metric))


def _compare(results: list[RunResult], metric: str, values: Values, reference: str, num_resamples: int = 9999) -> Rows:
    """Rows of a metric, with the runs that diverged, and what held-out points or training images score in their place."""
    rows = compare(values, reference, metric, num_resamples)
    floors = (f"{metric}_of_held_out_points", f"{metric}_of_training_images")
    for row in _with_diverged(rows, results):
        of_arm = [result.results for result in results if (result.arm, result.dataset) == (row["arm"], row["dataset"])]
        row["floor"] = next((found[key] for key in floors for found in of_arm if key in found), None)
    return rows


def _beside_control(results: list[RunResult], metric: str, values: Values, arm: str, control: str) -> Rows:
    """Rows of an arm and its control; intervals of their means by bootstrap are among the rows of all arms."""
    return _compare(results, metric, {control: values[control], arm: values[arm]}, control, num_resamples=0)


def _with_diverged(rows: Rows, results: list[RunResult]) -> Rows:
    diverged = Counter((result.arm, result.dataset) for result in results if result.status == "diverged")
    for row in rows:
        row["diverged"] = diverged[row["arm"], row["dataset"]]
    return rows


def _compare_speed(spec: StudySpec, results: list[RunResult]) -> tuple[Rows, Rows, list[str]]:
    """Rows of arms over the baseline, of arms over their controls, and sentences about both."""
    label = metric_label(spec.speedup_metric or "")
    sentences_of = partial(speedup_findings, quality=f"{label[0].lower()}{label[1:]}")

    def compare_to(reference: str, arms: Iterable[str], common: bool = False) -> Rows:
        return _with_diverged(speedups(_quality(spec, results, arms, reference), reference, common), results)

    def beside(arm: str, control: str) -> Rows:
        return compare_to(control, (control, arm), common=True)

    rows = compare_to(spec.baseline, spec.arms)
    of_controls, sentences = against_controls(controlled(spec.arms), beside, partial(sentences_of, common=True))
    return rows, of_controls, sentences_of(rows, spec.baseline) + sentences


def _quality(spec: StudySpec, results: list[RunResult], arms: Iterable[str], reference: str) -> dict[str, Any]:
    """
    Arm -> data set -> seed -> (updates, quality) at the evaluation points.

    A reference that diverged sets no target; another run that did reaches nothing, whatever is known of it.
    """
    curves: dict[str, Any] = {arm: {dataset: {} for dataset in spec.datasets} for arm in arms}
    for result in results:
        quality, has_diverged = result.curves["quality"], result.status == "diverged"
        if result.arm not in curves or (result.arm == reference and has_diverged):
            continue
        if has_diverged:
            curves[result.arm][result.dataset][result.seed] = ([result.record["train"]["num_updates"]], [math.nan])
        elif spec.speedup_metric in quality:
            curves[result.arm][result.dataset][result.seed] = (quality["update"], quality[spec.speedup_metric])
    return curves


def _tuning_rows(spec: StudySpec, results: list[RunResult], tuning: list[RunResult]) -> Rows:
    chosen = {(result.arm, result.dataset): result.learning_rate for result in results}
    rows = []
    for arm, dataset in itertools.product(spec.arms, spec.datasets):
        scores = _tuning_scores(spec, tuning, arm, dataset)
        for rate, score in scores.items():
            is_chosen = chosen.get((arm, dataset)) == rate
            row = {"arm": arm, "dataset": dataset, "learning_rate": rate, "score": score, "chosen": is_chosen}
            rows.append({**row, "at_edge": is_chosen and rate in (min(scores), max(scores))})
    return rows


def chosen_rates(spec: StudySpec, results: list[RunResult]) -> dict[tuple[str, str], float] | None:
    """
    The learning rate of each arm on each data set, by the mean of the metric; rates at which a run diverged are out.

    The lowest one where there is no other: the comparison shows how the arm fares with it.
    """
    if spec.tune is None:
        return None
    chosen = {}
    for arm, dataset in itertools.product(spec.arms, spec.datasets):
        scores = _tuning_scores(spec, results, arm, dataset)
        chosen[arm, dataset] = min(scores, key=lambda rate: (scores[rate], rate))
    return chosen


def _tuning_scores(spec: StudySpec, results: list[RunResult], arm: str, dataset: str) -> dict[float, float]:
    """From learning rates to the mean of the metric over the seeds for tuning; infinite if one of them diverged."""
    assert spec.tune is not None
    scores = {}
    of_arm = [result for result in results if (result.arm, result.dataset) == (arm, dataset)]
    for rate in sorted({result.learning_rate for result in of_arm}):
        values = [result.results.get(spec.tune.metric) for result in of_arm if result.learning_rate == rate]
        scores[rate] = math.inf if None in values or not values else float(np.mean(np.array(values, float)))
    return scores


def write_summary(folder: StudyFolder, summary: dict[str, Any]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    write_text(folder.path / "summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")
    flat = [{**row, "seeds_needed": json.dumps(row["seeds_needed"])} for row in summary["rows"]]
    with atomic_file(folder.path / "summary.parquet") as path:
        parquet.write_table(pa.Table.from_pylist(flat), path)


def _study(
    spec: StudySpec, metrics: list[str], results: list[RunResult], tuning: list[RunResult], command: str
) -> dict[str, Any]:
    everything, parts = [*results, *tuning], ("training", "sampling", "evaluation")
    seconds = {part: sum(result.record["train"][f"{part}_seconds"] for result in everything) for part in parts}
    return {
        "name": spec.name,
        "title": spec.title,
        "baseline": spec.baseline,
        "paper": spec.paper,
        "arms": spec.arms,
        "datasets": list(spec.datasets),
        "seeds": list(spec.seeds),
        "metrics": metrics,
        "primary_metric": spec.primary_metric or next(iter(metrics), ""),
        "command": command,
        "seconds": seconds,
        "hours": sum(seconds.values()) / 3600,
        "runs": {status: sum(result.status == status for result in everything) for status in ("finished", "diverged")},
        "meta": describe_environment(),
    }
