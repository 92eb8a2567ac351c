"""What a study is going to do and to take, told before it does it."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..optimizers import optimizer_state_bytes
from ..training.core import RunCore
from .bench import Bench
from .executors import check_stackable, share_out
from .expansion import expand, expand_tuning
from .lanes import Lanes, side_by_side
from .measure import measure
from .member import Member
from .precision import products_in
from .probe import fastest_products
from .results import StudyFolder
from .run import check_executor, use_all_cores
from .spec import RunSpec, StudySpec
from .stacks import cut
from .summary import chosen_rates

_PROBED_UPDATES = 12


def describe_study(spec: StudySpec, executor: str | None, stack_size: int | None, out: Path | None = None) -> str:
    """
    The runs of a study that have no result in `out` yet and what they will take, as text; measures for some seconds.

    Raises:
        LabError: for everything that running it would refuse before it starts.
    """
    check_executor(executor)
    folder = StudyFolder(out or Path("study"))
    if out is not None:
        folder.check_is_study(spec.name)
    tuning, runs = expand_tuning(spec), expand(spec)
    if out is not None and spec.tune is not None and not folder.missing(tuning):
        runs = expand(spec, chosen_rates(spec, folder.results(tuning)))
    use_all_cores()
    bench = Bench(folder, stack_size, precision=spec.precision)
    if executor == "stacked":
        check_stackable([*tuning, *runs], bench)
    lines = [
        f"{spec.title}",
        f"  {len(spec.arms)} arms ({', '.join(spec.arms)}; baseline {spec.baseline}) x {len(spec.datasets)} data sets "
        f"({', '.join(spec.datasets)}) x {len(spec.seeds)} seeds = {len(runs)} runs",
    ]
    if tuning:
        lines.append(f"  before, {len(tuning)} runs to choose learning rates")
    together = _Cost()
    missing = bench.folder.missing([*tuning, *runs]) if out else [*tuning, *runs]
    if num_done := len(tuning) + len(runs) - len(missing):
        lines.append(f"  {num_done} of them are done already in {out}")
    for name, some in share_out(missing, bench, executor):
        updates = sum(bench.plan(run)[0].num_updates for run in some)
        with products_in(spec.precision, bench.device):
            cost = _stacked_cost(some, bench) if name == "stacked" else _local_cost(some, bench)
        lines.append(f"  {name}: {len(some)} runs, {updates:,} updates, {cost}")
        together += cost
    lines.append(f"  together {together}")
    return "\n".join(lines)


@dataclass
class _Cost:
    """Seconds, and bytes of the largest stack."""

    training: float = 0.0
    evaluation: float = 0.0
    memory: float = 0.0

    def __add__(self, other: _Cost) -> _Cost:
        memory = max(self.memory, other.memory)
        return _Cost(self.training + other.training, self.evaluation + other.evaluation, memory)

    def __str__(self) -> str:
        memory = f", {self.memory / 2**20:.0f} MiB of weights and what goes with them" if self.memory else ""
        return f"about {_duration(self.training)} of training and {_duration(self.evaluation)} of evaluation{memory}"


def _stacked_cost(specs: list[RunSpec], bench: Bench) -> _Cost:
    """By some updates and one evaluation of the first of all stacks that are alike."""
    total = _Cost()
    probed: dict[Any, _Cost] = {}
    for stack_specs in cut(specs, bench):
        plan, _ = bench.plan(stack_specs[0])
        key = (repr(plan.model_config), plan.layout.global_batch, len(stack_specs), stack_specs[0].metrics)
        if key not in probed:
            probed[key] = _probe_stack(stack_specs, bench)
        cost = probed[key]
        total += _Cost(cost.training * plan.num_updates, cost.evaluation * len(stack_specs), cost.memory)
    return total


def _probe_stack(specs: list[RunSpec], bench: Bench) -> _Cost:
    """Of an update of the whole stack, and of the evaluation of one member, of which a core each does one."""
    members = [Member(*bench.plan(spec), bench.device) for spec in specs]
    plan = members[0].plan
    with side_by_side(bench.device, len(specs)) as lanes:
        ways = fastest_products(members[0].model, plan.layout.global_batch, len(members))
        updates = Lanes(members, bench.device, ways, lanes).updates()
        seconds = _seconds_per_update(partial(next, updates, 0), plan.num_updates)
        evaluation = _evaluation_seconds(members[0], specs[0]) / lanes.num_lanes
    return _Cost(seconds, evaluation, sum(map(_bytes_of, members)))


def _evaluation_seconds(run: RunCore, spec: RunSpec) -> float:
    """Of a run: its validations, and a measurement whose samples are drawn in two steps instead of all."""
    seconds, started = 0.0, time.perf_counter()
    if run.validation is not None:
        run.validation_losses()
        validations = run.plan.num_updates // run.plan.validation_updates
        seconds += validations * (time.perf_counter() - started)
    config, num_steps = run.config, run.config.ddpm_num_inference_steps
    run.config = dataclasses.replace(config, ddpm_num_inference_steps=min(2, num_steps))
    started = time.perf_counter()
    measure(run, spec, {}, {})
    seconds += time.perf_counter() - started + run.sampling_seconds * (num_steps / min(2, num_steps) - 1)
    run.config = config
    return seconds


def _seconds_per_update(do_update: Any, num_updates: int) -> float:
    """Median of some updates, after the first ones."""
    times = []
    for _ in range(min(_PROBED_UPDATES, num_updates)):
        started = time.perf_counter()
        do_update()
        times.append(time.perf_counter() - started)
    return float(np.median(times[len(times) // 4 :]))


def _bytes_of(member: Member) -> float:
    weights = sum(parameter.numel() * parameter.element_size() for parameter in member.model.parameters())
    return weights * (3 if member.ema is not None else 2) + optimizer_state_bytes(member.optimizer)


def _local_cost(specs: list[RunSpec], bench: Bench) -> _Cost:
    """By some updates and one evaluation of a run of each arm on each data set."""
    from ..data.batches import iterate_batches
    from ..training.loop import Trainer
    from ..training.run import make_accelerator
    from ..training.run_folder import RunFolder

    probed: dict[Any, _Cost] = {}
    total = _Cost()
    for spec in specs:
        key = (spec.arm, spec.dataset, spec.metrics)
        plan, data = bench.plan(spec)
        if key not in probed:
            with tempfile.TemporaryDirectory() as folder:
                trainer = Trainer(plan, data, make_accelerator(plan.config), RunFolder(Path(folder)))
                batches = iterate_batches(data, plan.layout, 0, range(plan.num_updates))
                seconds = _seconds_per_update(partial(_update, trainer, batches), plan.num_updates)
                probed[key] = _Cost(seconds, _evaluation_seconds(trainer, spec))
        total += _Cost(probed[key].training * plan.num_updates, probed[key].evaluation)
    return total


def _update(trainer: Any, batches: Iterator[torch.Tensor]) -> None:
    trainer.do_update(next(batches))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
