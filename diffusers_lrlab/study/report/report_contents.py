"""What a report says, in whatever form: sentences, tables and facts, made once from the results of a study."""

from collections import Counter
from pathlib import Path
from typing import Any

from ...core.words import counted
from ...evaluation.metrics import metric_label
from ..analysis.findings import SPEEDUP
from ..runs.results import RunResult
from ..spec.spec import ARM_NOTES, controlled
from . import extra_tables, front, tables
from .report_data import FAMILIES, compared, courses, final_values, looks
from .table_formats import Table, probability

_VERDICTS = ("better", "worse", "faster", "slower", "higher", "lower")


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
        self.answers = {metric: front.answers(summary, metric) for metric in asked}
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
            f"{counted(len(study['seeds']), 'seed')} each: {made}{diverged}, {_duration(study['hours'])} of computing (runs "
            f"at one time on different cores count each). Every arm is compared with {study['baseline']}{also}, seed by "
            "seed, and words such as “better” stand only where the adjusted test says so."
        )

    def findings(self, metric: str) -> tuple[list[str], list[str]]:
        """Sentences that a test supports, and the rest."""
        pairs = [*((arm, self.study["baseline"]) for arm in self.study["arms"]), *self.controlled]
        starts = tuple(f"{arm} is {word} than {other}" for arm, other in pairs for word in _VERDICTS)
        starts += tuple(f"{arm} never reached" for arm in self.study["arms"])
        sentences = self.summary["findings"].get(metric, [])
        significant = [sentence for sentence in sentences if sentence.startswith(starts)]
        return significant, [sentence for sentence in sentences if not sentence.startswith(starts)]

    def nothing_significant(self, metric: str) -> str:
        """The text for a metric without significant differences."""
        rows = self.summary["speedups"] if metric == SPEEDUP else tables.rows_of(self.summary, metric)
        rows = [*rows, *self.summary.get("controls", {}).get(metric, ())]
        if all(row["p_adjusted"] is None for row in rows):
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

    def findings_by_label(self) -> list[tuple[str, str, list[str], list[str]]]:
        """Name, label and sentences of every metric that has some; those without rows, such as speed-ups, last."""
        sentences = self.summary["findings"]
        names = [name for name in dict.fromkeys([*self.metrics, *sentences]) if sentences.get(name)]
        return [(name, self.labels.get(name) or metric_label(name), *self.findings(name)) for name in names]

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
            if not any(self.findings(metric)[0]):
                sentences.insert(0, self.nothing_significant(metric))
            table = front.answer_table(answers, self.datasets) if len(answers) > front.MOST_SENTENCES else None
            found.append((self.labels[metric], how, sentences, table))
        others = [
            f"{self.labels[metric]}: {answer.sentence}"
            for metric in self.metrics[1:]
            for answer in front.answers(self.summary, metric)
            if answer.claims
        ]
        how = "Where a test shows a difference; the rest is among all findings, below."
        if others:
            found.append(("the other metrics", how, others[: front.MOST_SENTENCES], None))
        return found

    def findings_table(self) -> Table | None:
        """Every sentence with its figures; what a test supports comes first."""
        rows = []
        for _, label, significant, others in self.findings_by_label():
            rows += [[label, "a difference", sentence] for sentence in significant]
            rows += [[label, "no difference", sentence] for sentence in others]
        columns = ["measured by", "the test shows", "in figures"]
        return Table("findings", "All findings in figures", columns, rows, labels=3) if rows else None


def _executor(result: RunResult) -> str:
    executor = result.record["run"]["executor"]
    if "members" not in executor:
        return executor["name"]
    return f"{executor['name']}, up to {executor['members']} side by side"


def _duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 2 else f"{60 * hours:.3g} minutes"
