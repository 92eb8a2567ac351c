"""What a report says, in whatever form: sentences, tables and facts, made once from the results of a study."""

from collections import Counter
from pathlib import Path
from typing import Any

from ...core.words import counted, duration
from ...evaluation.metrics import metric_label
from ..analysis.verdicts import SPEEDUP, Verdict
from ..runs.results import RunResult
from ..spec.spec import ARM_NOTES, controlled
from . import extra_tables, front, tables
from .report_data import FAMILIES, compared, courses, final_values, looks
from .table_formats import Table, probability


class ReportContents:
    """The parts that page and Markdown have in common."""

    def __init__(self, results: list[RunResult], summary: dict[str, Any]):
        self.results, self.summary, self.study = results, summary, summary["study"]
        self.controlled = controlled(self.study["arms"])
        self.datasets: list[str] = list(self.study["datasets"])
        self.looks = looks(self.study["arms"], self.study["baseline"])
        present = {row["metric"] for row in summary["rows"]}
        first = self.study.get("primary_metric") or "kl"
        self.metrics = sorted((name for name in self.study["metrics"] if name in present), key=lambda name: name != first)
        self.labels = {metric: metric_label(metric) for metric in self.metrics} | {SPEEDUP: "Speed-ups"}
        self.courses = {family.name: courses(results, family) for family in FAMILIES}
        self.families = [family for family in FAMILIES if self.courses[family.name]]
        self.values = {metric: final_values(results, metric) for metric in self.metrics}
        self.summaries = {metric: tables.summary_table(summary, metric) for metric in self.metrics}
        self.paper = tables.paper_table(summary, results) if self.study.get("paper") == "table" else None
        self.others = extra_tables.other_tables(results, summary)
        asked = [*self.metrics[:1], *([SPEEDUP] if summary.get("speedups") else [])]
        self.verdicts = {name: [Verdict(**verdict) for verdict in found] for name, found in summary["findings"].items()}
        self.answers = {metric: front.answers(self.verdicts.get(metric, ())) for metric in asked}
        self.warnings = front.warnings(results, summary)

    def all_tables(self) -> list[Table]:
        return [*([self.paper] if self.paper else []), *self.summaries.values(), *self.others]

    def introduction(self) -> str:
        study, runs = self.study, self.study["runs"]
        diverged = f", {runs['diverged']} of them diverged" if runs.get("diverged") else ""
        also = ", and some with controls of their own" if self.controlled else ""
        made = counted(runs["finished"] + runs.get("diverged", 0), "run")
        return (
            f"{counted(len(study['arms']), 'arm')} on {counted(len(self.datasets), 'data set')} with "
            f"{counted(len(study['seeds']), 'seed')} each: {made}{diverged}, {duration(3600 * study['hours'])} of computing "
            f"(runs at one time on different cores count each). Every arm is compared with {study['baseline']}{also}, "
            "seed by seed, and words such as “better” stand only where the adjusted test says so."
        )

    def nothing_significant(self, metric: str) -> str:
        """The text for a metric without significant differences."""
        if all(verdict.p is None for verdict in self.verdicts.get(metric, ())):
            return "No test was possible: it needs two arms with two seeds in common."
        controls = ", or to a control," if self.controlled else ""
        return f"No difference to {self.study['baseline']}{controls} passed the adjusted test."

    def friedman(self, metric: str) -> str:
        ranks = self.summary["ranks"][metric]
        if ranks["p"] is None:
            return ranks["reason"] or ""
        p = probability(ranks["p"])
        few = ", rough for so few data sets" if len(ranks["datasets"]) < 10 else ""
        return f"Friedman's test that all arms are alike: p {p if p.startswith('<') else f'= {p}'}{few}."

    def facts(self) -> list[tuple[str, str]]:
        executors = Counter(_executor(result) for result in self.results)
        facts = [("executor", ", ".join(f"{name} ({counted(num, 'run')})" for name, num in executors.items()))]
        for key, value in self.study["meta"].items():
            if isinstance(value, dict):
                value = ", ".join(f"{name} {inner}" for name, inner in value.items())
            elif isinstance(value, list):  # plug-ins, of which there may be none; folders are not published
                value = ", ".join(Path(one["name"]).name for one in value) or None
            if value is not None:
                facts.append((key.replace("_", " "), str(value)))
        return facts

    def common_config(self) -> list[tuple[str, str]]:
        """Fields of the configuration that all compared runs share; paths are not published."""
        configs = [result.config for result in compared(self.results)]
        return [
            (key, str(value))
            for key, value in (configs[0] if configs else {}).items()
            if value is not None and not str(value).startswith("/") and all(config.get(key) == value for config in configs)
        ]

    def arms(self) -> list[dict[str, Any]]:
        described = []
        for arm, spec in self.study["arms"].items():
            fields = [(key, str(value)) for key, value in spec.items() if key not in ARM_NOTES]
            if spec.get("controls"):
                fields.append(("compared with", ", ".join(spec["controls"])))
            about = {"name": arm, "description": spec.get("description") or "", "fields": fields}
            described.append({**about, "look": self.looks[arm], "is_baseline": arm == self.study["baseline"]})
        return described

    def questions(self) -> list[tuple[str, str, list[str], Table | None]]:
        """For each: what it is measured by, how to read that, the first answers, and all of them where there are more."""
        found = []
        for metric, answers in self.answers.items():
            speed = "How many updates an arm takes to be as good as the arm beside it ends: fewer are better."
            how = speed if metric == SPEEDUP else front.meaning(metric, self.study["baseline"])
            sentences = [answer.sentence for answer in answers[: front.MOST_SENTENCES]]
            if not any(verdict.is_difference for verdict in self.verdicts.get(metric, ())):
                sentences.insert(0, self.nothing_significant(metric))
            table = front.answer_table(answers, self.datasets) if len(answers) > front.MOST_SENTENCES else None
            found.append((self.labels[metric], how, sentences, table))
        others = [
            f"{self.labels[metric]}: {answer.sentence}"
            for metric in self.metrics[1:]
            for answer in front.answers(self.verdicts.get(metric, ()))
            if answer.differences
        ]
        how = "Where a test shows a difference; the rest is among all findings, below."
        if others:
            found.append(("the other metrics", how, others[: front.MOST_SENTENCES], None))
        return found

    def findings_table(self) -> Table | None:
        """Every sentence with its figures: differences first, and speed-ups after all metrics."""
        rows = []
        for metric in dict.fromkeys([*self.metrics, *self.verdicts]):
            label = self.labels.get(metric) or metric_label(metric)
            for verdict in sorted(self.verdicts.get(metric, ()), key=lambda verdict: not verdict.is_difference):
                rows.append([label, "a difference" if verdict.is_difference else "no difference", verdict.sentence])
        columns = ["measured by", "the test shows", "in figures"]
        return Table("findings", "All findings in figures", columns, rows, labels=3) if rows else None


def _executor(result: RunResult) -> str:
    executor = result.record["run"]["executor"]
    if "members" not in executor:
        return executor["name"]
    return f"{executor['name']}, up to {executor['members']} side by side"
