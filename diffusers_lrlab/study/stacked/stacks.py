"""Stacks from start to finish: grouping of runs, threads, training with saves in between, evaluation."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.errors import LabError
from ...core.files import atomic_folder, remove
from ...core.manifest import find_damage, write_manifest
from ...core.program import InterruptGuard
from ...models.mlp_denoiser import MLPDenoiser
from ...training.kinds import kind_of
from ...training.model import model_class_of
from ..context import StudyContext, StudyInterrupted
from ..kind_settings import settings_of
from ..measure import record_run
from ..spec.spec import RunSpec
from .member import Member
from .networks import draw_together
from .stack import Stack

_SAVE_SECONDS = 60.0
_STATE = "state.pt"
_CACHED_MEMBERS = 12  # of a stack on a CPU; more do not stay in its caches (`benchmarks/study_throughput.py`)
_SAVED_NAME = re.compile(r"\w+-[0-9]+")  # excludes temporary folders


def not_stackable(spec: RunSpec, study: StudyContext) -> str | None:
    """The reason why a run cannot be part of a stack; `None` if it can."""
    if not settings_of(spec.config).is_stackable:
        return f"stacks need an MLPDenoiser on points, and its data are {kind_of(spec.config).name}"
    if (model := model_class_of(spec.config)) is not MLPDenoiser:
        return f"stacks need an MLPDenoiser, and its model is a {model.__name__}"
    if spec.config.width_base is not None:
        return "stacks have one learning rate per run, and its --width_base gives it several"
    if spec.config.mixed_precision not in (None, "no"):
        return f"stacks compute in full precision, and it has mixed_precision {spec.config.mixed_precision}"
    data = study.data(spec)
    if data.held_out.conditions:
        return f"stacks have no conditions, and its model takes {', '.join(data.held_out.conditions)}"
    return "its points are not in memory" if data.in_memory is None else None


def check_stackable(specs: Iterable[RunSpec], study: StudyContext) -> None:
    """Raises a `LabError` for the first run that cannot be part of a stack, with the reason."""
    for spec in specs:
        if reason := not_stackable(spec, study):
            raise LabError(f"{spec.arm!r} on {spec.dataset!r} cannot be part of a stack: {reason}. Use --executor local.")


def split_into_stacks(
    specs: list[RunSpec], study: StudyContext, stack_size: int | None = None, num_threads: int | None = None
) -> Iterator[list[RunSpec]]:
    """
    Runs grouped into stacks of at most `stack_size`, by default the study's, for the threads of this process.

    The grouping depends on the study and the machine, not on finished runs, so that a resumed study computes the same.
    """
    stack_size = stack_size or study.stack_size
    num_threads = (num_threads or torch.get_num_threads()) if study.device.type == "cpu" else 1
    alike: dict[str, list[RunSpec]] = {}
    for spec in specs:
        plan, _ = study.plan(spec)
        config = plan.config
        process = [config.objective, config.objective_kwargs, plan.kind.is_bounded]
        key = json.dumps([plan.model_config, plan.layout.global_batch, process, plan.num_updates])
        alike.setdefault(key, []).append(spec)
    for some in alike.values():
        # Runs with equal draws are neighbours, so that a stack draws once for them.
        some = sorted(some, key=lambda spec: (spec.seed, spec.dataset))
        num_stacks = -(-len(some) // stack_size)
        size = -(-len(some) // num_stacks)
        size = min(-(-size // num_threads) * num_threads, stack_size)
        yield from (some[start : start + size] for start in range(0, len(some), size))


class ParallelStacks:
    """
    Members in stacks, computed by worker threads or, without them, in the thread of the caller. On a CPU a stack has few
    members, so that they stay in its caches; on a GPU there is one stack.
    """

    def __init__(self, members: list[Member], device: torch.device, threads: WorkerThreads | None = None):
        self._threads = threads or WorkerThreads(None, 1)
        num_threads = self._threads.num_threads
        turns = -(-len(members) // (num_threads * _CACHED_MEMBERS)) if device.type == "cpu" else 1
        num_stacks = min(num_threads * turns, len(members))
        edges = [len(members) * stack // num_stacks for stack in range(num_stacks + 1)]
        self.stacks = [Stack(members[start:end], device) for start, end in itertools.pairwise(edges)]

    def load(self, states: dict[Member, dict[str, Any]]) -> None:
        for stack in self.stacks:
            stack.load(states)

    def updates(self) -> Iterator[int]:
        """Trains until every member is done; yields the number of advanced members after each update."""
        loops = [stack.updates() for stack in self.stacks]
        while any(stack.members for stack in self.stacks):
            yield sum(self._threads.map(lambda loop: next(loop, 0), loops))


class WorkerThreads:
    """Runs a call per thread at a time, each on one core; one after the other without a pool."""

    def __init__(self, pool: ThreadPoolExecutor | None, num_threads: int):
        self._pool, self.num_threads = pool, num_threads

    def map(self, function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
        """The results in order; raises the first error."""
        return list(map(function, values) if self._pool is None else self._pool.map(function, values))


@contextmanager
def worker_threads(device: torch.device, num_members: int) -> Iterator[WorkerThreads]:
    """A worker for each thread of this process; a single member or a GPU has one worker."""
    num_threads = torch.get_num_threads()
    if device.type != "cpu" or num_threads == 1 or num_members == 1:
        yield WorkerThreads(None, 1)
        return
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(num_threads, "worker", torch.set_num_threads, (1,))
    try:
        yield WorkerThreads(pool, num_threads)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, do not start the rest
        torch.set_num_threads(num_threads)


def run_stacked(specs: list[RunSpec], study: StudyContext) -> None:
    """Trains stackable runs in stacks of at most `study.stack_size`; interrupted stacks resume."""
    for stack in split_into_stacks(specs, study):
        while study.folder.missing(stack):
            with worker_threads(study.device, len(stack)) as threads:
                _run_stack(stack, study, threads)


def _run_stack(specs: list[RunSpec], study: StudyContext, threads: WorkerThreads) -> None:
    """Trains and evaluates runs of a stack without a result: all of them, or those that were saved together."""
    together, states, started = _find_saved(study, specs)
    members = {spec.id: Member(*study.plan(spec), study.device) for spec in together}
    for run_id, state in states.items():
        members[run_id].run.update, members[run_id].error = state["update"], state["error"]
    # Finished members too, since a stack makes their averages.
    stacks = ParallelStacks(list(members.values()), study.device, threads)
    stacks.load({members[run_id]: state for run_id, state in states.items()})
    study.progress.advance(sum(member.run.update for member in members.values()))
    name = hashlib.blake2b(" ".join(members).encode(), digest_size=8).hexdigest()

    def saved() -> list[Path]:
        return [*study.folder.stacks.glob(f"{name}-*")]

    def save() -> None:
        folder = study.folder.stacks / f"{name}-{max(member.run.update for member in members.values())}"
        if not folder.exists():  # else it has these states
            states = {run_id: member.state_dict() for run_id, member in members.items()}
            with atomic_folder(folder) as temporary:
                torch.save({"members": states, "started": started}, temporary / _STATE)
                write_manifest(temporary)
        for path in saved():
            if path != folder:
                remove(path)

    def finish(spec: RunSpec) -> None:
        member = members[spec.id]
        executor = {"name": "stacked", "members": len(specs)}
        record_run(study, spec, member.run, member.curves, member.error, executor, started, drawn.get(spec.id))

    _train(stacks, save, study)
    save()
    drawn = _draw([(members[spec.id], spec) for spec in together], threads)
    threads.map(finish, together)
    for path in saved():
        remove(path)


def _find_saved(study: StudyContext, specs: list[RunSpec]) -> tuple[list[RunSpec], dict[str, dict[str, Any]], str]:
    """
    The saved runs that are furthest, their states by run id, and the time when they were started.

    They may be of any stack, since the grouping depends on the number of cores and on --stack_size. The other runs are
    computed after them.
    """
    specs = study.folder.missing(specs)
    wanted = {spec.id: study.data(spec).fingerprint for spec in specs}
    together, found, furthest = specs, dict[str, dict[str, Any]](), -1
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    for path in sorted(path for path in study.folder.stacks.glob("*") if _SAVED_NAME.fullmatch(path.name)):
        if damage := find_damage(path):
            if path.exists():  # else another worker has replaced it
                study.progress.log(f"{damage}: its runs start again.")
                remove(path)
            continue
        try:
            saved = torch.load(path / _STATE, weights_only=True, map_location="cpu", mmap=True)
        except (FileNotFoundError, RuntimeError):  # the latter from mmap
            if path.exists():
                raise
            continue  # another worker has replaced it
        members = saved["members"].items()
        states = {run_id: state for run_id, state in members if wanted.get(run_id) == state["data_fingerprint"]}
        update = max((state["update"] for state in states.values()), default=-1)
        if update > furthest:  # the runs of a file are at the same update, or done
            together = [spec for spec in specs if spec.id in states]
            furthest, found, started = update, states, saved["started"]
    return together, found, started


def _draw(runs: list[tuple[Member, RunSpec]], threads: WorkerThreads) -> dict[str, np.ndarray]:
    """Samples of the runs that have not diverged, by run id, computed step by step in a group per thread."""
    runs = [(member, spec) for member, spec in runs if member.error is None]
    drawn: dict[str, np.ndarray] = {}
    groups = [group for start in range(threads.num_threads) if (group := runs[start :: threads.num_threads])]
    steps = [draw_together(group, drawn) for group in groups]
    while any(threads.map(lambda step: next(step, False), steps)):
        pass  # signals are handled between steps
    return drawn


def _train(stacks: ParallelStacks, save: Callable[[], None], study: StudyContext) -> None:
    last_save = time.monotonic()
    with InterruptGuard() as guard:
        for num_advanced in stacks.updates():
            study.progress.advance(num_advanced)
            if signal_number := guard.received():
                save()
                raise StudyInterrupted(signal_number, study.folder.path)
            if time.monotonic() - last_save > _SAVE_SECONDS:
                save()
                last_save = time.monotonic()
