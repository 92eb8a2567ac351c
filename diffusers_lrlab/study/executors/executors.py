"""Executors: functions from specifications of runs to files of results.

`stacked` computes runs side by side, `local` one after the other by the ordinary trainer. Another one, on a cluster say, is
one more function of this signature in `EXECUTORS`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import DiskFull, Diverged, Interrupted, LabError
from ...core.files import write_text
from ...core.signals import interrupts_raised
from ..runs.curves import Curves
from ..runs.measure import finish, make_record
from ..runs.study_data import Bench
from ..spec.spec import RunSpec

if TYPE_CHECKING:
    from ...training.run_folder import RunFolder

Executor = Callable[[list[RunSpec], Bench], None]


def run_local(specs: list[RunSpec], bench: Bench) -> None:
    """
    Each run by itself, by the trainer of `train_ddpm.py`, with its checkpoints; a run that was cut short goes on.

    Raises:
        Interrupted: after SIGINT or SIGTERM, with a checkpoint written.
    """
    from accelerate.state import AcceleratorState, GradientState

    from ...training.prepare import make_accelerator
    from ...training.trainer import Trainer

    for spec in specs:
        # accelerate keeps one precision for the whole process.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        path = bench.folder.path / "local" / spec.id
        started = datetime.now(UTC).isoformat(timespec="seconds")
        plan, data = bench.plan(spec, str(path))
        folder = _folder_for(path, data.fingerprint)
        trainer = Trainer(plan, data, make_accelerator(plan.config), folder)
        if checkpoints := folder.checkpoints():
            trainer.resume(checkpoints[-1])
        bench.advance(trainer.update)
        error = None
        try:
            for _ in trainer.updates(show_progress=False):
                bench.advance(1)
        except Diverged as reason:
            error = str(reason).partition(":")[0] + "."
            bench.advance(plan.num_updates - trainer.update)
        sections, error = finish(trainer, spec, _curves_of(folder, plan.num_updates), error)
        if error is None:
            bench.keep_weights(spec, trainer)
        bench.folder.write(make_record(spec, sections, error, {"name": "local"}, started, bench.meta))
        bench.finished(spec)
        trainer.accelerator.free_memory()
        shutil.rmtree(path, ignore_errors=True)  # a run that diverges at once has none


def _folder_for(path: Path, data_fingerprint: str) -> RunFolder:
    """The folder of a run, empty if what lies there was learned from other data."""
    from ...training.run_folder import RunFolder

    note = path / "data_fingerprint"
    if path.exists() and not (note.exists() and note.read_text(encoding="utf-8") == data_fingerprint):
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    write_text(note, data_fingerprint)
    return RunFolder(path)


def _curves_of(folder: Any, num_updates: int) -> Curves:
    """From the log of a run."""
    curves = Curves(num_updates)
    for row in folder.read_metrics():
        if "loss" in row:
            curves.add_loss(row["update"], row["loss"], row["lr"], row.get("beta1"))
        else:
            curves.add_quality(row["update"], {key: value for key, value in row.items() if key != "update"})
    return curves


def run_stacked(specs: list[RunSpec], bench: Bench) -> None:
    """
    Runs side by side, in stacks of `bench.stack_size`; a stack that was cut short goes on.

    Raises:
        LabError: if one of them cannot be part of a stack; it says which and why.
        Interrupted: after SIGINT or SIGTERM, with everything saved.
    """
    from ..stacked.stacks import cut, run_stack

    check_stackable(specs, bench)
    for stack in cut(specs, bench):
        while bench.folder.missing(stack):
            run_stack(stack, bench)


EXECUTORS: dict[str, Executor] = {"local": run_local, "stacked": run_stacked}


def check_stackable(specs: Iterable[RunSpec], bench: Bench) -> None:
    """Raises a `LabError` for the first run that cannot be part of a stack, with the reason."""
    for spec in specs:
        if reason := bench.not_stackable(spec):
            raise LabError(f"{spec.arm!r} on {spec.dataset!r} cannot be part of a stack: {reason}. Use --executor local.")


def share_out(specs: Iterable[RunSpec], bench: Bench, executor: str | None) -> list[tuple[str, list[RunSpec]]]:
    """
    Which executor does which runs: the one that was asked for, or stacks of all that can be part of one.

    Returns:
        `list`: of names in `EXECUTORS` and their runs. The runs that cannot be stacked are told, with the reason.
    """
    specs = list(specs)
    if executor is not None:
        return [(executor, specs)]
    reasons = {spec.id: bench.not_stackable(spec) for spec in specs}
    alone = [spec for spec in specs if reasons[spec.id]]
    for reason in sorted({str(reasons[spec.id]) for spec in alone}):
        named = sorted({f"{spec.arm} on {spec.dataset}" for spec in alone if reasons[spec.id] == reason})
        bench.say(f"One by one, as they cannot be stacked ({reason}): {', '.join(named)}.")
    stacked = [spec for spec in specs if not reasons[spec.id]]
    return [(name, some) for name, some in (("stacked", stacked), ("local", alone)) if some]


class StudyInterrupted(Interrupted):
    """
    A study that was asked to stop and has saved itself.

    Args:
        signal_number (`int`): 2 for Ctrl-C, 15 for SIGTERM.
        folder (`Path`): Of the study.
    """

    def __init__(self, signal_number: int, folder: Path):
        super().__init__(signal_number, folder)
        self.args = (f"Stopped. Give the same command again to go on: everything that is done is in {str(folder)!r}.",)


@contextmanager
def stops_explained(folder: Path) -> Iterator[None]:
    """Says how a study goes on after SIGINT, SIGTERM and a full disk inside this block, whoever in it notices them."""
    try:
        with interrupts_raised(lambda number: StudyInterrupted(number, folder)):
            yield
    except Interrupted as interruption:
        raise StudyInterrupted(interruption.signal_number, folder) from None
    except DiskFull as full:
        raise LabError(f"{full.event} then give the same command again to go on: what is done is kept.") from full
