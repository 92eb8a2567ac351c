"""From the results of a study to its summary: rows, cost, and verdicts that claim no more than the tests support."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from ...core.environment import describe_environment
from ...core.files import atomic_file, write_text
from ...core.manifest import MANIFEST
from ...evaluation.metrics import word_for
from ..runs.context import StudyProgress
from ..runs.results import RunResult, StudyFolder, by_cell, finite
from ..spec.spec import SPEEDUP, RunSpec, StudySpec, controlled
from .speedups import speedups
from .statistics import LEVEL, add_holm, compare, power_rows
from .tuning import tuning_rows

Rows = list[dict[str, Any]]
_REAL_DATA = ("held_out_points", "held_out_images", "held_out_data", "training_images")  # scored in place of samples
DIFFERENCES = ("better", "worse", "higher", "lower", "faster", "slower")
NEVER, CANNOT_TELL, DIVERGED = "never as good", "cannot tell", "diverged"


@dataclass(frozen=True)
class Verdict:
    """The verdict on an arm compared with a reference, on one data set and by one metric."""

    arm: str
    reference: str  # the baseline or a control
    dataset: str
    metric: str  # or `SPEEDUP` of the specification
    difference: float | None  # mean over shared seeds, or the speed-up
    low: float | None  # of its 95 % interval
    high: float | None
    p: float | None  # adjusted; `None` if no test was possible
    word: str | None  # in `DIFFERENCES`, `NEVER`, `CANNOT_TELL` or `DIVERGED`; `None` if no test was possible

    @property
    def is_difference(self) -> bool:
        """Whether the test shows a difference, or the arm never became as good."""
        return self.word == NEVER or self.word in DIFFERENCES


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
    progress: StudyProgress,
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
    for metric in progress.steps(metrics, "statistics"):
        rows, controls[metric], verdicts[metric] = _compare_metric(spec, results, metric)
        summary["rows"] += rows
    if spec.speedup_metric:
        summary["speedups"], controls[SPEEDUP], verdicts[SPEEDUP] = _compare_speed(spec, results)
    summary["findings"] = {metric: [asdict(verdict) for verdict in found] for metric, found in verdicts.items()}
    if controlled(spec.arms):
        summary["controls"] = controls
    if spec.tune:
        summary["tuning"] = tuning_rows(spec, results, tuning)
    summary["power"] = power_rows(summary)
    return finite(summary)


def _compare_metric(spec: StudySpec, results: list[RunResult], metric: str) -> Compared:
    cells = by_cell(results)
    values: dict[str, dict[str, dict[int, float]]] = {arm: {dataset: {} for dataset in spec.datasets} for arm in spec.arms}
    for result in results:
        if (value := result.results.get(metric)) is not None:
            values[result.arm][result.dataset][result.seed] = value

    def compare_with(reference: str, arms: Iterable[str], num_resamples: int) -> Rows:
        some = {arm: values[arm] for arm in arms}
        rows = _with_diverged(compare(some, reference, metric, num_resamples), results)
        for row in rows:
            runs = cells.get((row["arm"], row["dataset"]), [])
            scores = (run.results.get(f"{metric}_of_{what}") for what in _REAL_DATA for run in runs)
            row["floor"] = next((score for score in scores if score is not None), None)
        return rows

    def compare_pair(arm: str, control: str) -> Rows:  # intervals of their means by bootstrap are among the rows of all arms
        return compare_with(control, (control, arm), 0)

    rows = compare_with(spec.baseline, spec.arms, 9999)
    of_controls, verdicts = against_controls(controlled(spec.arms), compare_pair)
    return rows, of_controls, findings(rows, spec.baseline) + verdicts


def _compare_speed(spec: StudySpec, results: list[RunResult]) -> Compared:
    def compare_with(reference: str, arms: Iterable[str], common: bool = False) -> Rows:
        return _with_diverged(speedups(_quality(spec, results, arms, reference), reference, common), results)

    def compare_pair(arm: str, control: str) -> Rows:
        return compare_with(control, (control, arm), common=True)

    rows = compare_with(spec.baseline, spec.arms)
    of_controls, verdicts = against_controls(controlled(spec.arms), compare_pair)
    return rows, of_controls, findings(rows, spec.baseline) + verdicts


def _with_diverged(rows: Rows, results: list[RunResult]) -> Rows:
    diverged = Counter((result.arm, result.dataset) for result in results if result.status == "diverged")
    return [row | {"diverged": diverged[row["arm"], row["dataset"]]} for row in rows]


def _quality(spec: StudySpec, results: list[RunResult], arms: Iterable[str], reference: str) -> dict[str, Any]:
    """
    Arm -> data set -> seed -> (updates, quality) at the evaluation points.

    A reference that diverged sets no target. Any other run that diverged reaches no target.
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


def against_controls(pairs: Iterable[tuple[str, str]], compare: Callable[[str, str], Rows]) -> tuple[Rows, list[Verdict]]:
    """
    Compares arms with their controls instead of the baseline; returns rows, with the key "control", and verdicts.

    `compare` makes the rows of an arm and its control, with the control as the baseline. All of these comparisons are one
    family of Holm's correction. Comparisons with the baseline are another, so that controls change nothing there.
    """
    found = [(control, compare(arm, control)) for arm, control in pairs]
    rows = []
    for control, of_pair in found:
        for row in of_pair:
            if row["arm"] != control:
                row["control"] = control
                rows.append(row)
    add_holm(rows)
    return rows, [verdict for control, of_pair in found for verdict in findings(of_pair, control)]


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


def speed_word_of(row: Mapping[str, Any]) -> str | None:
    """The word for a row of `speedups`."""
    if row["n"] and row["censored"] == row["n"]:
        return NEVER
    if row["p_adjusted"] is None:
        return None
    if row["p_adjusted"] >= LEVEL:
        return CANNOT_TELL
    return "slower" if row["speedup"] < 1 else "faster"


def findings(rows: Iterable[Mapping[str, Any]], reference: str) -> list[Verdict]:
    """
    The verdict on each arm on each data set, from the rows of `compare` (with the optional key "diverged") or `speedups`.

    "Better" and "worse" ("higher" and "lower" if neither direction is better), "faster" and "slower" appear exactly where
    the adjusted p is below 0.05.
    """
    found = []
    for row in rows:
        metric, word, names = row.get("metric"), word_of, ("diff", "diff_low", "diff_high")
        if metric is None:
            metric, word, names = SPEEDUP, speed_word_of, ("speedup", "ci_low", "ci_high")
        if row["arm"] != reference:
            difference, low, high = (row[name] for name in names)
            of = row["arm"], reference, row["dataset"], metric
            found.append(Verdict(*of, difference, low, high, row["p_adjusted"], word(row)))
    return found
