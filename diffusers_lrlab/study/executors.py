"""
Executors: functions that compute the missing runs of a list, in this process (`EXECUTORS`) or in workers.

They get all runs, because stacks must not depend on which runs are finished.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

from diffusers_lrlab.core.environment import require_extra
from diffusers_lrlab.core.values import COUNT, Range

from ..core.environment import available_cores
from ..core.errors import Diverged, LabError
from ..core.files import remove
from ..core.plugins import loaded_plugins
from ..core.words import counted
from ..data.image_folder import digest_of
from ..training.prepare import make_accelerator
from ..training.run_folder import RunFolder
from ..training.trainer import Trainer
from .runs.context import StudyContext
from .runs.measure import Curves, record_run
from .spec.spec import RunSpec
from .stacked.stacks import not_stackable, run_stacked, split_into_stacks
from .workers import Job, Pool, RayWorkers, Setup, Workers

WORKERS = ("pool", "ray")  # executors that compute runs in other processes


def check_executor(executor: str | None, stack_size: int | None = None, num_workers: int | None = None) -> None:
    """Raises a `LabError` for an unknown executor, and for options that do not apply to it."""
    known = (*EXECUTORS, *WORKERS)
    if executor is not None and executor not in known:
        raise LabError(f"There is no executor {executor!r}. Known: {', '.join(known)}.")
    COUNT.check("--stack_size", stack_size, "it is the number of runs that are computed together")
    if num_workers is not None and executor not in WORKERS:
        raise LabError(f"--workers {num_workers} has no effect without --executor {' or '.join(WORKERS)}.")
    most = available_cores() if executor == "pool" else None
    allowed = Range(f"[1, {most}]", whole=True) if most else COUNT
    allowed.check("--workers", num_workers, f"this machine has {counted(most, 'core')}" if most else "each is a process")
    if executor == "ray":
        require_extra("ray", "--executor ray")


def assign_executors(specs: list[RunSpec], study: StudyContext, executor: str | None) -> list[tuple[str, list[RunSpec]]]:
    """
    Names in `EXECUTORS` and the runs of each: the requested one, or by default stacks of all runs that can be stacked.

    The reason why runs cannot be stacked is logged. Workers follow the default, or with a stack size of 1 compute each run
    separately.
    """
    if executor in EXECUTORS:
        return [(executor, specs)]
    if executor in WORKERS and study.stack_size == 1:
        return [("local", specs)]
    reasons = {spec.id: not_stackable(spec, study) for spec in specs}
    for reason in sorted({*filter(None, reasons.values())}):
        named = sorted({f"{spec.arm} on {spec.dataset}" for spec in specs if reasons[spec.id] == reason})
        study.progress.log(f"Not stacked ({reason}): {', '.join(named)}.")
    stacked = [spec for spec in specs if not reasons[spec.id]]
    local = [spec for spec in specs if reasons[spec.id]]
    return [(name, some) for name, some in (("stacked", stacked), ("local", local)) if some]


# --- workers ---------------------------------------------------------------------------------------------------------


@contextmanager
def open_workers(executor: str | None, num_workers: int | None, study: StudyContext) -> Iterator[Workers | None]:
    """The workers of pool and ray, inside this block; `None` for other executors."""
    if executor not in WORKERS:
        yield None
        return
    plugins = ",".join(plugin["name"] for plugin in loaded_plugins())
    setup = Setup(study.folder.path.resolve(), plugins)
    with closing((Pool if executor == "pool" else RayWorkers)(setup, num_workers)) as workers:
        yield workers


def make_jobs(shares: list[tuple[str, list[RunSpec]]], study: StudyContext, workers: Workers) -> Iterator[Job]:
    """Jobs for missing runs: at least as many stacks as workers if there are enough runs, and single runs."""
    for name, specs in shares:
        stacks = [[spec] for spec in specs]
        if name == "stacked":
            size = min(study.stack_size, -(-len(specs) // workers.num_workers))
            stacks = [*split_into_stacks(specs, study, size, workers.num_threads)]
        yield from (Job(EXECUTORS[name], stack) for stack in stacks if study.folder.missing(stack))


# --- one run after the other -----------------------------------------------------------------------------------------


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
    curves = Curves.of_log(folder.read_metrics(), plan.num_updates)
    record_run(study, spec, trainer.run, curves, error, {"name": "local"}, started)
    trainer.accelerator.free_memory()
    remove(path)


def _checkpoint_of(folder: RunFolder, study: StudyContext) -> Path | None:
    """The newest checkpoint of an interrupted run; without an intact one, the folder is emptied."""
    checkpoint = None
    try:
        checkpoint = folder.newest_checkpoint()
    except LabError as damage:
        study.progress.log(f"{str(damage).partition('. ')[0]}: the run {folder.path.name} starts from the beginning.")
    if checkpoint is None:
        remove(folder.path)
    folder.path.mkdir(parents=True, exist_ok=True)
    return checkpoint


EXECUTORS: dict[str, Callable[[list[RunSpec], StudyContext], None]] = {"local": run_local, "stacked": run_stacked}
