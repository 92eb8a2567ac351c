"""From the results of a study to its summary: rows, ranks, findings, cost."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

from ...core.environment import describe_environment
from ...core.files import atomic_file, write_text
from ...core.manifest import MANIFEST
from ...evaluation.metrics import better_of, metric_label
from ..runs.context import StudyContext
from ..runs.progress import StudyProgress
from ..runs.results import RunResult, StudyFolder, finite
from ..spec.spec import RunSpec, StudySpec, controlled
from .consistency import consistency
from .findings import findings, speedup_findings
from .paper import nearest_arms
from .ranks import ranks
from .speedups import speedups
from .statistics import add_holm, compare
from .tuning import tuning_rows
from .verdicts import SPEEDUP, Verdict

Rows = list[dict[str, Any]]
Values = dict[str, dict[str, dict[int, float]]]


def values_of(spec: StudySpec, results: list[RunResult], metric: str) -> Values:
    """Arm -> data set -> seed -> figure, of the runs that have one; no arm and no data set is missing."""
    values: Values = {arm: {dataset: {} for dataset in spec.datasets} for arm in spec.arms}
    for result in results:
        if (figure := result.results.get(metric)) is not None:
            values[result.arm][result.dataset][result.seed] = figure
    return values


def notes_on(runs: list[RunSpec], results: list[RunResult], study: StudyContext) -> dict[str, Any]:
    """What a summary says that takes more than the figures of its runs: their specifications, weights, or this machine."""
    return {
        "metrics": list(dict.fromkeys(name for run in runs for name in run.metrics)),
        "meta": describe_environment(),
        "consistency": consistency(runs, results, study),
    }


def summarise(
    spec: StudySpec,
    results: list[RunResult],
    tuning: list[RunResult],
    notes: dict[str, Any],
    progress: StudyProgress,
    command: str,
) -> dict[str, Any]:
    """Everything that report and card say, as data; `tuning` are runs that chose learning rates, `notes` of `notes_on`."""
    rows: Rows = []
    verdicts, ranked, controls = {}, {}, {}
    asked = notes["metrics"]
    metrics = list(spec.metrics) or [name for name in asked if any(name in result.results for result in results)]
    for metric in progress.steps(metrics, "statistics"):
        values = values_of(spec, results, metric)
        of_metric = _compare(results, metric, values, spec.baseline)
        rows += of_metric
        beside = partial(_beside_control, results, metric, values)
        controls[metric], of_controls = against_controls(controlled(spec.arms), beside, partial(_verdicts, metric))
        verdicts[metric] = _verdicts(metric, of_metric, spec.baseline) + of_controls
        if better_of(metric) != "neither":
            ranked[metric] = ranks(values, metric)
    about = _study(spec, metrics, results, tuning, command) | {"meta": notes["meta"]}
    summary: dict[str, Any] = {"study": about, "rows": rows, "ranks": ranked}
    if spec.speedup_metric:
        summary["speedups"], controls[SPEEDUP], verdicts[SPEEDUP] = _compare_speed(spec, results)
    summary["findings"] = {metric: [asdict(verdict) for verdict in found] for metric, found in verdicts.items()}
    if controlled(spec.arms):
        summary["controls"] = controls
    if spec.tune:
        summary["tuning"] = tuning_rows(spec, results, tuning)
    if spec.paper == "nearest":
        summary["search"] = nearest_arms(results)
    if notes["consistency"]:
        summary["consistency"] = notes["consistency"]
    return finite(summary)


def _verdicts(metric: str, rows: Rows, reference: str) -> list[Verdict]:
    return findings(rows, metric, reference, metric_label(metric))


def _compare(results: list[RunResult], metric: str, values: Values, reference: str, num_resamples: int = 9999) -> Rows:
    """Rows of a metric, with the runs that diverged, and what held-out points or training images score in their place."""
    rows = compare(values, reference, metric, num_resamples)
    floors = tuple(f"{metric}_of_{what}" for what in ("held_out_points", "held_out_images", "training_images"))
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


def _compare_speed(spec: StudySpec, results: list[RunResult]) -> tuple[Rows, Rows, list[Verdict]]:
    """Rows of arms over the baseline, of arms over their controls, and verdicts on both."""
    label = metric_label(spec.speedup_metric or "")
    verdicts_on = partial(speedup_findings, quality=f"{label[0].lower()}{label[1:]}")

    def compare_to(reference: str, arms: Iterable[str], common: bool = False) -> Rows:
        return _with_diverged(speedups(_quality(spec, results, arms, reference), reference, common), results)

    def beside(arm: str, control: str) -> Rows:
        return compare_to(control, (control, arm), common=True)

    rows = compare_to(spec.baseline, spec.arms)
    of_controls, verdicts = against_controls(controlled(spec.arms), beside, partial(verdicts_on, common=True))
    return rows, of_controls, verdicts_on(rows, spec.baseline) + verdicts


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


def against_controls(
    pairs: Iterable[tuple[str, str]], compare: Callable[[str, str], Rows], judge: Callable[[Rows, str], list[Verdict]]
) -> tuple[Rows, list[Verdict]]:
    """
    One measure of arms, each beside its control instead of the baseline: rows, with the key "control", and verdicts.

    `compare` makes the rows of an arm and its control, with the control as the baseline; `judge` makes verdicts of
    the rows of a pair and its control. The family of Holm's correction is all of these comparisons; that of the comparisons
    with the baseline is another, so that asking for controls changes nothing there.
    """
    found = [(control, compare(arm, control)) for arm, control in pairs]
    rows = []
    for control, of_pair in found:
        of_arm = [row for row in of_pair if row["arm"] != control]
        for row in of_arm:
            row["control"] = control
        rows += of_arm
    add_holm(rows)
    return rows, [verdict for control, of_pair in found for verdict in judge(of_pair, control)]


def write_summary(folder: StudyFolder, summary: dict[str, Any]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    noted = {**summary, "manifest": MANIFEST}
    write_text(folder.path / "summary.json", json.dumps(noted, indent=1, allow_nan=False) + "\n")
    flat = [{**row, "seeds_needed": json.dumps(row["seeds_needed"])} for row in summary["rows"]]
    with atomic_file(folder.path / "summary.parquet") as path:
        parquet.write_table(pa.Table.from_pylist(flat), path)


def _study(
    spec: StudySpec, metrics: list[str], results: list[RunResult], tuning: list[RunResult], command: str
) -> dict[str, Any]:
    everything, parts = [*results, *tuning], ("training", "sampling", "evaluation")
    seconds = {part: sum(result.record["train"][f"{part}_seconds"] for result in everything) for part in parts}
    return {
        **{name: getattr(spec, name) for name in ("name", "title", "baseline", "paper", "arms")},
        "datasets": list(spec.datasets),
        "seeds": list(spec.seeds),
        "metrics": metrics,
        "primary_metric": spec.primary_metric or next(iter(metrics), ""),
        "command": command,
        "seconds": seconds,
        "hours": sum(seconds.values()) / 3600,
        "runs": {status: sum(result.status == status for result in everything) for status in ("finished", "diverged")},
    }
