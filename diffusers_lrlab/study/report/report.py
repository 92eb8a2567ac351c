"""A study as a page that opens from disk, as Markdown, and as pictures and LaTeX tables for a paper."""

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ...core.files import atomic_folder, write_text
from ..runs.progress import StudyProgress
from ..runs.results import RunResult
from . import plots
from .pictures import DIFFERENCES, Picture, file_name, picture_of, pictures_of
from .report_contents import ReportContents
from .report_data import courses_as_csv, lines_left_out, values_as_csv
from .table_formats import Table, markdown_text, to_latex, to_markdown


def write_report(
    folder: Path,
    results: list[RunResult],
    summary: dict[str, Any],
    progress: StudyProgress | None = None,
    figures: plots.Figures | None = None,
) -> Path:
    """
    Writes `report/` into the folder of a study, in place of one that is there: all of it, or nothing.

    `results` are all its runs, those that only chose a learning rate and those that diverged among them; of its `summary`,
    "speedups", "controls", "tuning", "consistency" and "search" are shown if they are there. Returns the path of
    `index.html`; beside it are `report.md`, PNGs, what they are drawn from as CSV, and `tables/*.tex`; with
    `figures`, the pictures are in `figures/` too.
    """
    contents = ReportContents(results, summary)
    pictures = pictures_of(contents)
    with atomic_folder(folder / "report") as out:
        for picture in (progress or StudyProgress(quiet=True)).steps(pictures, "report"):
            plots.save_picture(picture.draw(), out / picture.file)
            if figures is not None:
                (out / "figures").mkdir(exist_ok=True)
                file = Path(picture.file).with_suffix(f".{figures.format}")
                plots.save_figures(picture.draw(figures.width), out / "figures" / file, figures)
        for table in contents.all_tables():
            write_text(out / "tables" / f"{file_name(table.name)}.tex", to_latex(table))
        write_text(out / "curves.csv", courses_as_csv(contents.courses))
        write_text(out / "seeds.csv", values_as_csv(contents.values))
        write_text(out / "report.md", _markdown(contents, pictures))
        write_text(out / "index.html", _page(contents, pictures, out))
    return folder / "report" / "index.html"


def _page(contents: ReportContents, pictures: list[Picture], out: Path) -> str:
    """`index.html`, with the pictures in `out` inside."""
    template = Environment(
        loader=PackageLoader(__package__, "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("report.html")  # fmt: skip
    return template.render(
        report=contents,
        pictures={picture.file: picture for picture in pictures},
        embedded={picture.file: base64.b64encode((out / picture.file).read_bytes()).decode() for picture in pictures},
        picture_of=picture_of,
        with_seeds={name for name, shown in contents.courses.items() if any(course.seeds for course in shown.values())},
        notes={family.name: lines_left_out(contents.courses[family.name]) for family in contents.families},
    )


def _markdown(contents: ReportContents, pictures: list[Picture]) -> str:
    """`report.md`, with links to the pictures."""
    parts = [f"# {markdown_text(contents.study['title'])}", markdown_text(contents.introduction())]
    for place, (label, how, sentences, table) in enumerate(contents.questions()):
        parts += [f"## What the tests say: {markdown_text(label)}", markdown_text(how), _bullets(sentences)]
        parts += _folded(table) if table else []
        parts += [_image(picture) for picture in pictures if picture.file == DIFFERENCES and place == 0]
    parts += ["## Before you rely on it", _bullets(contents.warnings)] if contents.warnings else []
    for table in contents.all_tables():
        parts += [f"## {markdown_text(table.title)}", to_markdown(table)]
    if table := contents.findings_table():
        parts += _folded(table)
    for picture in pictures:
        if picture.file != DIFFERENCES:
            parts += [f"## {markdown_text(picture.title)}", _image(picture)]
    parts += ["## Versions and hardware", _bullets([f"{key}: {value}" for key, value in contents.facts()])]
    # A fence longer than any in the command.
    parts += ["## Command", f"````sh\n{contents.study['command']}\n````"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _bullets(sentences: list[str]) -> str:
    return "\n".join(f"- {markdown_text(sentence)}" for sentence in sentences)


def _folded(table: Table) -> list[str]:
    return [f"<details><summary>{markdown_text(table.title)}</summary>", to_markdown(table), "</details>"]


def _image(picture: Picture) -> str:
    return f"![{markdown_text(picture.alt)}]({picture.file})"
