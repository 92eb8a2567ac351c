"""The contents of a report, common to the page, to Markdown and to the card: sentences, tables and facts."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from ...core.words import counted, duration
from ...evaluation.metrics import better_of, metric_label
from ..analysis.summary import Verdict
from ..results import RunResult
from ..spec.spec import ARM_NOTES, controlled
from . import tables
from .curves import CURVE_KINDS, compared, final_values, is_told, mean_curves, styles
from .sentences import answers, different_losses, limitations, reach
from .tables import Table

_MOST_SENTENCES = 10


class Conclusion(NamedTuple):
    """The results of the tests by one metric."""

    label: str
    meaning: str  # how to read the metric
    sentences: list[str]


class ReportContents:
    """Everything that a report shows, from the results of a study and its summary."""

    def __init__(self, results: list[RunResult], summary: dict[str, Any]):
        self.results, self.summary, self.study = results, summary, summary["study"]
        self.controlled = controlled(self.study["arms"])
        self.datasets: list[str] = list(self.study["datasets"])
        self.styles = styles(self.study["arms"], self.study["baseline"])
        present = {row["metric"] for row in summary["rows"]}
        first = self.study.get("primary_metric") or "kl"
        self.metrics = sorted((name for name in self.study["metrics"] if name in present), key=lambda name: name != first)
        self.labels = {metric: metric_label(metric) for metric in self.metrics}
        self.curves = {kind.name: mean_curves(results, kind) for kind in CURVE_KINDS}
        self.curve_kinds = [kind for kind in CURVE_KINDS if is_told(kind, self.curves[kind.name])]
        self.values = {metric: final_values(results, metric) for metric in self.metrics}
        self.summaries = {metric: tables.summary_table(summary, metric) for metric in self.metrics}
        self.others = [tables.tuning_table(summary["tuning"])] if summary.get("tuning") else []
        if diverged := [result for result in results if result.status == "diverged"]:
            self.others.append(tables.divergence_table(diverged))
        self.others.append(tables.cost_table(self.study, results))
        self.verdicts = {name: [Verdict(**verdict) for verdict in found] for name, found in summary["findings"].items()}
        self.limitations: list[str] = summary.get("limitations") or limitations(results, summary)
        self.different_losses = different_losses(results)
        primary = next(iter(self.metrics), "")
        self.reach = reach(summary, primary, self.verdicts.get(primary, ()))

    def introduction(self) -> str:
        study, runs = self.study, self.study["runs"]
        diverged = f", {runs['diverged']} of which diverged" if runs.get("diverged") else ""
        controls = "; some are also compared with controls of their own" if self.controlled else ""
        count = counted(runs["finished"] + runs.get("diverged", 0), "run")
        return (
            f"{counted(len(study['arms']), 'arm')} on {counted(len(self.datasets), 'data set')} with "
            f"{counted(len(study['seeds']), 'seed')} each: {count}{diverged}, {duration(3600 * study['hours'])} of "
            f"computing (concurrent runs count separately). Every arm is compared with {study['baseline']}, seed by "
            f"seed{controls}. Words such as “better” appear only where the adjusted test supports them."
        )

    def conclusions(self) -> list[Conclusion]:
        """Conclusions by the primary metric, and in brief by the other metrics."""
        found = []
        for metric in self.metrics[:1]:
            verdicts = self.verdicts.get(metric, [])
            sentences = [answer.sentence for answer in answers(verdicts)]
            if not any(verdict.is_difference for verdict in verdicts):
                sentences.insert(0, self._no_difference(verdicts))
            found.append(Conclusion(self.labels[metric], self._meaning(metric), _first(sentences)))
        others = [
            f"{self.labels[metric]}: {answer.sentence}"
            for metric in self.metrics[1:]
            for answer in answers(self.verdicts.get(metric, ()))
            if answer.has_difference
        ]
        if others:
            meaning = "Differences that a test shows; all other findings are listed below."
            found.append(Conclusion("other metrics", meaning, _first(others)))
        return found

    def _meaning(self, metric: str) -> str:
        """How to read a metric, and differences in it."""
        baseline = self.study["baseline"]
        if better_of(metric) == "neither":
            return f"Neither smaller nor larger is better. Differences are from {baseline}."
        worse_side = "above" if better_of(metric) == "smaller" else "below"
        better = better_of(metric).capitalize()
        return f"{better} is better. Differences are from {baseline}; {worse_side} 0, the arm is worse."

    def _no_difference(self, verdicts: list[Verdict]) -> str:
        if all(verdict.p is None for verdict in verdicts):
            return "No test was possible: it needs two arms with two seeds in common."
        controls = " or from a control" if self.controlled else ""
        return f"No difference from {self.study['baseline']}{controls} passed the adjusted test."

    def findings_table(self) -> Table | None:
        """Every verdict in numbers, those on controls included: differences first."""
        found = [verdict for metric in self.metrics for verdict in self.verdicts.get(metric, ())]
        return tables.findings_table(found) if found else None

    def arms(self) -> list[dict[str, Any]]:
        described = []
        for arm, spec in self.study["arms"].items():
            fields = [(key, str(value)) for key, value in spec.items() if key not in ARM_NOTES]
            if spec.get("controls"):
                fields.append(("compared with", ", ".join(spec["controls"])))
            about = {"name": arm, "description": spec.get("description") or "", "fields": fields}
            described.append({**about, "style": self.styles[arm], "is_baseline": arm == self.study["baseline"]})
        return described

    def facts(self) -> list[tuple[str, str]]:
        """Executors, versions and hardware."""
        executors = Counter(_executor(result) for result in self.results)
        run_by = ", ".join(f"{name} ({counted(num, 'run')})" for name, num in executors.items())
        facts = [("executor", run_by)] if executors else []
        for key, value in self.study["meta"].items():
            if isinstance(value, dict):
                value = ", ".join(f"{name} {inner}" for name, inner in value.items())
            elif isinstance(value, list):  # of plug-ins, perhaps empty; their folders are not published
                value = ", ".join(Path(plugin["name"]).name for plugin in value) or None
            if value is not None:
                facts.append((key.replace("_", " "), str(value)))
        return facts

    def common_config(self) -> list[tuple[str, str]]:
        """Options that all compared runs share; paths are not published."""
        configs = [result.config for result in compared(self.results)]
        return [
            (key, str(value))
            for key, value in (configs[0] if configs else {}).items()
            if value is not None and not str(value).startswith("/") and all(config.get(key) == value for config in configs)
        ]


def _first(sentences: list[str]) -> list[str]:
    left_out = len(sentences) - _MOST_SENTENCES
    more = [f"And {left_out} more, which are among all findings below."] if left_out > 0 else []
    return sentences[:_MOST_SENTENCES] + more


def _executor(result: RunResult) -> str:
    executor = result.record["run"]["executor"]
    if "members" not in executor:
        return executor["name"]
    return f"{executor['name']}, up to {executor['members']} side by side"
