"""What a study is going to do and to take, told before it does it."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from ..optimizers import optimizer_state_bytes
from .bench import Bench
from .executors import check_stackable, share_out
from .expansion import expand, expand_tuning
from .probe import fastest_products
from .results import StudyFolder
from .run import check_executor, use_all_cores
from .spec import RunSpec, StudySpec
from .stack import Member, Stack
from .stacks import cut

_PROBED_UPDATES = 12


def describe_study(spec: StudySpec, executor: str | None, stack_size: int | None) -> str:
    """
    The runs of a study and what they will take, as text; measures for some seconds.

    Raises:
        LabError: for everything that running it would refuse before it starts.
    """
    check_executor(executor)
    tuning, runs = expand_tuning(spec), expand(spec)
    use_all_cores()
    bench = Bench(StudyFolder(Path("study")), stack_size, precision=spec.precision)
    if executor == "stacked":
        check_stackable([*tuning, *runs], bench)
    lines = [
        f"{spec.title}",
        f"  {len(spec.arms)} arms ({', '.join(spec.arms)}; baseline {spec.baseline}) x {len(spec.datasets)} data sets "
        f"({', '.join(spec.datasets)}) x {len(spec.seeds)} seeds = {len(runs)} runs",
    ]
    if tuning:
        lines.append(f"  before, {len(tuning)} runs to choose learning rates")
    total, most_memory = 0.0, 0.0
    for name, some in share_out([*tuning, *runs], bench, executor):
        updates = sum(bench.plan(run)[0].num_updates for run in some)
        seconds, memory = _stacked_cost(some, bench) if name == "stacked" else _local_cost(some, bench)
        total, most_memory = total + seconds, max(most_memory, memory)
        lines.append(f"  {name}: {len(some)} runs, {updates:,} updates, about {_duration(seconds)} of training")
    lines.append(f"  together about {_duration(total)} of training; evaluation comes on top")
    if most_memory:
        lines.append(f"  weights, gradients, optimizer and EMA of the largest stack take {most_memory / 2**20:.0f} MiB")
    return "\n".join(lines)


def _stacked_cost(specs: list[RunSpec], bench: Bench) -> tuple[float, float]:
    """Seconds of training and bytes, by some updates of the first of all stacks that are alike."""
    seconds, most_memory = 0.0, 0.0
    rates: dict[Any, float] = {}
    for stack_specs in cut(specs, bench):
        plan, _ = bench.plan(stack_specs[0])
        key = (repr(plan.model_config), plan.layout.global_batch, len(stack_specs))
        if key not in rates:
            members = [Member(*bench.plan(spec), bench.device) for spec in stack_specs]
            ways = fastest_products(members[0].model, plan.layout.global_batch, len(members))
            stack = Stack(members, bench.device, ways)
            rates[key] = _seconds_per_update(stack.do_update)
            most_memory = max(most_memory, sum(map(_bytes_of, members)))
        seconds += rates[key] * plan.num_updates
    return seconds, most_memory


def _seconds_per_update(do_update: Any) -> float:
    """Median of some updates, after the first ones."""
    times = []
    for _ in range(_PROBED_UPDATES):
        started = time.perf_counter()
        do_update()
        times.append(time.perf_counter() - started)
    return float(np.median(times[_PROBED_UPDATES // 4 :]))


def _bytes_of(member: Member) -> float:
    weights = sum(parameter.numel() * parameter.element_size() for parameter in member.model.parameters())
    return weights * (3 if member.ema is not None else 2) + optimizer_state_bytes(member.optimizer)


def _local_cost(specs: list[RunSpec], bench: Bench) -> tuple[float, float]:
    """Seconds of training, by some updates of one run of each arm on each data set."""
    from ..data.batches import iterate_batches
    from ..training.loop import Trainer
    from ..training.run import make_accelerator
    from ..training.run_folder import RunFolder

    rates: dict[Any, float] = {}
    seconds = 0.0
    for spec in specs:
        key = (spec.arm, spec.dataset)
        plan, data = bench.plan(spec)
        if key not in rates:
            with tempfile.TemporaryDirectory() as folder:
                trainer = Trainer(plan, data, make_accelerator(plan.config), RunFolder(Path(folder)))
                batches = iterate_batches(data, plan.layout, 0, range(min(_PROBED_UPDATES, plan.num_updates)))
                rates[key] = _seconds_per_update(lambda: trainer.do_update(next(batches)))  # noqa: B023  # called at once
        seconds += rates[key] * plan.num_updates
    return seconds, 0.0


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
