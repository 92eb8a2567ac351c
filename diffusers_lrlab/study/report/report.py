"""Writes the report of a study (its summary, a page that opens from disk, Markdown, plots) and its card."""

import base64
import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ...core.environment import citation, install_command
from ...core.errors import LabError
from ...core.files import atomic_folder, write_text
from ...core.manifest import damage_named, open_manifest, refuse_damaged, write_manifest
from ...data.options import EMBEDDED_DATASETS
from ..analysis.summary import notes_on, summarise, write_summary
from ..context import StudyProgress
from ..reading import RUNS_TABLE, no_result, read_runs, runs_of, write_runs
from ..results import REPORT_FILES, RunResult, StudyFolder, sources
from ..shown_command import command_of_card, is_preset, shown_path
from ..spec.reading import spec_from_dict
from ..spec.spec import RunSpec, StudySpec
from . import plots
from .contents import ReportContents
from .plots import DIFFERENCES, Plot, plots_of, seeds_file
from .sentences import limitations
from .tables import is_strong, markdown_text, to_markdown


def report_study(out: Path) -> Path:
    """
    Rewrites summary and report of a study from the results in its folder; raises a `LabError` if there are none.

    The folder may be a card, which has `runs.parquet` in place of the results.
    """
    folder = StudyFolder(out)
    saved, command = folder.read_spec()
    spec = spec_from_dict(saved, folder.path)
    if not (out / "runs").exists() and (out / RUNS_TABLE).exists():  # a card, whose summary and report are rewritten
        refuse_damaged(out, "download the card again", only=lambda name: not name.startswith(("summary.", "report/")))
        with folder.locked(), damage_named(out):
            return _write_results(spec, *read_runs(out), folder, StudyProgress(), command)
    again = "give the command of the study again, which repeats damaged runs"
    refuse_damaged(out, again, only=lambda name: name == "spec.yaml" or name.startswith("runs/"))
    tuning, runs = runs_of(spec, folder)
    folder.check_results([*tuning, *runs])
    if not runs:
        raise LabError(f"The learning rates of {str(out)!r} are not chosen yet. Resume the study with `lrlab study run`.")
    if not folder.results(runs):
        raise no_result(folder)
    with folder.locked():
        return write_all(spec, runs, tuning, folder, StudyProgress(), command)


def write_all(
    spec: StudySpec,
    runs: list[RunSpec],
    tuning: list[RunSpec],
    folder: StudyFolder,
    progress: StudyProgress,
    command: str,
) -> Path:
    """Writes the table of runs, summary and report."""
    folder.reopen()
    results = folder.results([*runs, *tuning])
    notes = notes_on(runs)
    write_runs(results, notes, folder.path)
    return _write_results(spec, results, notes, folder, progress, command)


def _write_results(
    spec: StudySpec,
    results: list[RunResult],
    notes: dict[str, Any],
    folder: StudyFolder,
    progress: StudyProgress,
    command: str,
) -> Path:
    """Writes summary and report from the results of all runs."""
    compared, tuning = ([result for result in results if result.stage == stage] for stage in ("compare", "tune"))
    summary = summarise(spec, compared, tuning, notes, command)
    summary["limitations"] = limitations(results, summary)  # some need more than the table of runs
    open_manifest(folder.path)  # the summary refers to it
    write_summary(folder, summary)
    page = write_report(folder.path, results, summary, progress)
    folder.write_manifest(results)
    return page


