"""`lrlab check` of a run: its record, log, checkpoints and pipeline."""

import json
import shlex
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..averaging.snapshots import snapshots_in
from ..core.errors import LabError
from ..core.files import number_in, write_text
from ..core.held import held_against_manifest
from ..core.lock import holder_of
from ..core.manifest import MANIFEST, each_damage
from ..core.words import counted
from ..hub.pipeline_folder import check_pipeline
from ..hub.records import read_log, read_record
from ..training.resume import read_state
from ..training.run_files import SNAPSHOTS, is_checkpoint
from ..training.run_folder import RunFolder, checkpoint_update
from .finding import Finding, leftovers_in, problem_of, quarantine, read_parquet, refuse_damage


def check_run(path: Path) -> Finding:
    """Intact and damaged files of a run, and the checkpoint that it continues from."""
    folder = RunFolder(path)
    finding = Finding("run", str(path), _status(folder), leftovers=leftovers_in(*_folders(folder)))
    finding.note("record", partial(read_record, path))
    finding.note("log", partial(_check_log, folder))
    for checkpoint in _checkpoints(folder):
        finding.note(checkpoint.name, partial(_check_checkpoint, checkpoint))
    for snapshot in snapshots_in(path / SNAPSHOTS):
        finding.note(f"{SNAPSHOTS}/{snapshot.name}", partial(_refuse_damaged, snapshot))
    if folder.timesteps_file.exists():
        finding.note(folder.timesteps_file.name, partial(read_parquet, folder.timesteps_file))
    if (path / "model_index.json").exists():
        finding.note("pipeline", partial(check_pipeline, path))
    finding.hold(path)
    good = newest_whole(folder)
    is_done = finding.status.startswith("finished") and (path / "model_index.json").exists()
    if finding.damaged or not is_done:
        start = good.name if good else "update 0, as no checkpoint is intact"
        finding.remedy = f"--resume_from_checkpoint latest continues from {start}"
    if finding.damaged:
        finding.remedy += f"; lrlab check {shlex.quote(str(path))} --repair renames damaged files"
    return finding


def _folders(folder: RunFolder) -> tuple[Path, ...]:
    """Folders in which a killed run may leave unfinished files."""
    return folder.path, folder.lab, folder.lab / "samples", folder.path / SNAPSHOTS


def _refuse_damaged(folder: Path) -> None:
    refuse_damage(each_damage(folder))


def repair_run(path: Path) -> Iterator[str]:
    """Renames damaged files, under the lock of the run; yields a line for each change."""
    folder = RunFolder(path)
    for leftover in leftovers_in(*_folders(folder)):
        yield f"{leftover} was removed"
    folder.remove_leftovers()
    for checkpoint in _checkpoints(folder):
        if problem_of(partial(_check_checkpoint, checkpoint)):
            yield quarantine(checkpoint)
    for snapshot in snapshots_in(path / SNAPSHOTS):
        if problem_of(partial(_refuse_damaged, snapshot)):
            yield quarantine(snapshot)
    good = newest_whole(folder)
    if problem_of(partial(_check_log, folder)):
        folder.rewind(checkpoint_update(good) if good else 0, read_state(good)["log"] if good else None)
        yield f"{folder.metrics_file} was cut back to {good.name if good else 'the start of the run'}"
    for file, check in ((path / "model_index.json", check_pipeline), (path / "lrlab" / "run.json", read_record)):
        if file.exists() and problem_of(partial(check, path)):
            yield quarantine(file)
    damaged = held_against_manifest(path, "run").damaged
    if [*damaged] == [MANIFEST] and not problem_of(partial(check_pipeline, path)):
        # No other file is known to be damaged, and a downloaded pipeline has no checkpoint to make it again from.
        if (path / MANIFEST).is_file():
            yield quarantine(path / MANIFEST)
        record = folder.read_record()
        record["run"].pop("manifest", None)
        write_text(folder.lab / "run.json", json.dumps(record, indent=2) + "\n")
        yield f"the record no longer names a {MANIFEST}: files are readable, but not verified"
        return
    for name in damaged:
        # The pipeline as a whole: a run that goes on replaces all of its parts.
        file = path / name if name.startswith("lrlab/") else path / "model_index.json"
        if file.is_file() and file != folder.metrics_file:  # which was repaired above
            yield quarantine(file)
    record = folder.read_record()
    status = record.get("run", {}).get("status")
    if status == "running" or (damaged and status == "finished"):
        why = "The process was killed, or the machine went down." if status == "running" else "Some files were damaged."
        record["run"] |= {"status": "failed", "error": why}
        write_text(folder.lab / "run.json", json.dumps(record, indent=2) + "\n")
        yield f"the record says failed instead of {status}"


def newest_whole(folder: RunFolder) -> Path | None:
    """The checkpoint that `latest` resumes from."""
    whole = (path for path in reversed(_checkpoints(folder)) if not problem_of(partial(_check_checkpoint, path)))
    return next(whole, None)


def _status(folder: RunFolder) -> str:
    if (who := holder_of(folder.path)) is not None:
        return f"being written by {who}"
    with suppress(LabError):
        record = read_record(folder.path)
        status, train = record["run"]["status"], record["train"]
        done = (
            f" after {train['updates_done']} of {counted(train['num_updates'], 'update')}" if "updates_done" in train else ""
        )
        return ("killed" if status == "running" else status) + done
    return "without a readable record"


def _checkpoints(folder: RunFolder) -> list[Path]:
    """All checkpoints, also damaged ones."""
    found = [path for path in folder.path.glob("checkpoint-*") if number_in(path.name, "checkpoint-") is not None]
    return sorted(found, key=checkpoint_update)


def _check_checkpoint(path: Path) -> None:
    if not is_checkpoint(path):
        raise LabError(f"{str(path / MANIFEST)!r} is missing")
    refuse_damage(each_damage(path))


def _check_log(folder: RunFolder) -> None:
    """Checks the rows, and the beginning of the log against the newest checkpoint."""
    read_log(folder.path)
    if (good := newest_whole(folder)) is not None:
        folder.check_log_until(good)
