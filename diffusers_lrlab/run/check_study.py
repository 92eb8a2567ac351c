"""`lrlab check` of a study: its specification, results, weights, and the states of runs that are not done."""

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
from ..hub.records import read_json
from ..study.analysis.runs_table import RUNS_TABLE
from ..study.runs.results import StudyFolder
from ..training.run_folder import RunFolder
from .check_run import check_run, newest_whole
from .finding import (
    Finding,
    is_put_aside,
    leftovers_in,
    problem_of,
    quarantine,
    read_parquet,
    refuse_damage,
)


def check_study(path: Path) -> Finding:
    """What is whole of a study, and what is damaged, which the command of the study does again."""
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
            finding.damaged.append(f"local/{run.name}: none of its checkpoints is whole")
    for name, read in (("summary.json", read_json), ("summary.parquet", read_parquet)):
        if (path / name).exists():
            finding.note(name, partial(read, path / name))
    finding.hold(path)
    if finding.damaged:
        command = f"lrlab study run {shlex.quote(str(path / 'spec.yaml'))} --out {shlex.quote(str(path))}"
        finding.remedy = "download the card again" if is_card else f"{command} does again what is damaged"
    return finding


def repair_study(path: Path) -> Iterator[str]:
    """Puts aside what is damaged, under the lock of the study, which has removed leftovers; yields what was done."""
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
    """Of runs side by side, without what was put aside."""
    return [state for state in sorted((path / "stacks").glob("[!.]*")) if not is_put_aside(state)]


def _folders(path: Path) -> list[Path]:
    return [path / name for name in (".", "runs", "weights", "stacks")]


def _check_result(folder: StudyFolder, run_id: str) -> None:
    """A result, by all that the study itself holds it against."""
    if folder.read(run_id) is None:
        raise LabError(f"{str(folder.run_file(run_id))!r} cannot be read as a result")


def _weights(folder: StudyFolder) -> list[Path]:
    """Those that are there, and those that results know of, in a study that has any: one that was downloaded has none."""
    there = {*(folder.path / "weights").glob("*.safetensors")}
    known = (folder.read(file.stem) for file in (folder.path / "runs").glob("*.json") if there)
    return sorted(there | {folder.weights_file(result.id) for result in known if result and result.weights})


def _check_weights(folder: StudyFolder, file: Path) -> None:
    """By their hash, or by their header if there is no result that has it."""
    result = folder.read(file.stem)
    if result is None or result.weights is None:
        read_weights(file)
    else:
        refuse_damage(filter(None, [folder.find_damaged_weights(result)]))


def _check_state(path: Path) -> None:
    """The state of runs side by side."""
    refuse_damage(each_damage(path))
