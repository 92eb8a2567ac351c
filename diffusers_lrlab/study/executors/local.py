"""The executor that computes runs one after the other, with the ordinary trainer."""

from datetime import datetime, timezone
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

from diffusers_lrlab.data.image_folder import digest_of

from ...core.errors import Diverged, LabError
from ...core.files import remove
from ...training.prepare import make_accelerator
from ...training.resume import read_state
from ...training.run_folder import RunFolder, checkpoint_update
from ...training.trainer import Trainer
from ..runs.context import StudyContext
from ..runs.measure import Curves, record_run
from ..spec.spec import RunSpec


def run_local(specs: list[RunSpec], study: StudyContext) -> None:
    """Trains each run as `train_ddpm.py` does, with its checkpoints, from which an interrupted run is resumed."""
    for spec in study.folder.missing(specs):
        _train_and_record(spec, study)


def _train_and_record(spec: RunSpec, study: StudyContext) -> None:
    # accelerate has one precision per process.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    # What was begun with other data is not continued.
    path = study.folder.path / "local" / f"{spec.id}-{digest_of([study.data(spec).fingerprint])[:8]}"
    plan, data = study.plan(spec, str(path))
    folder = RunFolder(path)
    checkpoint = _checkpoint_of(folder, study)
    trainer = Trainer(plan, data, make_accelerator(plan.config), folder)
    if checkpoint is not None:
        trainer.resume(checkpoint)
    study.progress.advance(trainer.run.update)
    error = None
    try:
        for _ in trainer.updates(show_progress=False):
            study.progress.advance(1)
    except Diverged as reason:
        error = str(reason).partition(":")[0] + "."
        study.progress.advance(plan.num_updates - trainer.run.update)
    record_run(study, spec, trainer.run, _curves_of(folder, plan.num_updates), error, {"name": "local"}, started)
    trainer.accelerator.free_memory()
    study.discard(path)


def _checkpoint_of(folder: RunFolder, study: StudyContext) -> Path | None:
    """The newest checkpoint of an interrupted run; without one, or if the folder is damaged, it is emptied."""
    checkpoint = None
    try:
        checkpoint = folder.newest_checkpoint()
        if checkpoint is not None:
            rows = folder.rows_until(checkpoint_update(checkpoint))
            if len(rows) != read_state(checkpoint)["log_rows"]:
                raise LabError(f"{str(folder.metrics_file)!r} lacks rows. ")
    except LabError as damage:
        study.progress.log(f"{str(damage).partition('. ')[0]}: the run {folder.path.name} starts from the beginning.")
        checkpoint = None
    if checkpoint is None and folder.path.exists():
        remove(folder.path)
    folder.path.mkdir(parents=True, exist_ok=True)
    return checkpoint


def _curves_of(folder: RunFolder, num_updates: int) -> Curves:
    curves = Curves(num_updates)
    for row in folder.read_metrics():
        if "loss" in row:
            curves.add_loss(row["update"], row["loss"], row["lr"], row.get("beta1"))
        else:
            curves.add_quality(row["update"], {key: value for key, value in row.items() if key != "update"})
    return curves
