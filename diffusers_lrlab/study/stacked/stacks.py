"""Stacks from start to finish: grouping of runs, training with saves in between, evaluation."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from ...core.errors import LabError
from ...core.files import remove
from ...models.mlp_denoiser import MLPDenoiser
from ...training.kinds import kind_of
from ...training.model import model_class_of
from ...training.stopping import InterruptGuard
from ..kind_settings import settings_of
from ..runs.context import StudyContext
from ..runs.measure import DRAWN, Drawn, record_run
from ..runs.progress import MEASURED, StudyProgress
from ..runs.stops import StudyInterrupted
from ..spec.spec import RunSpec
from .member import Member
from .sampling import draw_together
from .states import find_saved, save_states
from .worker_threads import ParallelStacks, WorkerThreads, worker_threads

_SAVE_SECONDS = 60.0


def not_stackable(spec: RunSpec, study: StudyContext) -> str | None:
    """The reason why a run cannot be part of a stack; `None` if it can."""
    if not settings_of(spec.config).is_stackable:
        return f"stacks need an MLPDenoiser on points, and its data are {kind_of(spec.config).name}"
    if spec.config.denoiser not in (None, "mlp"):
        return f"stacks need an MLPDenoiser, and its denoiser is {spec.config.denoiser!r}"
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


def run_stacked(specs: list[RunSpec], study: StudyContext) -> None:
    """Trains stackable runs in stacks of at most `study.stack_size`; interrupted stacks resume."""
    for stack in split_into_stacks(specs, study):
        while study.folder.missing(stack):
            with worker_threads(study.device, len(stack)) as threads:
                _run_stack(stack, study, threads)


def _run_stack(specs: list[RunSpec], study: StudyContext, threads: WorkerThreads) -> None:
    """Trains and evaluates runs of a stack without a result: all of them, or those that were saved together."""
    together, states, started = find_saved(study, specs)
    members = {spec.id: Member(*study.plan(spec), study.device) for spec in together}
    for run_id, state in states.items():
        members[run_id].run.update, members[run_id].error = state["update"], state["error"]
    # Finished members too, since a stack makes their optimizers and averages.
    stacks = ParallelStacks(list(members.values()), study.device, threads)
    stacks.load({members[run_id]: state for run_id, state in states.items()})
    study.progress.advance(sum(member.run.update for member in members.values()))
    name = hashlib.blake2b(" ".join(members).encode(), digest_size=8).hexdigest()

    def save() -> None:
        state = {run_id: member.state_dict() | {"sums": stacks.sums_of(member)} for run_id, member in members.items()}
        folder = save_states(state, name, max(member.run.update for member in members.values()), started, study)
        for path in saved():
            if path != folder:
                remove(path)

    def saved() -> list[Path]:
        return [*study.folder.stacks.glob(f"{name}-*")]

    def finish(spec: RunSpec) -> None:
        member = members[spec.id]
        executor = {"name": "stacked", "members": len(specs)}
        record_run(study, spec, member.run, member.curves, member.error, executor, started, drawn.get(spec.id))

    _train(stacks, save, study)
    save()
    drawn = _draw([(members[spec.id], spec) for spec in together], threads, study.progress)
    threads.map(finish, together)
    study.discard(*saved())


def _draw(runs: list[tuple[Member, RunSpec]], threads: WorkerThreads, progress: StudyProgress) -> dict[str, Drawn]:
    """Samples of the runs that have not diverged, by run id, computed step by step in a group per thread."""
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
