"""Stacks of runs from beginning to end: which runs make a stack, training, saving in between, measuring."""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ...core.errors import LabError
from ...core.files import atomic_folder, remove
from ...core.manifest import find_damage, write_manifest
from ...models.mlp_denoiser import MLPDenoiser
from ...training.interrupts import InterruptGuard
from ...training.kinds.select import kind_of
from ...training.model import model_class_of
from ..kind_settings import settings_of
from ..runs.context import StudyContext
from ..runs.measure import DRAWN, Drawn, record_run
from ..runs.progress import MEASURED, StudyProgress
from ..runs.stops import StudyInterrupted
from ..spec.spec import RunSpec
from .member import Member
from .sampling import draw_together
from .worker_threads import ParallelStacks, WorkerThreads, worker_threads

_SAVE_SECONDS = 60.0
_STATE = "state.pt"
_NAME = re.compile(r"\w+-\d+")  # not of what was put aside


def not_stackable(spec: RunSpec, study: StudyContext) -> str | None:
    """Why a run cannot be part of a stack; `None` if it can."""
    if not settings_of(spec.config).is_stackable:
        return f"stacks are of MLPDenoisers on points, and these are {kind_of(spec.config).name}"
    if spec.config.denoiser not in (None, "mlp"):
        return f"stacks are of MLPDenoisers, and this is the denoiser {spec.config.denoiser!r}"
    if (model := model_class_of(spec.config)) is not MLPDenoiser:
        return f"stacks are of MLPDenoisers, and its model is a {model.__name__}"
    if spec.config.lora_rank is not None:
        return "stacks train all weights, and this trains a LoRA"
    if spec.config.mixed_precision not in (None, "no"):
        return f"stacks have one precision, and this has mixed_precision {spec.config.mixed_precision}"
    data = study.data(spec)
    if data.held_out.conditions:
        return f"stacks are of networks without conditions, and its model takes {', '.join(data.held_out.conditions)}"
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
    Stacks of runs that can be computed together, of the study's size at most, for as many threads as this process has.

    Which runs are together follows from the study and the machine, not from what is already done: a study that goes on
    after it was stopped computes what it would have computed.
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
        # Runs with the same draws side by side, which then are drawn once.
        some = sorted(some, key=lambda spec: (spec.seed, spec.dataset))
        num_stacks = -(-len(some) // stack_size)
        size = -(-len(some) // num_stacks)
        size = min(-(-size // num_threads) * num_threads, stack_size)
        yield from (some[start : start + size] for start in range(0, len(some), size))


def run_stacked(specs: list[RunSpec], study: StudyContext) -> None:
    """Trains runs that can be stacked side by side, in stacks of `study.stack_size`; one that was interrupted goes on."""
    for stack in split_into_stacks(specs, study):
        while study.folder.missing(stack):
            with worker_threads(study.device, len(stack)) as threads:
                _run_stack(stack, study, threads)


def _run_stack(specs: list[RunSpec], study: StudyContext, threads: WorkerThreads) -> None:
    """Trains and measures runs of a stack that have no result yet: all of them, or those that were saved together."""
    together, states, started = _find_saved(study, specs)
    members = {spec.id: Member(*study.plan(spec), study.device) for spec in together}
    for run_id, state in states.items():
        members[run_id].run.update, members[run_id].error = state["update"], state["error"]
    # All of them once, also those that are done: it makes their optimizers and averages.
    stacks = ParallelStacks(list(members.values()), study.device, threads)
    stacks.load({members[run_id]: state for run_id, state in states.items()})
    study.progress.advance(sum(member.run.update for member in members.values()))
    ids = " ".join(members).encode()
    name = hashlib.blake2b(ids, digest_size=8).hexdigest()

    def save() -> None:
        state = {run_id: member.state_dict() | {"sums": stacks.sums_of(member)} for run_id, member in members.items()}
        folder = study.folder.stacks / f"{name}-{max(member.run.update for member in members.values())}"
        if not folder.exists():  # else this very state
            with atomic_folder(folder) as temporary:
                torch.save({"members": state, "started": started}, temporary / _STATE)
                write_manifest(temporary)
        for path in saved():
            if path != folder:
                remove(path)

    def saved() -> list[Path]:
        return [*study.folder.stacks.glob(f"{name}-*")]

    def finish(spec: RunSpec) -> None:
        member, executor = members[spec.id], {"name": "stacked", "members": len(specs)}
        record_run(study, spec, member.run, member.curves, member.error, executor, started, drawn.get(spec.id))

    _train(stacks, save, study)
    save()
    drawn = _draw([(members[spec.id], spec) for spec in together], threads, study.progress)
    threads.map(finish, together)
    study.discard(*saved())


def _draw(runs: list[tuple[Member, RunSpec]], threads: WorkerThreads, progress: StudyProgress) -> dict[str, Drawn]:
    """What is drawn of runs that have not diverged, by their ids: in as many groups as there are threads, step by step."""
    runs = [(member, spec) for member, spec in runs if member.error is None]
    drawn: dict[str, Drawn] = {}
    groups = [group for start in range(threads.num_threads) if (group := runs[start :: threads.num_threads])]
    steps = [draw_together(group, drawn) for group in groups]
    while any(shares := threads.map(lambda step: next(step, 0.0), steps)):
        num_drawn = sum(share * len(group) for share, group in zip(shares, groups, strict=True))
        progress.advance(DRAWN * num_drawn, MEASURED)
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


# Runs that are at one update, their states there, and when they were started.
_Saved = tuple[list[RunSpec], dict[str, dict[str, Any]], str]


def _find_saved(study: StudyContext, specs: list[RunSpec]) -> _Saved:
    """
    The runs that are furthest, whichever stack they were in: stacks depend on the number of cores and on --stack_size.

    The others are computed after them.
    """
    specs = study.folder.missing(specs)
    furthest = -1
    found: _Saved = (specs, {}, datetime.now(UTC).isoformat(timespec="seconds"))
    wanted = {spec.id: study.data(spec).fingerprint for spec in specs}
    for path in sorted(path for path in study.folder.stacks.glob("*") if _NAME.fullmatch(path.name)):
        try:
            saved, damage = _load(path)
        except FileNotFoundError:
            continue  # another worker has it, and has saved anew
        if damage is not None and path.exists():
            study.progress.log(f"{damage}: its runs start again.")
            remove(path)
        if damage is not None:
            continue
        members = saved["members"].items()
        states = {run_id: state for run_id, state in members if wanted.get(run_id) == state["data_fingerprint"]}
        update = max((state["update"] for state in states.values()), default=-1)
        if update > furthest:  # those of one file are at one update, or done
            together = [spec for spec in specs if spec.id in states]
            furthest, found = update, (together, states, saved["started"])
    return found


def _load(path: Path) -> tuple[dict[str, Any], str | None]:
    """The saved state of a stack, and a description of any damage."""
    if damage := find_damage(path):
        return {}, damage
    return torch.load(path / _STATE, weights_only=True, map_location="cpu", mmap=True), None
