"""The card of a study: a folder to publish, with its plots, tables and summary."""

import shutil
from pathlib import Path

import yaml

from ...core.errors import LabError
from ...core.files import atomic_folder, write_text
from ...core.manifest import write_manifest
from ..analysis.runs_table import RUNS_TABLE
from ..runs.results import StudyFolder


def write_study_card(folder: Path, out: Path) -> Path:
    """
    Writes the card of a finished study into a new folder, or replaces an older card; returns its path.

    Raises a `LabError` if the study has no report, or if `out` holds anything else.
    """
    study, report = StudyFolder(folder), folder / "report" / "report.md"
    study.read_spec()
    if not (report.exists() and (folder / RUNS_TABLE).exists()):
        raise LabError(f"{str(folder)!r} has no report yet. Write one with `lrlab study report {folder}`.")
    if out.exists() and not (out / "summary.json").exists() and (out.is_file() or next(out.iterdir(), None) is not None):
        raise LabError(f"{str(out)!r} holds files that are no card of a study. Give a new folder.")
    with atomic_folder(out) as temporary:
        for path in sorted((folder / "report").glob("*.png")):
            shutil.copyfile(path, temporary / path.name)
        shutil.copytree(folder / "report" / "tables", temporary / "tables")
        for name in ("summary.json", "summary.parquet", RUNS_TABLE, "spec.yaml"):
            shutil.copyfile(folder / name, temporary / name)
        tags = ["diffusers", "learning-rate-schedule", "study"]
        metadata = {"license": "apache-2.0", "library_name": "diffusers_lrlab", "tags": tags}
        front = f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n"
        write_text(temporary / "README.md", front + report.read_text(encoding="utf-8"))
        write_manifest(temporary)
    return out / "README.md"
