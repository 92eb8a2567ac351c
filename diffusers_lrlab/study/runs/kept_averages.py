"""Averages that a study keeps beside the measured one, for `lrlab ema`: further ones of `--ema`, and snapshots.

Such a run has a folder in `averages/`, in the format of the folder of any run. Its record says that it is finished once all
of it is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ...core.files import remove
from ...core.words import counted
from ...training.other_averages import save_other_averages
from ...training.pipeline import save_pipeline
from ...training.plan import Plan
from ...training.run_folder import RunFolder
from ...training.run_state import RunState
from ...training.snapshots import SnapshotWriter
from ..spec.horizons import Family
from ..spec.spec import RunSpec
from .context import StudyContext


def averages_of(study: StudyContext, spec: RunSpec) -> RunFolder:
    return RunFolder(study.folder.averages_folder(spec.id))


def _begin(study: StudyContext, *specs: RunSpec) -> None:
    """Begins the folders of runs that start, in place of those from earlier attempts."""
    for spec in specs:
        drop_averages(study, spec)
        if spec.keeps_averages:
            averages_of(study, spec).write_record(_record(study, spec, study.plan(spec)[0], {"status": "running"}))


def drop_averages(study: StudyContext, spec: RunSpec) -> None:
    """Removes the folder of a run, if it has one."""
    if (path := averages_of(study, spec).path).exists():
        remove(path)


def snapshot_writers(
    runs: Iterable[tuple[RunSpec, RunState]],
    resumed: Collection[str],
    families: Mapping[str, Family],
    study: StudyContext,
) -> list[SnapshotWriter]:
    """
    The writers of the snapshots of runs, which continue if their ids are in `resumed`, and begin otherwise. `families` are
    those of trunks, by their ids. The snapshots of branches are written while the trunk runs, at the updates of each branch,
    so they equal those of a separate run.
    """
    writers = []
    for spec, run in runs:
        known = families[spec.id].branches if spec.id in families else {}
        branches = {update: study.folder.missing(some) for update, some in known.items()}
        if spec.id not in resumed:
            _begin(study, spec, *(branch for some in branches.values() for branch in some))
        if spec.takes_snapshots:
            leaving = [
                SnapshotWriter(run, averages_of(study, branch), study.plan(branch)[0], update)
                for update, some in branches.items()
                for branch in some
            ]
            writers.append(SnapshotWriter(run, averages_of(study, spec), leaving=leaving))
    return writers


def keep_averages(study: StudyContext, spec: RunSpec, run: RunState) -> None:
    """Completes the folder of a finished run: the pipeline of the measured average, those of the others, and the record."""
    if not spec.keeps_averages:
        return
    folder = averages_of(study, spec)
    with run.averaged_weights():
        save_pipeline(run, folder.path)
    save_other_averages(run, folder)
    record = _record(study, spec, run.plan, {"status": "finished"})
    folder.write_manifest(record)
    folder.write_record(record)


def _record(study: StudyContext, spec: RunSpec, plan: Plan, run: dict[str, Any]) -> dict[str, Any]:
    start = {} if plan.start is None else {"started_from": plan.start.facts}
    return {
        "run": {"command": "lrlab study run spec.yaml", "study_run": spec.id, **run},
        "train": {"num_updates": plan.num_updates, "global_batch": plan.layout.global_batch, **start},
        "config": plan.config.to_dict() | {"output_dir": spec.id, "save_images_epochs": spec.config.save_images_epochs},
        "meta": study.meta,
    }


def kept_in_words(specs: Iterable[RunSpec]) -> str | None:
    """Which averages are measured and which are kept, in a sentence; `None` if each run has one without snapshots."""
    keeping = [spec for spec in specs if spec.keeps_averages]
    if not keeping:
        return None
    runs, arms = counted(len(keeping), "run"), ", ".join(dict.fromkeys(spec.arm for spec in keeping))
    return (
        f"Averages of {arms}: the first one of each run is measured; the others and the snapshots of {runs} stay in "
        "averages/, for lrlab ema."
    )


def kept_bytes(plan: Plan) -> int:
    """Bytes of the averages of a run on the disk: pipelines in float32, and snapshots."""
    config = plan.config
    forms = config.given_ema_forms
    pipelines = plan.num_parameters * 4 * (1 + sum(not form.is_posthoc for form in forms[1:]))
    if (posthoc := config.posthoc) is None:
        return pipelines
    each = plan.num_parameters * len(posthoc.tracks) * (2 if posthoc.kwargs["dtype"] == "bf16" else 4)
    return pipelines + len(plan.snapshot_updates) * each
