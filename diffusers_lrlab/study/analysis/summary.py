"""From the results of a study to its summary: rows, cost, and verdicts that claim no more than the tests support."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from ...core.environment import describe_environment
from ...core.files import atomic_file, write_text
from ...core.manifest import MANIFEST
from ...evaluation.metrics import word_for
from ..results import RunResult, StudyFolder, finite
from ..spec.spec import Cell, RunSpec, StudySpec, controlled
from .statistics import LEVEL, add_holm, compare, power_rows
from .tuning import tuning_rows

Rows = list[dict[str, Any]]
_REAL_DATA = ("held_out_points", "held_out_images", "held_out_data", "training_images")  # scored in place of samples
DIFFERENCES = ("better", "worse", "higher", "lower")
CANNOT_TELL, DIVERGED = "cannot tell", "diverged"


@dataclass(frozen=True)
class Verdict:
    """The verdict on an arm compared with a reference, on one data set and by one metric."""

    arm: str
    reference: str  # the baseline or a control
    dataset: str
    metric: str
    difference: float | None  # mean over shared seeds
    low: float | None  # of its 95 % interval
    high: float | None
    p: float | None  # adjusted; `None` if no test was possible
    word: str | None  # in `DIFFERENCES`, `CANNOT_TELL` or `DIVERGED`; `None` if no test was possible

    @property
    def is_difference(self) -> bool:
        """Whether the test shows a difference."""
        return self.word in DIFFERENCES


Compared = tuple[Rows, Rows, list[Verdict]]  # rows against the baseline, rows against controls, verdicts on both


def notes_on(runs: list[RunSpec]) -> dict[str, Any]:
    """The parts of a summary that need more than results: specifications, this machine."""
    return {
        "metrics": list(dict.fromkeys(name for run in runs for name in run.metrics)),
        "meta": describe_environment(),
    }


def summarise(
    spec: StudySpec,
    results: list[RunResult],
    tuning: list[RunResult],
    notes: dict[str, Any],
    command: str,
) -> dict[str, Any]:
    """
    Everything that report and card state, as data.

    `results` are the runs of the comparison, `tuning` those that chose learning rates, and `notes` come from `notes_on`.
    """
    metrics = list(spec.metrics) or [name for name in notes["metrics"] if any(name in run.results for run in results)]
    about = _study(spec, metrics, results, tuning, command) | {"meta": notes["meta"]}
    summary: dict[str, Any] = {"study": about, "rows": []}
    controls: dict[str, Rows] = {}
    verdicts: dict[str, list[Verdict]] = {}
    for metric in metrics:
        rows, controls[metric], verdicts[metric] = _compare_metric(spec, results, metric)
        summary["rows"] += rows
    summary["findings"] = {metric: [asdict(verdict) for verdict in found] for metric, found in verdicts.items()}
    if controlled(spec.arms):
        summary["controls"] = controls
    if spec.tune:
        summary["tuning"] = tuning_rows(spec, results, tuning)
    summary["power"] = power_rows(summary)
    return finite(summary)


def _compare_metric(spec: StudySpec, results: list[RunResult], metric: str) -> Compared:
    """
    Compares all arms with the baseline, and some with their controls, whose rows have the key "control".

    All comparisons with controls are one family of Holm's correction. Those with the baseline are another, so that controls
    change nothing there.
    """
    values: dict[str, dict[str, dict[int, float]]] = {arm: {dataset: {} for dataset in spec.datasets} for arm in spec.arms}
    floors, diverged = dict[Cell, float](), Counter[Cell]()
    for result in results:
        cell, scores = (result.arm, result.dataset), (result.results.get(f"{metric}_of_{what}") for what in _REAL_DATA)
        diverged[cell] += result.status == "diverged"
        if (value := result.results.get(metric)) is not None:
            values[result.arm][result.dataset][result.seed] = value
        if (score := next((score for score in scores if score is not None), None)) is not None:
            floors.setdefault(cell, score)

    def compare_with(reference: str, arms: Iterable[str]) -> Rows:
        rows = compare({arm: values[arm] for arm in arms}, reference, metric)
        for row in rows:
            cell = row["arm"], row["dataset"]
            row |= {"diverged": diverged[cell], "floor": floors.get(cell)}
        return rows

    rows, of_controls = compare_with(spec.baseline, spec.arms), []
    for arm, control in controlled(spec.arms):
        of_controls += [row | {"control": control} for row in compare_with(control, (control, arm)) if row["arm"] == arm]
    add_holm(of_controls)
    verdicts = findings(rows, spec.baseline)
    for row in of_controls:
        verdicts += findings([row], row["control"])
    return rows, of_controls, verdicts


def write_summary(folder: StudyFolder, summary: dict[str, Any]) -> None:
    text = json.dumps({**summary, "manifest": MANIFEST}, indent=1, allow_nan=False)
    write_text(folder.path / "summary.json", text + "\n")
    flat = [{**row, "seeds_needed": json.dumps(row["seeds_needed"])} for row in summary["rows"]]
    with atomic_file(folder.path / "summary.parquet") as path:
        parquet.write_table(pa.Table.from_pylist(flat), path)


def _study(
    spec: StudySpec, metrics: list[str], results: list[RunResult], tuning: list[RunResult], command: str
) -> dict[str, Any]:
    everything, parts = [*results, *tuning], ("training", "sampling", "evaluation")
    seconds = {part: sum(result.record["train"][f"{part}_seconds"] for result in everything) for part in parts}
    return {
        **{name: getattr(spec, name) for name in ("name", "title", "baseline", "arms")},
        "datasets": list(spec.datasets),
        "seeds": list(spec.seeds),
        "metrics": metrics,
        "primary_metric": spec.primary_metric or next(iter(metrics), ""),
        "command": command,
        "seconds": seconds,
        "hours": sum(seconds.values()) / 3600,
        "runs": {status: sum(result.status == status for result in everything) for status in ("finished", "diverged")},
    }


# --- verdicts ---------------------------------------------------------------------------------------------------------


def word_of(row: Mapping[str, Any]) -> str | None:
    """The word for a row of `compare`: only what the adjusted test supports."""
    if row["mean"] is None and row.get("diverged"):
        return DIVERGED
    if row["p_adjusted"] is None or row["diff"] is None:
        return None
    return CANNOT_TELL if row["p_adjusted"] >= LEVEL else word_for(row["diff"], row["metric"])


def findings(rows: Iterable[Mapping[str, Any]], reference: str) -> list[Verdict]:
    """
    The verdict on each arm on each data set, from the rows of `compare`, with the optional key "diverged".

    "Better" and "worse" ("higher" and "lower" if neither direction is better) appear exactly where the adjusted p is below
    0.05.
    """
    return [
        Verdict(
            row["arm"], reference, row["dataset"], row["metric"],
            row["diff"], row["diff_low"], row["diff_high"], row["p_adjusted"], word_of(row),
        )
        for row in rows if row["arm"] != reference
    ]  # fmt: skip
