"""Stacks of runs from beginning to end: cut, trained, saved in between, measured."""

from __future__ import annotations

import hashlib
import json
import pickle
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import torch

from ...core.files import atomic_file
from ...core.signals import interrupts_raised
from ...training.interrupts import InterruptGuard
from ..executors.executors import StudyInterrupted
from ..runs.measure import finish, make_record
from ..runs.study_data import Bench
from ..spec.spec import RunSpec
from .member import Member
from .worker_threads import Lanes, SideBySide, side_by_side

_SAVE_SECONDS = 60.0


def cut(specs: list[RunSpec], bench: Bench) -> Iterator[list[RunSpec]]:
    """
    Stacks of runs that can be computed together.

    Which runs are together follows from the study and the machine, not from what is already done: a study that goes on
    after it was stopped computes what it would have computed.
    """
    alike: dict[str, list[RunSpec]] = {}
    for spec in specs:
        plan, _ = bench.plan(spec)
        config = plan.config
        key = json.dumps(
            [
                plan.model_config, plan.layout.global_batch, config.ddpm_num_steps, config.ddpm_beta_schedule,
                config.prediction_type, plan.num_updates,
            ]
        )  # fmt: skip
        alike.setdefault(key, []).append(spec)
    for some in alike.values():
        # Runs with the same draws side by side, which then are drawn once.
        some = sorted(some, key=lambda spec: (spec.seed, spec.dataset))
        num_stacks = -(-len(some) // bench.stack_size)
        size = -(-len(some) // num_stacks)
        num_lanes = torch.get_num_threads() if bench.device.type == "cpu" else 1
        size = min(-(-size // num_lanes) * num_lanes, bench.stack_size)
        yield from (some[start : start + size] for start in range(0, len(some), size))


def run_stack(specs: list[RunSpec], bench: Bench) -> None:
    """Trains and measures runs of a stack that have no result yet: all of them, or those that were saved together."""
    with side_by_side(bench.device, len(specs)) as lanes:
        _run_stack(specs, bench, lanes)


def _run_stack(specs: list[RunSpec], bench: Bench, lanes: SideBySide) -> None:
    saved = _Saved(bench, specs)
    wanted, started = saved.together, saved.started
    members = {spec.id: Member(*bench.plan(spec), bench.device) for spec in wanted}
    for run_id, state in saved.states.items():
        members[run_id].update, members[run_id].error = state["update"], state["error"]
    first = next(iter(members.values()))
    ways = saved.ways or bench.products(first.model, first.plan.layout.global_batch)
    # All of them once, also those that are done: it makes their optimizers and averages.
    stacks = Lanes(list(members.values()), bench.device, ways, lanes)
    stacks.load({members[run_id]: state for run_id, state in saved.states.items()})
    bench.advance(sum(member.update for member in members.values()))
    file = bench.stacks / f"{_stack_id(wanted)}.pt"

    def save() -> None:
        state = {run_id: member.state_dict(stacks.sums_of(member)) for run_id, member in members.items()}
        with atomic_file(file) as path:
            torch.save({"members": state, "ways": ways, "started": started}, path)

    _train(stacks, save, bench)
    save()
    executor = {"name": "stacked", "members": len(specs), "products": ways}
    with interrupts_raised(lambda number: StudyInterrupted(number, bench.folder.path)):
        lanes.map(lambda spec: _finish(spec, members[spec.id], executor, started, bench), wanted)
    file.unlink()


def _train(stacks: Lanes, save: Any, bench: Bench) -> None:
    last_save = time.monotonic()
    with InterruptGuard() as guard:
        for num_advanced in stacks.updates():
            bench.advance(num_advanced)
            if signal_number := guard.received():
                save()
                raise StudyInterrupted(signal_number, bench.folder.path)
            if time.monotonic() - last_save > _SAVE_SECONDS:
                save()
                last_save = time.monotonic()


def _finish(spec: RunSpec, member: Member, executor: dict[str, Any], started: str, bench: Bench) -> None:
    sections, error = finish(member, spec, member.curves, member.error)
    if error is None:
        bench.keep_weights(spec, member)
    bench.folder.write(make_record(spec, sections, error, executor, started, bench.meta))
    bench.finished(spec)


class _Saved:
    """
    What was saved of runs, whichever stacks they were in: these depend on the number of cores and on --stack_size.

    Args:
        bench ([`Bench`]): Has the folder, and the data that states must be of.
        specs (`list` of [`RunSpec`]): Runs to go on with, where they have no result yet.

    `together` are the runs that are furthest, and at one update; the others are done after them.
    """

    def __init__(self, bench: Bench, specs: list[RunSpec]):
        self.together = specs = bench.folder.missing(specs)
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.states: dict[str, dict[str, Any]] = {}
        self.ways: dict[str, str] | None = None
        wanted, furthest = {spec.id: bench.data(spec).fingerprint for spec in specs}, -1
        for file in sorted(bench.stacks.glob("*.pt")):
            try:
                saved = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
            except (RuntimeError, EOFError, pickle.UnpicklingError):  # what torch makes of a file that is cut or empty
                bench.say(f"{str(file)!r} is damaged: what was begun there is begun again.")
                file.unlink()
                continue
            members = saved["members"].items()
            states = {run_id: state for run_id, state in members if wanted.get(run_id) == state.get("data_fingerprint", "")}
            update = max((state["update"] for state in states.values()), default=-1)
            if update > furthest:  # those of one file are at one update, or done
                furthest, self.states, self.ways, self.started = update, states, saved["ways"], saved["started"]
                self.together = [spec for spec in specs if spec.id in states]


def _stack_id(specs: list[RunSpec]) -> str:
    return hashlib.blake2b(" ".join(spec.id for spec in specs).encode(), digest_size=8).hexdigest()
