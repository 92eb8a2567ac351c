"""Writes the report of a study: a page that opens from disk, Markdown, plots, and LaTeX tables."""

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...core.files import atomic_folder, write_text
from ...core.project import CITATION
from ..runs.progress import StudyProgress
from ..runs.results import REPORT_FILES, RunResult
from . import plots
from .contents import ReportContents
from .curves import CurveKind, curves_as_csv, lines_left_out, values_as_csv
from .formats import to_latex
from .limitations import different_losses
from .markdown import report_markdown
from .plot_list import Plot, file_name, file_of, plots_of

_MOST_BYTES_OF_SVG = 250_000


def write_report(
    folder: Path,
    results: list[RunResult],
    summary: dict[str, Any],
    progress: StudyProgress | None = None,
    figures: plots.Figures | None = None,
) -> Path:
    """
    Writes `report/` into the folder of a study, replacing an older one as a whole.

    `results` are all runs, those for tuning and those that diverged included. Of the `summary`, "speedups", "controls" and
    "tuning" are optional. Returns the path of `index.html`; next to it are `report.md`, the plots as PNG, their data as CSV,
    and `tables/*.tex`. With `figures`, the plots are also in `figures/`.
    """
    contents = ReportContents(results, summary)
    made, images = plots_of(contents), dict[str, tuple[str, int]]()
    with atomic_folder(folder / "report", REPORT_FILES) as out:
        for plot in (progress or StudyProgress(quiet=True)).steps(made, "report"):
            figure = plot.make()
            plots.save_plot(figure, out / plot.file)
            images[plot.file] = _image(figure, out / plot.file), round(figure.get_figwidth() * figure.dpi)
            if figures is not None:
                (out / "figures").mkdir(exist_ok=True)
                file = Path(plot.file).with_suffix(f".{figures.format}")
                plots.save_figures(plot.make(figures.width), out / "figures" / file, figures)
        for table in contents.all_tables():
            write_text(out / "tables" / f"{file_name(table.name)}.tex", to_latex(table))
        write_text(out / "curves.csv", curves_as_csv(contents.curves))
        write_text(out / "seeds.csv", values_as_csv(contents.values))
        write_text(out / "report.md", report_markdown(contents, made))
        write_text(out / "index.html", _page(contents, made, images))
    return folder / "report" / "index.html"


def _image(figure: Any, file: Path) -> str:
    """The address of a plot within the page: an SVG, or `file`, a PNG, for samples and where that is much smaller."""
    content = None if any(axes.images for axes in figure.axes) else plots.as_svg(figure)
    if content is not None and len(content) <= _MOST_BYTES_OF_SVG:
        return f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}"
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


def _page(contents: ReportContents, made: list[Plot], images: dict[str, tuple[str, int]]) -> str:
    """`index.html`, with the plots embedded: each as its address and its width in pixels."""
    template = Environment(
        loader=PackageLoader(__package__, "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("report.html")  # fmt: skip
    script = Path(__file__).with_name("sort.js").read_text(encoding="utf-8")
    script_sum = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return template.render(
        report=contents,
        citation=CITATION,
        script=Markup(script),
        allowed=Markup(f"'sha256-{script_sum}'"),
        plots={plot.file: plot for plot in made},
        images=images,
        file_of=file_of,
        with_seeds={name for name, shown in contents.curves.items() if any(curve.seeds for curve in shown.values())},
        notes={kind.name: _note(contents, kind) for kind in contents.curve_kinds},
    )


def _note(contents: ReportContents, kind: CurveKind) -> str:
    """What to know to read a plot of curves."""
    losses = different_losses(contents.results) if kind.is_loss else ""
    return " ".join(filter(None, [losses, lines_left_out(contents.curves[kind.name])]))
