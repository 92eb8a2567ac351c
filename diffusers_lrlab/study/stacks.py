"""Stacks of runs from beginning to end: cut, trained, saved in between, measured."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..files import atomic_file
from ..training.interrupts import InterruptGuard, interrupts_raised
from .bench import Bench
from .executors import StudyInterrupted
from .measure import diverged, make_record, measure
from .spec import RunSpec
from .stack import Member, Stack

_SAVE_SECONDS = 60.0


def cut(specs: list[RunSpec], bench: Bench) -> Iterator[list[RunSpec]]:
    """
    Stacks of runs that can be computed together.

    Which runs are together follows from the study alone, not from what is already done: a study that goes on after
    it was stopped computes what it would have computed.
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
        size = min(size + size % 2, bench.stack_size)  # threads share the members of a stack among them
        yield from (some[start : start + size] for start in range(0, len(some), size))


def run_stack(specs: list[RunSpec], bench: Bench) -> None:
    """Trains and measures the runs of a stack that have no result yet, and writes their results."""
    file = bench.stacks / f"{_stack_id(specs)}.pt"
    saved = _load(file)
    started = saved.get("started", datetime.now(UTC).isoformat(timespec="seconds"))
    states = saved.get("members", {})
    wanted = bench.folder.missing(specs)
    # A result that was there when the stack was saved, and is not now, has no state: its run is done after these.
    wanted = [spec for spec in wanted if spec.id in states] or wanted
    members = {spec.id: Member(*bench.plan(spec), bench.device) for spec in wanted}
    states = {run_id: state for run_id, state in states.items() if run_id in members}
    for run_id, state in states.items():
        members[run_id].update, members[run_id].error = state["update"], state["error"]
    first = next(iter(members.values()))
    ways = saved.get("ways") or bench.products(first.model, first.plan.layout.global_batch, len(specs))
    # All of them once, also those that are done: it makes their optimizers and averages.
    stack = Stack(list(members.values()), bench.device, ways)
    stack.load({members[run_id]: state for run_id, state in states.items()})
    bench.advance(sum(member.update for member in members.values()))

    def save() -> None:
        state = {run_id: member.state_dict(stack.sums_of(member)) for run_id, member in members.items()}
        with atomic_file(file) as path:
            torch.save({"members": state, "ways": ways, "started": started}, path)

    _train(stack, save, bench)
    save()
    executor = {"name": "stacked", "members": len(specs), "products": ways}
    with interrupts_raised(lambda number: StudyInterrupted(number, bench.folder.path)):
        for spec in wanted:
            _finish(spec, members[spec.id], executor, started, bench)
    file.unlink(missing_ok=True)


def _train(stack: Stack, save: Any, bench: Bench) -> None:
    last_save = time.monotonic()
    with InterruptGuard() as guard:
        for _ in stack.updates():
            bench.advance(stack.num_advanced)
            if signal_number := guard.received():
                save()
                raise StudyInterrupted(signal_number, bench.folder.path)
            if time.monotonic() - last_save > _SAVE_SECONDS:
                save()
                last_save = time.monotonic()


def _finish(spec: RunSpec, member: Member, executor: dict[str, Any], started: str, bench: Bench) -> None:
    curves = member.curves.to_dict()
    if member.error is None:
        sections = measure(member, spec, curves, member.curves.last_quality)
        bench.keep_weights(spec, member)
    else:
        sections = diverged(member, curves)
    bench.folder.write(make_record(spec, sections, member.error, executor, started, bench.meta))
    bench.finished(spec)


def _stack_id(specs: list[RunSpec]) -> str:
    return hashlib.blake2b(" ".join(spec.id for spec in specs).encode(), digest_size=8).hexdigest()


def _load(file: Path) -> dict[str, Any]:
    """What was saved of a stack; nothing if it is not there."""
    return torch.load(file, weights_only=True, map_location="cpu") if file.exists() else {}
