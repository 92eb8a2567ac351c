"""Forecast of a study: its runs, and the time and memory they need."""

import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.environment import peak_memory_mb
from ..core.words import counted, duration
from ..data.batches import iterate_batches
from ..training.plan import Plan
from ..training.prepare import make_accelerator
from ..training.run_folder import RunFolder
from ..training.run_state import RunState
from ..training.trainer import Trainer
from .analysis.tuning import chosen_rates, most_tuning_runs, tuning_rounds
from .executors import WORKERS, assign_executors, check_executor
from .run import use_all_cores, warnings_before
from .runs.context import StudyContext
from .runs.measure import Curves, measure
from .runs.results import StudyFolder
from .spec.expansion import expand, expand_tuning
from .spec.reading import load_spec, with_datasets
from .spec.spec import RunSpec, StudySpec
from .stacked.member import Member
from .stacked.stacks import ParallelStacks, check_stackable, split_into_stacks, worker_threads

_PROBED_UPDATES = 12


def describe_study(
    source: str | Path | StudySpec,
    executor: str | None,
    stack_size: int | None,
    out: Path | None = None,
    num_workers: int | None = None,
    dataset_name: Sequence[str] = (),
) -> str:
    """
    The missing runs of a study and their forecast cost, as text, from measurements of some seconds.

    Raises the same `LabError`s as running the study would before its first run.
    """
    folder, spec = StudyFolder(out or Path("study")), with_datasets(load_spec(source), dataset_name)
    if out is not None:
        folder.check_is_study(spec, dataset_name)
    check_executor(executor, stack_size, num_workers)
    use_all_cores()
    tuning, runs = expand_tuning(spec), expand(spec)
    missing = [*tuning, *runs]
    if out is not None:
        tuning = sum(tuning_rounds(spec, folder), [])
        if not folder.missing(tuning):
            runs = expand(spec, chosen_rates(spec, folder.results(tuning)))
        missing = folder.missing([*tuning, *runs])
    study = StudyContext(folder, stack_size)
    if executor == "stacked":
        check_stackable([*tuning, *runs], study)
    lines = [
        spec.title,
        f"  {counted(len(spec.arms), 'arm')} ({', '.join(spec.arms)}; baseline {spec.baseline}) x "
        f"{counted(len(spec.datasets), 'data set')} ({', '.join(spec.datasets)}) x {counted(len(spec.seeds), 'seed')} = "
        f"{counted(len(runs), 'run')}",
    ]
    if tuning:
        more = _more_for_tuning(spec, tuning, missing)
        lines.append(f"  before, {counted(len(tuning), 'run')} to choose learning rates{more}")
    if num_done := len(tuning) + len(runs) - len(missing):
        lines.append(f"  {num_done} of them are already finished in {out}")
    lines += [f"  warning: {warning}" for warning in warnings_before(spec, missing, study)]
    total = np.zeros(2)
    for name, some in assign_executors(missing, study, executor):
        updates = sum(study.plan(spec)[0].num_updates for spec in some)
        total += (seconds := _seconds(name == "stacked", some, study))
        lines.append(f"  {name}: {counted(len(some), 'run')}, {counted(updates, 'update', ',')}, {_as_text(seconds)}")
    shared = " in one process, divided among the workers" if executor in WORKERS else ""
    return "\n".join([*lines, f"  total: {_as_text(total)}{shared}"])


def _more_for_tuning(spec: StudySpec, tuning: list[RunSpec], missing: list[RunSpec]) -> str:
    """A note on the runs that tuning may add, unless it is finished."""
    more = most_tuning_runs(spec) - len(tuning)
    is_done = not {run.id for run in tuning} & {run.id for run in missing}
    return "" if is_done or not more else f", and up to {more} more if the best is at the edge (not counted below)"


def _as_text(seconds: np.ndarray) -> str:
    """Seconds of training and of evaluation, with the memory that measuring them took."""
    training, evaluation = map(duration, seconds.tolist())
    memory = math.ceil(peak_memory_mb())
    return f"about {training} of training and {evaluation} of evaluation, {memory} MiB of memory"


def _seconds(is_stacked: bool, specs: list[RunSpec], study: StudyContext) -> np.ndarray:
    """Seconds of training and of evaluation, from some updates, a validation and an evaluation of each kind of run."""
    total, probed = np.zeros(2), dict[Any, tuple[float, float, float]]()
    for stack in split_into_stacks(specs, study) if is_stacked else ([spec] for spec in specs):
        plan, _ = study.plan(stack[0])
        kind = (repr(plan.model_config), plan.layout.global_batch) if is_stacked else (stack[0].arm, stack[0].dataset)
        key = (kind, len(stack), stack[0].metrics)
        if key not in probed:
            probed[key] = _probe_stack(stack, study) if is_stacked else _probe_run(stack[0], study)
        update, validation, measurement = probed[key]
        # Arms validate at different intervals; a plateau schedule may do it after every update.
        validations = sum(_num_validations(study.plan(spec)[0]) for spec in stack)
        total += (update * plan.num_updates, validation * validations + measurement * len(stack))
    return total


def _num_validations(plan: Plan) -> int:
    return plan.num_updates // plan.validation_updates if plan.config.num_validation_images else 0


def _probe_stack(specs: list[RunSpec], study: StudyContext) -> tuple[float, float, float]:
    """Seconds of an update of a whole stack, and of a validation and an evaluation of one of its runs."""
    members = [Member(*study.plan(spec), study.device) for spec in specs]
    run = members[0].run
    with worker_threads(study.device, len(specs)) as threads:
        updates = ParallelStacks(members, study.device, threads).updates()
        update = _seconds_per_update(updates, run.plan.num_updates)
        validation, measurement = _evaluation_seconds(run, specs[0])
        return update, validation / threads.num_threads, measurement / threads.num_threads


def _probe_run(spec: RunSpec, study: StudyContext) -> tuple[float, float, float]:
    """Seconds of an update, a validation and an evaluation of a run."""
    plan, data = study.plan(spec)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(plan, data, make_accelerator(plan.config), RunFolder(Path(folder)))
        batches = iterate_batches(data, plan.layout, 0, range(plan.num_updates))
        update = _seconds_per_update(map(trainer.do_update, batches), plan.num_updates)
        return update, *_evaluation_seconds(trainer.run, spec)


def _seconds_per_update(updates: Iterator[Any], num_updates: int) -> float:
    times = []
    for _ in range(min(_PROBED_UPDATES, num_updates)):
        started = time.perf_counter()
        next(updates, None)
        times.append(time.perf_counter() - started)
    return float(np.median(times[len(times) // 4 :]))


def _evaluation_seconds(run: RunState, spec: RunSpec) -> tuple[float, float]:
    """Seconds of a validation and of the final evaluation, measured with two sampling steps and extrapolated."""
    started = time.perf_counter()
    run.validation_losses()
    validation = time.perf_counter() - started
    config, num_steps = run.config, run.config.num_inference_steps
    run.config = dataclasses.replace(config, num_inference_steps=min(2, num_steps))
    started = time.perf_counter()
    measure(run, spec, Curves(run.plan.num_updates))
    seconds = time.perf_counter() - started + run.sampling_seconds * (num_steps / min(2, num_steps) - 1)
    run.config = config
    return validation, seconds
