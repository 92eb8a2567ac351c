"""From the results of a study to its summary: rows, ranks, findings, cost."""

from __future__ import annotations

import json
from typing import Any

from ..files import atomic_file, write_text
from ..training.environment import describe_environment
from .findings import findings
from .metrics import metric_labels
from .ranks import ranks
from .results import RunResult, StudyFolder, finite
from .spec import StudySpec
from .statistics import compare
from .tables import metric_label

Values = dict[str, dict[str, dict[int, float]]]


def values_of(spec: StudySpec, results: list[RunResult], metric: str) -> Values:
    """arm -> data set -> seed -> figure, of the runs that have one; no arm and no data set is missing."""
    values: Values = {arm: {dataset: {} for dataset in spec.datasets} for arm in spec.arms}
    for result in results:
        figure = result.results.get(metric)
        if figure is not None:
            values[result.arm][result.dataset][result.seed] = figure
    return values


def _measured(results: list[RunResult]) -> list[str]:
    """Metrics that any of the runs has."""
    known = metric_labels()
    return [name for name in known if any(name in result.results for result in results)]


def summarise(
    spec: StudySpec, results: list[RunResult], tuning: list[RunResult], folder: StudyFolder, command: str
) -> dict[str, Any]:
    """
    Everything that the report and the card say, as data.

    Args:
        spec ([`StudySpec`]): The study.
        results (`list` of [`RunResult`]): Of the comparison.
        tuning (`list` of [`RunResult`]): Of the runs that learning rates were chosen by.
        folder ([`StudyFolder`]): Where weights of runs are.
        command (`str`): How the study was started.
    """
    rows: list[dict[str, Any]] = []
    told, ranked = {}, {}
    for metric in spec.metrics or _measured(results):
        values = values_of(spec, results, metric)
        of_metric = compare(values, spec.baseline, metric)
        for row in of_metric:
            row["diverged"] = _num_diverged(results, row["arm"], row["dataset"])
            row["floor"] = _floor(results, row["dataset"], metric)
        rows += of_metric
        told[metric] = findings(of_metric, metric, spec.baseline, metric_label(metric))
        ranked[metric] = ranks(values, metric)
    return finite({"study": _study(spec, results, tuning, command), "rows": rows, "ranks": ranked, "findings": told})


def _num_diverged(results: list[RunResult], arm: str, dataset: str) -> int:
    return sum((result.arm, result.dataset, result.status) == (arm, dataset, "diverged") for result in results)


def _floor(results: list[RunResult], dataset: str, metric: str) -> float | None:
    """What held-out points score in the place of samples."""
    key = f"{metric}_of_held_out_points"
    return next((result.results[key] for result in results if result.dataset == dataset and key in result.results), None)


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
