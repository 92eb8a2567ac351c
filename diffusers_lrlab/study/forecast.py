"""Forecast of a study: its runs, and the time and memory they need."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core.environment import peak_memory_mb
from ..core.words import counted, duration
from ..data.batches import iterate_batches
from ..optimizers.build import optimizer_state_bytes
from ..training.plan import Plan
from ..training.prepare import make_accelerator
from ..training.run_folder import RunFolder
from ..training.run_state import RunState
from ..training.trainer import Trainer
from .analysis.tuning import chosen_rates, most_tuning_runs, tuning_rounds
from .checks import check_one_process, use_all_cores, warnings_before
from .executors import WORKERS, assign_executors, check_executor
from .runs.context import StudyContext
from .runs.curves import Curves
from .runs.measure import measure
from .runs.precision import products_in
from .runs.results import StudyFolder
from .spec.expansion import expand, expand_tuning
from .spec.spec import RunSpec, StudySpec
from .stacked.member import Member
from .stacked.stacks import check_stackable, split_into_stacks
from .stacked.worker_threads import ParallelStacks, worker_threads

_PROBED_UPDATES = 12


def describe_study(
    spec: StudySpec,
    executor: str | None,
    stack_size: int | None,
    out: Path | None = None,
    num_workers: int | None = None,
    address: str | None = None,
) -> str:
    """
    The missing runs of a study and their forecast cost, as text, from measurements of some seconds.

    Raises the same `LabError`s as running the study would before its first run.
    """
    check_executor(executor, stack_size, num_workers, address)
    check_one_process()
    folder = StudyFolder(out or Path("study"))
    tuning, runs = expand_tuning(spec), expand(spec)
    missing = [*tuning, *runs]
    if out is not None:
        folder.check_is_study(spec.name, missing)
        tuning = sum(tuning_rounds(spec, folder), [])
        if not folder.missing(tuning):
            runs = expand(spec, chosen_rates(spec, folder.results(tuning)))
        missing = folder.missing([*tuning, *runs])
    use_all_cores()
    study = StudyContext(folder, stack_size, precision=spec.precision)
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
    costs = []
    for name, some in assign_executors(missing, study, executor):
        updates = sum(study.plan(spec)[0].num_updates for spec in some)
        with products_in(spec.precision, study.device):
            cost = _stacked_cost(some, study) if name == "stacked" else _local_cost(some, study)
        lines.append(f"  {name}: {counted(len(some), 'run')}, {counted(updates, 'update', ',')}, {cost}")
        costs.append(cost)
    shared = " in one process, divided among the workers" if executor in WORKERS else ""
    return "\n".join([*lines, f"  total: {_total(costs)}{shared}"])


def _more_for_tuning(spec: StudySpec, tuning: list[RunSpec], missing: list[RunSpec]) -> str:
    """A note on the runs that tuning may add, unless it is finished."""
    more = most_tuning_runs(spec) - len(tuning)
    is_done = not {run.id for run in tuning} & {run.id for run in missing}
    return "" if is_done or not more else f", and up to {more} more if the best is at the edge (not counted below)"


class _Cost(NamedTuple):
    """Seconds, and peak memory in bytes."""

    training: float
    evaluation: float
    memory: float

    def __str__(self) -> str:
        times = f"about {duration(self.training)} of training and {duration(self.evaluation)} of evaluation"
        return f"{times}, {math.ceil(self.memory / 2**20)} MiB of memory"


def _total(costs: list[_Cost]) -> _Cost:
    training, evaluation, memory = zip(*costs, strict=True) if costs else ((0.0,), (0.0,), (0.0,))
    return _Cost(sum(training), sum(evaluation), max(memory))


def _stacked_cost(specs: list[RunSpec], study: StudyContext) -> _Cost:
    """The cost of stacks, measured by some updates, a validation and an evaluation of each kind of stack."""
    costs = []
    probed: dict[Any, _StackProbe] = {}
    for stack_specs in split_into_stacks(specs, study):
        plan, _ = study.plan(stack_specs[0])
        key = (repr(plan.model_config), plan.layout.global_batch, len(stack_specs), stack_specs[0].metrics)
        if key not in probed:
            probed[key] = _probe_stack(stack_specs, study)
        probe = probed[key]
        # Arms validate at different intervals; a plateau schedule may do it after every update.
        validations = sum(_num_validations(study.plan(spec)[0]) for spec in stack_specs)
        evaluation = (probe.validation * validations + probe.measurement * len(stack_specs)) / probe.num_threads
        costs.append(_Cost(probe.update * plan.num_updates, evaluation, probe.memory))
    return _total(costs)


class _StackProbe(NamedTuple):
    """Seconds of an update of a whole stack, and of a validation and an evaluation of one member on one core."""

    update: float
    validation: float
    measurement: float
    num_threads: int
    memory: float


def _probe_stack(specs: list[RunSpec], study: StudyContext) -> _StackProbe:
    members = [Member(*study.plan(spec), study.device) for spec in specs]
    plan = members[0].run.plan
    with worker_threads(study.device, len(specs)) as threads:
        stacks = ParallelStacks(members, study.device, threads)
        memory = 3.0 * sum(values.nbytes for stack in stacks.stacks for values in stack.weights)
        seconds = _seconds_per_update(partial(next, stacks.updates(), 0), plan.num_updates)
        memory += sum(map(_bytes_of, members))  # with optimizer states
        return _StackProbe(
            seconds, *_validation_and_measurement_seconds(members[0].run, specs[0]), threads.num_threads, memory
        )


def _num_validations(plan: Plan) -> int:
    return plan.num_updates // plan.validation_updates if plan.config.num_validation_images else 0


def _validation_and_measurement_seconds(run: RunState, spec: RunSpec) -> tuple[float, float]:
    """Seconds of a validation and of the final evaluation, measured with two sampling steps and extrapolated."""
    validation, started = 0.0, time.perf_counter()
    if run.validation is not None:
        run.validation_losses()
        validation = time.perf_counter() - started
    config, num_steps = run.config, run.config.num_inference_steps
    run.config = dataclasses.replace(config, num_inference_steps=min(2, num_steps))
    started = time.perf_counter()
    measure(run, spec, Curves(run.plan.num_updates))
    seconds = time.perf_counter() - started + run.sampling_seconds * (num_steps / min(2, num_steps) - 1)
    run.config = config
    return validation, seconds


def _seconds_per_update(do_update: Any, num_updates: int) -> float:
    times = []
    for _ in range(min(_PROBED_UPDATES, num_updates)):
        started = time.perf_counter()
        do_update()
        times.append(time.perf_counter() - started)
    return float(np.median(times[len(times) // 4 :]))


def _bytes_of(member: Member) -> float:
    """Memory of a member besides the weights and gradients of its stack."""
    run = member.run
    weights = sum(parameter.numel() * parameter.element_size() for parameter in run.model.parameters())
    return weights * len(run.averages) + optimizer_state_bytes(run.optimizer)


def _local_cost(specs: list[RunSpec], study: StudyContext) -> _Cost:
    """The cost of single runs, measured by some updates and an evaluation for each arm and data set."""
    probed: dict[Any, _Cost] = {}
    for spec in specs:
        key = (spec.arm, spec.dataset, spec.metrics)
        if key not in probed:
            plan, data = study.plan(spec)
            with tempfile.TemporaryDirectory() as folder:
                trainer = Trainer(plan, data, make_accelerator(plan.config), RunFolder(Path(folder)))
                batches = iterate_batches(data, plan.layout, 0, range(plan.num_updates))
                seconds = _seconds_per_update(
                    lambda trainer=trainer, rest=batches: trainer.do_update(next(rest)), plan.num_updates
                )
                validation, measurement = _validation_and_measurement_seconds(trainer.run, spec)
            evaluation = validation * _num_validations(plan) + measurement
            probed[key] = _Cost(seconds * plan.num_updates, evaluation, peak_memory_mb() * 2**20)
    return _total([probed[spec.arm, spec.dataset, spec.metrics] for spec in specs])
