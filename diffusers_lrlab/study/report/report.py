"""Writes the report of a study: a page that opens from disk, Markdown, plots, and LaTeX tables."""

import base64
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ...core.environment import citation
from ...core.files import atomic_folder, write_text
from ..runs.progress import StudyProgress
from ..runs.results import REPORT_FILES, RunResult
from . import plots
from .contents import ReportContents
from .plots import DIFFERENCES, Plot, file_name, plots_of, seeds_file
from .tables import Table, is_strong, markdown_text, to_latex, to_markdown


def write_report(
    folder: Path, results: list[RunResult], summary: dict[str, Any], progress: StudyProgress | None = None
) -> Path:
    """
    Writes `report/` into the folder of a study, replacing an older one as a whole.

    `results` are all runs, those for tuning and those that diverged included. Of the `summary`, "speedups" and "tuning" are
    optional. Returns the path of `index.html`; next to it are `report.md`, the plots as PNG and, in `figures/`, as PDF, and
    `tables/*.tex`.
    """
    contents = ReportContents(results, summary)
    made, images = plots_of(contents), dict[str, tuple[str, int]]()
    with atomic_folder(folder / "report", REPORT_FILES) as out:
        for plot in (progress or StudyProgress(quiet=True)).steps(made, "report"):
            figure, file = plot.make(), out / plot.file
            plots.save_plot(figure, file)
            (out / "figures").mkdir(exist_ok=True)
            plots.save_plot(figure, out / "figures" / f"{file.stem}.pdf", "pdf")
            images[plot.file] = plots.embedded(figure, file), round(figure.get_figwidth() * figure.dpi)
        for table in contents.all_tables():
            write_text(out / "tables" / f"{file_name(table.name)}.tex", to_latex(table))
        write_text(out / "report.md", report_markdown(contents, made))
        write_text(out / "index.html", _page(contents, made, images))
    return folder / "report" / "index.html"


def _page(contents: ReportContents, made: list[Plot], images: dict[str, tuple[str, int]]) -> str:
    """`index.html`, with the plots embedded: each as its address and its width in pixels."""
    environment = Environment(
        loader=PackageLoader(__package__, "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["sha256"] = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return environment.get_template("report.html").render(
        report=contents,
        citation=citation(),
        plots={plot.file: plot for plot in made},
        images=images,
        seeds_file=seeds_file,
        is_strong=is_strong,
    )


# --- Markdown --------------------------------------------------------------------------------------------------------


def report_markdown(contents: ReportContents, made: list[Plot], *sections: str) -> str:
    """`report.md`, with links to the plots. `sections` after the answers replace the one with the command."""
    # A fence longer than any in the command.
    own = sections or ("## Command", f"````sh\n{contents.study['command']}\n````")
    cite = ("## Citation", f"```bibtex\n{citation()}\n```")
    return "\n\n".join(filter(None, [*_answers(contents, made), *own, *_details(contents, made), *cite])) + "\n"


def _answers(contents: ReportContents, made: list[Plot]) -> list[str]:
    """Title, what the tests show, and how far that carries."""
    parts = [f"# {markdown_text(contents.study['title'])}", markdown_text(contents.introduction())]
    for index, (label, meaning, sentences) in enumerate(contents.conclusions()):
        parts += [f"## What the tests show: {markdown_text(label)}", markdown_text(meaning), _bullets(sentences)]
        parts += [_image(plot) for plot in made if plot.file == DIFFERENCES and index == 0]
    parts += ["## Limitations", _bullets(contents.limitations)] if contents.limitations else []
    return parts + (["## Strength of the evidence", _bullets(contents.reach)] if contents.reach else [])


def _details(contents: ReportContents, made: list[Plot]) -> list[str]:
    """All tables and plots, versions and hardware."""
    parts = []
    for table in contents.all_tables():
        parts += [f"## {markdown_text(table.title)}", to_markdown(table)]
    if found := contents.findings_table():
        parts += _folded(found)
    for plot in made:
        if plot.file != DIFFERENCES:
            parts += [f"## {markdown_text(plot.title)}", _image(plot)]
    return [*parts, "## Versions and hardware", _bullets(f"{key}: {value}" for key, value in contents.facts())]


def _bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {markdown_text(sentence)}" for sentence in sentences)


def _folded(table: Table) -> list[str]:
    return [f"<details><summary>{markdown_text(table.title)}</summary>", to_markdown(table), "</details>"]


def _image(plot: Plot) -> str:
    return f"![{markdown_text(plot.alt)}]({plot.file})"
