"""The executor that computes runs one after the other, with the ordinary trainer."""

import json
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, GradientState

from ...core.errors import Diverged, LabError
from ...core.files import remove, write_text
from ...data.loading import TrainingData
from ...training.handover import hand_over
from ...training.prepare import make_accelerator
from ...training.run_folder import RunFolder
from ...training.trainer import Trainer
from ..runs.context import StudyContext
from ..runs.curves import Curves
from ..runs.kept_averages import snapshot_writers
from ..runs.measure import branch_note, record_run
from ..spec.horizons import Family, families
from ..spec.spec import RunSpec

_NOTE = "data_fingerprint"  # of the data of a run, in its folder
_BRANCH = "branch.json"  # of a run that left its trunk, in its folder


def run_local(specs: list[RunSpec], study: StudyContext) -> None:
    """
    Trains each run as `train_ddpm.py` does, with its checkpoints, from which an interrupted run is resumed.

    A run that leaves a trunk is resumed from a checkpoint of that one.
    """
    for family in families(study.folder.missing(specs)):
        for spec in family.runs:
            _train_and_record(spec, family.branches if spec is family.trunk else {}, study)


def _train_and_record(spec: RunSpec, branches: dict[int, list[RunSpec]], study: StudyContext) -> None:
    """Trains a run and, on the way, leaves checkpoints for runs that branch off, by their update."""
    # accelerate has one precision per process.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    path = _folder_of(spec, study)
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    plan, data = study.plan(spec, str(path))
    folder, checkpoint = _interrupted_run(path, data, study)
    trainer = Trainer(plan, data, make_accelerator(plan.config), folder)
    waiting = {update: [run for run in some if not _is_begun(run, study)] for update, some in branches.items()}
    resumed, family = [spec.id] * (checkpoint is not None), Family(spec, waiting)
    for writer in snapshot_writers([(spec, trainer.run)], resumed, {spec.id: family}, study):
        trainer.snapshots = writer
    if checkpoint is not None:
        trainer.resume(checkpoint)
        _hand_over(trainer, spec, branches.get(trainer.run.update, []), study)
    study.progress.advance(trainer.run.update)
    error = None
    try:
        for update in trainer.updates(show_progress=False):
            study.progress.advance(1)
            _hand_over(trainer, spec, branches.get(update, []), study)
    except Diverged as reason:
        error = str(reason).partition(":")[0] + "."
        study.progress.advance(plan.num_updates - trainer.run.update)
    executor = {"name": "local", **_branch_of(path)}
    record_run(study, spec, trainer.run, _curves_of(folder, plan.num_updates), error, executor, started)
    trainer.accelerator.free_memory()
    study.discard(path)


def _folder_of(spec: RunSpec, study: StudyContext) -> Path:
    return study.folder.path / "local" / spec.id


def _is_begun(spec: RunSpec, study: StudyContext) -> bool:
    return bool(RunFolder(_folder_of(spec, study)).checkpoints())


def _hand_over(trainer: Trainer, trunk: RunSpec, branches: list[RunSpec], study: StudyContext) -> None:
    """Makes the present state that of interrupted runs, unless they have a checkpoint already."""
    for spec in branches:
        if _is_begun(spec, study):
            continue
        path = _folder_of(spec, study)
        if path.exists():
            remove(path)
        path.mkdir(parents=True)
        plan, data = study.plan(spec, str(path))
        write_text(path / _NOTE, data.fingerprint)
        write_text(path / _BRANCH, json.dumps(branch_note(trunk, trainer.run.update, study)))
        more = {"seconds": [0.0, 0.0]}  # those of the trunk are its own
        length = plan.warmup_updates, plan.num_updates
        hand_over(trainer.save(), trainer.folder, RunFolder(path), plan.config, *length, more=more)


def _branch_of(path: Path) -> dict[str, Any]:
    """The key `branch` of a record, for a run that left a trunk."""
    with suppress(FileNotFoundError, ValueError):
        return {"branch": json.loads((path / _BRANCH).read_text(encoding="utf-8"))}
    return {}


def _interrupted_run(path: Path, data: TrainingData, study: StudyContext) -> tuple[RunFolder, Path | None]:
    """The folder of a run and its newest checkpoint; the folder is emptied if that is damaged or of other data."""
    note, folder, checkpoint = path / _NOTE, RunFolder(path), None
    try:
        same_data = note.exists() and note.read_text("utf-8", errors="replace") == data.fingerprint
        checkpoint = folder.newest_checkpoint() if same_data else None
        if checkpoint is not None:
            folder.check_log_until(checkpoint)
    except LabError as damage:
        study.progress.log(f"{str(damage).partition('. ')[0]}: the run {path.name} starts from the beginning.")
        checkpoint = None
    if checkpoint is None and path.exists():
        remove(path)
    path.mkdir(parents=True, exist_ok=True)
    write_text(note, data.fingerprint)
    return folder, checkpoint


def _curves_of(folder: RunFolder, num_updates: int) -> Curves:
    curves = Curves(num_updates)
    for row in folder.read_metrics():
        if "loss" in row:
            curves.add_loss(row["update"], row["loss"], row["lr"], row.get("beta1"))
        else:
            curves.add_quality(row["update"], {key: value for key, value in row.items() if key != "update"})
    return curves
