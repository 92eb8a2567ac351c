"""The card of a study: a folder to upload, with its plots, tables, summary and runs."""

import json
import shutil
from pathlib import Path
from typing import Any

from ...core.environment import install_command
from ...core.errors import LabError
from ...core.files import atomic_folder, write_text
from ...core.manifest import damage_named, refuse_damaged, write_manifest
from ...data.options import EMBEDDED_DATASETS
from ..analysis.runs_table import RUNS_TABLE, read_runs
from ..runs.results import StudyFolder, sources
from ..shown_command import command_of_card, is_preset, shown_path
from .contents import ReportContents
from .plots import plots_of
from .report import report_markdown
from .tables import markdown_text

_SIZES = (1_000, 10_000, 100_000, 1_000_000)  # rows, as the Hub counts them
_TAGS = ("diffusers", "diffusers_lrlab", "learning-rate-schedule", "study")
_USE = (
    "`summary.json` holds everything that this card says, `tables/` the tables in LaTeX. "
    "`diffusers_lrlab.read_study(FOLDER)` reads the runs as a data frame, and `lrlab study report` makes summary and "
    "tables again from `runs.parquet`, both in a copy of these files."
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
        shutil.copytree(folder / "report" / "tables", card / "tables")
        for name in ("summary.json", "summary.parquet", RUNS_TABLE, "spec.yaml"):
            shutil.copyfile(folder / name, card / name)
        summary = json.loads((card / "summary.json").read_text(encoding="utf-8"))
        # The table lacks samples and some curves, which only the files of the runs have.
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
    num_rows = max(len(contents.results), len(contents.summary["rows"]))
    size = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M")[sum(num_rows >= size for size in _SIZES)]
    title = str(contents.study["title"])
    return str(DatasetCardData(pretty_name=title, size_categories=[size], tags=[*_TAGS], configs=configs).to_yaml())