def write_report(
    folder: Path, results: list[RunResult], summary: dict[str, Any], progress: StudyProgress | None = None
) -> Path:
    """
    Writes `report/` into the folder of a study, replacing an older one as a whole.

    `results` are all runs, those for tuning and those that diverged included. Of the `summary`, "tuning" is
    optional. Returns the path of `index.html`; next to it are `report.md`, the plots as PNG and, in `figures/`, as PDF.
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
    for table in [*contents.summaries.values(), *contents.others]:
        parts += [f"## {markdown_text(table.title)}", to_markdown(table)]
    if found := contents.findings_table():
        parts += [f"<details><summary>{markdown_text(found.title)}</summary>", to_markdown(found), "</details>"]
    for plot in made:
        if plot.file != DIFFERENCES:
            parts += [f"## {markdown_text(plot.title)}", _image(plot)]
    return [*parts, "## Versions and hardware", _bullets(f"{key}: {value}" for key, value in contents.facts())]


def _bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {markdown_text(sentence)}" for sentence in sentences)


def _image(plot: Plot) -> str:
    return f"![{markdown_text(plot.alt)}]({plot.file})"


# --- the card ----------------------------------------------------------------------------------------------------------

_TAGS = ("diffusers", "diffusers_lrlab", "learning-rate-schedule", "study")
_USE = (
    "`summary.json` holds everything that this card says. `diffusers_lrlab.read_study(FOLDER)` reads the runs as a data "
    "frame, and `lrlab study report` makes summary and report again from `runs.parquet`, both in a copy of these files."
)
_REPEAT = (
    "No checkout of the project is needed. `spec.yaml` is the specification as it ran: `lrlab study run spec.yaml --out "
    "DIR` repeats the study even if the preset has changed since."
)


def write_study_card(folder: Path, out: Path) -> Path:
    """
    Writes the card of a finished study into a new folder; returns its path. Its example loads from a folder of this name.

    Raises a `LabError` if the study has no report.
    """
    study = StudyFolder(folder)
    spec, _ = study.read_spec()
    if not ((folder / "report" / "report.md").exists() and (folder / RUNS_TABLE).exists()):
        raise LabError(f"{str(folder)!r} has no report yet. Write one with `lrlab study report {folder}`.")
    with atomic_folder(out) as card, damage_named(folder):
        refuse_damaged(folder, only=lambda name: not name.startswith("runs/"))
        for path in sorted((folder / "report").glob("*.png")):
            shutil.copyfile(path, card / path.name)
        for name in ("summary.json", "summary.parquet", RUNS_TABLE, "spec.yaml"):
            shutil.copyfile(folder / name, card / name)
        summary = json.loads((card / "summary.json").read_text(encoding="utf-8"))
        # The table lacks samples, which only the files of the runs have.
        results = [study.read(run.id) or run for run in read_runs(card)[0]]
        command = command_of_card(summary["study"]["command"], summary["study"]["name"], is_preset(card))
        own_data = [shown_path(name) for name in sources(spec["datasets"]) if name not in EMBEDDED_DATASETS]
        write_text(card / "README.md", _card_text(ReportContents(results, summary), out.resolve().name, command, own_data))
        write_manifest(card)
    return out / "README.md"


def _card_text(contents: ReportContents, name: str, command: str, own_data: list[str]) -> str:
    """What a reader needs first, how to load and repeat the study, then all tables and plots."""
    example = (
        "```python\n"
        "from datasets import load_dataset\n\n"
        f'summary = load_dataset("{name}", split="summary")  # a row for each arm, data set and metric\n'
        f'runs = load_dataset("{name}", name="runs", split="runs")  # a row for each run\n'
        "```"
    )
    repeat = f"````bash\n{install_command('study')}\n{command}\n````"
    names = ", ".join(map(markdown_text, own_data))
    needs = f"It needs data that are not in this folder: {names}. `--dataset_name` names others." if names else ""
    sections = ("## Use", example, _USE, "## Repeat the study", repeat, _REPEAT, needs)
    return f"---\n{_front_matter(contents)}\n---\n\n{report_markdown(contents, plots_of(contents), *sections)}"


def _front_matter(contents: ReportContents) -> str:
    """The metadata of a data set of two tables, as the Hub and its viewer read them."""
    from huggingface_hub import DatasetCardData

    files = {"default": ("summary", "summary.parquet"), "runs": ("runs", RUNS_TABLE)}
    configs: list[dict[str, Any]] = [
        {"config_name": name, "data_files": [{"split": split, "path": path}]} for name, (split, path) in files.items()
    ]
    return str(DatasetCardData(pretty_name=str(contents.study["title"]), tags=[*_TAGS], configs=configs).to_yaml())
