"""The card of a study: a folder to publish, with its plots, tables, summary and runs."""

import json
import shutil
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from ...core.errors import LabError
from ...core.files import LOCK, atomic_folder, write_text
from ...core.manifest import MANIFEST, damage_named, refuse_damaged, write_manifest
from ...core.plain_yaml import load_front_matter
from ...data.options import EMBEDDED_DATASETS
from ..analysis.runs_table import RUNS_TABLE, read_runs
from ..runs.results import StudyFolder, sources
from ..same_command import command_of_card, is_preset, shown_path
from .contents import ReportContents
from .markdown import card_markdown
from .plot_list import plots_of

_FILES = ("README.md", "*.png", "spec.yaml", "summary.*", RUNS_TABLE, MANIFEST, "tables", "report", LOCK)
_SIZES = (1_000, 10_000, 100_000, 1_000_000)  # rows, as the Hub counts them
_LICENCE = ("license", "license_name", "license_link")
_TAGS = ("diffusers", "diffusers_lrlab", "learning-rate-schedule", "study")


def is_study_card(folder: Path) -> bool:
    """Whether a folder is the card of a study, without its runs."""
    return (folder / "summary.json").is_file() and (folder / "spec.yaml").is_file() and not (folder / "runs").exists()


def write_study_card(folder: Path, out: Path) -> Path:
    """
    Writes the card of a finished study into a new folder, or replaces an older card; returns its path.

    Raises a `LabError` if the study has no report, or if `out` holds anything else.
    """
    StudyFolder(folder).read_spec()
    _check_is_ours(out)
    if is_study_card(folder):
        raise LabError(f"{str(folder)!r} is a card already. Give the folder of the study.")
    if not ((folder / "report" / "report.md").exists() and (folder / RUNS_TABLE).exists()):
        raise LabError(f"{str(folder)!r} has no report yet. Write one with `lrlab study report {folder}`.")
    with atomic_folder(out) as temporary, damage_named(folder):
        refuse_damaged(folder, only=lambda name: not name.startswith(("runs/", "weights/")))
        _copy_report(folder, temporary)
        write_text(temporary / "README.md", card_text(temporary, out.resolve().name, _licence_of(out)))
        write_manifest(temporary)
    return out / "README.md"


def _licence_of(card: Path) -> dict[str, Any]:
    """The licence in the metadata of a card, which its author chooses; raises a `LabError` if these cannot be read."""
    path = card / "README.md"
    try:
        found = load_front_matter(path.read_text(encoding="utf-8")) if path.exists() else None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LabError(
            f"The metadata of {str(path)!r} cannot be read: {error}. Hint: mend the lines between --- at its top, or "
            "delete the file."
        ) from None
    given = found if isinstance(found, dict) else {}
    return {key: given[key] for key in _LICENCE if isinstance(given.get(key), (str, list))}


def _check_is_ours(out: Path) -> None:
    """Raises a `LabError` if `out` holds files of others, which would be deleted."""
    if not out.exists():
        return
    if out.is_file() or (not (out / "summary.json").exists() and next(out.iterdir(), None) is not None):
        raise LabError(f"{str(out)!r} holds files that are not a card of a study. Give a new folder.")
    names = sorted(path.name for path in out.iterdir())
    if others := [name for name in names if not any(fnmatchcase(name, pattern) for pattern in _FILES)]:
        raise LabError(
            f"{str(out)!r} holds other files beside a card ({', '.join(others[:3])}), which a new one would delete. Hint: "
            "--out NEW_FOLDER"
        )


def card_text(card: Path, name: str | None = None, licence: Mapping[str, Any] | None = None) -> str:
    """
    The text of the card in a folder, from the other files there.

    Args:
        card (`Path`): The folder.
        name (`str`, *optional*): What the example loads, by default the name of the folder.
        licence (`dict`, *optional*): The Hub's metadata about the licence, such as `license`, if the author gave one.
    """
    summary = json.loads((card / "summary.json").read_text(encoding="utf-8"))
    contents, pictures = ReportContents(read_runs(card).results, summary), {path.name for path in card.glob("*.png")}
    there = [plot for plot in plots_of(contents, pictures) if plot.file in pictures]
    study, (spec, _) = summary["study"], StudyFolder(card).read_spec()
    own_data = [shown_path(name) for name in sources(spec["datasets"]) if name not in EMBEDDED_DATASETS]
    command = command_of_card(study["command"], study["name"], is_preset(card))
    text = card_markdown(contents, there, name or card.resolve().name, command, own_data)
    return f"---\n{_front_matter(contents, licence or {})}\n---\n\n{text}"


def _copy_report(folder: Path, card: Path) -> None:
    for path in sorted((folder / "report").glob("*.png")):
        shutil.copyfile(path, card / path.name)
    shutil.copytree(folder / "report" / "tables", card / "tables")
    for name in ("summary.json", "summary.parquet", RUNS_TABLE, "spec.yaml"):
        shutil.copyfile(folder / name, card / name)


def _front_matter(contents: ReportContents, licence: Mapping[str, Any]) -> str:
    """The metadata of a data set of two tables, as the Hub and its viewer read them."""
    from huggingface_hub import DatasetCardData

    files = {"default": ("summary", "summary.parquet"), "runs": ("runs", RUNS_TABLE)}
    configs = [
        {"config_name": name, "data_files": [{"split": split, "path": path}]} for name, (split, path) in files.items()
    ]
    num_rows = max(len(contents.results), len(contents.summary["rows"]))
    title = str(contents.study["title"])
    data = DatasetCardData(**licence, pretty_name=title, size_categories=[_size(num_rows)], tags=[*_TAGS], configs=configs)
    return str(data.to_yaml())


def _size(num_rows: int) -> str:
    """The Hub's name for a number of rows."""
    names = ["n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M"]
    return names[sum(num_rows >= size for size in _SIZES)]
