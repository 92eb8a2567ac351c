"""`lrlab check` of a study: its specification, results, weights, and the states of unfinished runs."""

import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ..core.errors import LabError
from ..core.held import held_against_manifest
from ..core.lock import holder_of
from ..core.manifest import MANIFEST, each_damage, open_manifest
from ..core.words import counted
from ..hub.pipeline_folder import read_weights
from ..study.analysis.runs_table import RUNS_TABLE
from ..study.runs.results import StudyFolder
from ..training.record_schema import read_json
from ..training.run_folder import RunFolder
from .check_run import check_run, newest_whole
from .finding import Finding, is_quarantined, leftovers_in, problem_of, quarantine, read_parquet, refuse_damage


def check_study(path: Path) -> Finding:
    """Intact files of a study, and damaged ones, whose runs the command of the study repeats."""
    folder = StudyFolder(path)
    who = holder_of(path)
    files = sorted((path / "runs").glob("*.json"))
    is_card = not (path / "runs").exists() and (path / RUNS_TABLE).exists()
    status = "a card, with a table of its runs" if is_card else f"with {counted(len(files), 'result')}"
    status = status if who is None else f"being written by {who}"
    finding = Finding("study", str(path), status, leftovers=leftovers_in(*_folders(path)))
    finding.note("spec.yaml", folder.read_spec)
    for file in files:
        finding.note(f"runs/{file.name}", partial(_check_result, folder, file.stem))
    for file in _weights(folder):
        finding.note(f"weights/{file.name}", partial(_check_weights, folder, file))
    for state in _states(path):
        finding.note(f"stacks/{state.name}", partial(_check_state, state))
    for run in sorted((path / "local").glob("[!.]*")):
        if run.is_dir() and newest_whole(RunFolder(run)) is None and check_run(run).damaged:
            finding.damaged.append(f"local/{run.name}: no checkpoint is intact")
    for name, read in (("summary.json", read_json), ("summary.parquet", read_parquet)):
        if (path / name).exists():
            finding.note(name, partial(read, path / name))
    finding.hold(path)
    if finding.damaged:
        command = f"lrlab study run {shlex.quote(str(path / 'spec.yaml'))} --out {shlex.quote(str(path))}"
        finding.remedy = "download the card again" if is_card else f"{command} repeats damaged runs"
    return finding


def repair_study(path: Path) -> Iterator[str]:
    """Renames damaged files, under the lock of the study, which has removed leftovers; yields a line for each change."""
    folder = StudyFolder(path)
    checks = [(file, partial(_check_result, folder, file.stem)) for file in sorted((path / "runs").glob("*.json"))]
    checks += [(file, partial(_check_weights, folder, file)) for file in _weights(folder)]
    checks += [(state, partial(_check_state, state)) for state in _states(path)]
    for file, check in checks:
        if file.exists() and problem_of(check):
            yield quarantine(file)
    if damaged := held_against_manifest(path, "study").damaged:
        for name in damaged:
            if (path / name).is_file() and name != MANIFEST:
                yield quarantine(path / name)
        open_manifest(path)
        yield f"{MANIFEST} says that the study is not finished"


def _states(path: Path) -> list[Path]:
    """The states of stacks, without quarantined ones."""
    return [state for state in sorted((path / "stacks").glob("[!.]*")) if not is_quarantined(state)]


def _folders(path: Path) -> list[Path]:
    return [path / name for name in (".", "runs", "weights", "stacks")]


def _check_result(folder: StudyFolder, run_id: str) -> None:
    """Checks a result as the study does."""
    if folder.read(run_id) is None:
        raise LabError(f"{str(folder.run_file(run_id))!r} cannot be read as a result")


def _weights(folder: StudyFolder) -> list[Path]:
    """Weights in the folder, and those that results name, in a study with any: a downloaded one has none."""
    found = {*(folder.path / "weights").glob("*.safetensors")}
    known = (folder.read(file.stem) for file in (folder.path / "runs").glob("*.json") if found)
    return sorted(found | {folder.weights_file(result.id) for result in known if result and result.weights})


def _check_weights(folder: StudyFolder, file: Path) -> None:
    """Checks weights by their hash, or by their header if no result has it."""
    result = folder.read(file.stem)
    if result is None or result.weights is None:
        read_weights(file)
    else:
        refuse_damage(filter(None, [folder.find_damaged_weights(result)]))


def _check_state(path: Path) -> None:
    """Checks the state of a stack."""
    refuse_damage(each_damage(path))
