"""A study as a page that opens from disk, as Markdown, and as pictures and LaTeX tables for a paper."""

import base64
import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...core.files import atomic_folder, write_text
from ...evaluation.metrics import metric_label
from ..analysis.findings import SPEEDUP, counted
from ..runs.results import RunResult
from ..spec.spec import ARM_NOTES, controlled
from . import extra_tables, interactive, plots, tables
from .report_data import FAMILIES, compared, courses, final_values, lines_left_out, looks, spans_decades
from .table_formats import Table, markdown_text, probability, to_latex, to_markdown

_VERDICTS = ("better", "worse", "faster", "slower", "higher", "lower")


def write_report(folder: Path, results: list[RunResult], summary: dict[str, Any]) -> Path:
    """
    Writes `report/` into the folder of a study, in place of one that is there: all of it, or nothing.

    `results` are all its runs, those that only chose a learning rate and those that diverged among them; of its `summary`,
    "speedups", "controls", "tuning", "consistency" and "search" are shown if they are there. Returns the path of
    `index.html`; beside it are `report.md`, PNGs and `tables/*.tex`.
    """
    report = _Report(results, summary)
    with atomic_folder(folder / "report") as out:
        report.draw(out)
        for table in report.all_tables():
            write_text(out / "tables" / f"{_file_name(table.name)}.tex", to_latex(table))
        write_text(out / "report.md", report.markdown())
        write_text(out / "index.html", report.page(out))
    return folder / "report" / "index.html"


def _file_name(name: str) -> str:
    return re.sub(r"[^\w-]", "_", name)


class _Report:
    """The parts that page and Markdown have in common, made once."""

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
        self.pictures: dict[str, str] = {}  # file name -> what it shows

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

    def draw(self, out: Path) -> None:
        """All PNGs for which there are data."""
        for family in self.families:
            path = self._picture(out, family.name, family.title)
            plots.plot_courses(self.courses[family.name], self.datasets, self.looks, family, path)
        for metric in self.metrics:
            label = self.labels[metric]
            if metric == self.metrics[0] and self.values[metric]:
                path = self._picture(out, f"seeds_{metric}", f"{label}: every seed")
                plots.plot_seeds(self.values[metric], self.datasets, self.looks, label, path)
            if (ranks := self.summary["ranks"].get(metric)) and len(ranks["mean_ranks"]) > 1:
                path = self._picture(out, f"ranks_{metric}", f"{label}: mean ranks of the arms over data sets")
                plots.plot_ranks(ranks, self.looks, path)
        if chosen := plots.sample_grid_of(self.results):
            path = self._picture(out, "samples", "Samples of the lowest seed")
            plots.plot_sample_grid(chosen, self.datasets, self.looks, path)

    def _picture(self, out: Path, name: str, title: str) -> Path:
        file = f"{_file_name(name)}.png"
        self.pictures[file] = title
        return out / file

    def rows_of_plots(self) -> dict[str, list[interactive.Panel]]:
        """Interactive plots by row: curves, and the seeds of each metric."""
        rows = {}
        for family in self.families:
            rows[family.name] = interactive.course_panels(self.courses[family.name], self.datasets, self.looks, family)
        for metric in self.metrics:
            found = tables.rows_of(self.summary, metric)
            rows[f"seeds-{metric}"] = interactive.seed_panels(self.values[metric], found, self.datasets, self.looks)
        return rows

    def logarithmic(self) -> list[str]:
        """Rows of plots that begin with a logarithmic scale."""
        losses = [family.name for family in self.families if family.is_loss]
        shown = {name: {place: course.mean for place, course in self.courses[name].items()} for name in losses}
        for metric in self.metrics:
            values = self.values[metric].items()
            shown[f"seeds-{metric}"] = {place: np.array([value for _, value in found]) for place, found in values}
        return [row for row, values in shown.items() if spans_decades(values)]

    def page(self, out: Path) -> str:
        """`index.html`, with the pictures in `out` and plotly's own script inside."""
        from plotly.offline import get_plotlyjs

        rows: dict[str, list[tuple[int, str]]] = {}
        drawn: list[dict[str, Any]] = []
        for name, panels in self.rows_of_plots().items():
            rows[name] = [(len(drawn) + place, panel.title) for place, panel in enumerate(panels)]
            drawn += [{"row": name, **json.loads(panel.figure.to_json())} for panel in panels]
        data = {"plots": drawn, "logarithmic": self.logarithmic()}
        # Only these scripts may run, and nothing may be loaded, whatever a name in the study contains.
        nonce = hashlib.sha256(json.dumps(data).encode()).hexdigest()[:32]
        template = Environment(
            loader=PackageLoader(__package__, "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
            lstrip_blocks=True,
        ).get_template("report.html")  # fmt: skip
        return template.render(
            report=self,
            rows=rows,
            with_seeds={name for name, shown in self.courses.items() if any(course.seeds for course in shown.values())},
            notes={family.name: lines_left_out(self.courses[family.name]) for family in self.families},
            embedded={file: base64.b64encode((out / file).read_bytes()).decode() for file in self.pictures},
            rank_files={metric: f"{_file_name(f'ranks_{metric}')}.png" for metric in self.metrics},
            data=data,
            nonce=nonce,
            plotly=Markup(get_plotlyjs()),
        )

    def markdown(self) -> str:
        """`report.md`, with links to the pictures."""
        parts = [f"# {markdown_text(self.study['title'])}", markdown_text(self.introduction())]
        for metric, label, significant, others in self.findings_by_label():
            parts.append(f"## {markdown_text(label)}: findings")
            parts.append(_bullets(significant) or self.nothing_significant(metric))
            if others:
                parts += ["<details><summary>Not significant</summary>", _bullets(others), "</details>"]
        for table in self.all_tables():
            parts += [f"## {markdown_text(table.title)}", to_markdown(table)]
        parts += [f"## {markdown_text(title)}\n\n![{markdown_text(title)}]({file})" for file, title in self.pictures.items()]
        parts += ["## Versions and hardware", _bullets([f"{key}: {value}" for key, value in self.facts()])]
        # A fence longer than any in the command.
        parts += ["## Command", f"````sh\n{self.study['command']}\n````"]
        return "\n\n".join(part for part in parts if part) + "\n"


def _executor(result: RunResult) -> str:
    executor = result.record["run"]["executor"]
    if "members" not in executor:
        return executor["name"]
    products = "/".join(executor["products"].values())
    return f"{executor['name']}, up to {executor['members']} side by side, products {products}"


def _duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 2 else f"{60 * hours:.3g} minutes"


def _bullets(sentences: list[str]) -> str:
    return "\n".join(f"- {markdown_text(sentence)}" for sentence in sentences)
