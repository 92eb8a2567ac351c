"""Executors: functions that compute the missing runs of a list, in this process (`EXECUTORS`) or in workers.

They get all runs, because stacks must not depend on which runs are finished.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from ...core.environment import available_cores, require_extra
from ...core.errors import LabError
from ...core.plugins import loaded_plugins
from ...core.values import COUNT, Range
from ...core.words import counted
from ..runs.context import StudyContext
from ..spec.spec import RunSpec
from ..stacked.stacks import not_stackable, run_stacked
from .local import run_local
from .workers import Pool, RayWorkers, Setup, Workers

EXECUTORS: dict[str, Callable[[list[RunSpec], StudyContext], None]] = {"local": run_local, "stacked": run_stacked}
WORKERS = ("pool", "ray")  # executors that compute runs in other processes


def check_executor(executor: str | None, stack_size: int | None = None, num_workers: int | None = None) -> None:
    """Raises a `LabError` for an unknown executor, and for options that do not apply to it."""
    known = (*EXECUTORS, *WORKERS)
    if executor is not None and executor not in known:
        raise LabError(f"There is no executor {executor!r}. Known: {', '.join(known)}.")
    COUNT.check("--stack_size", stack_size, "it is the number of runs that are computed together")
    if num_workers is not None and executor not in WORKERS:
        raise LabError(f"--workers {num_workers} has no effect without --executor {' or '.join(WORKERS)}.")
    most = available_cores() if executor == "pool" else None
    allowed = Range(f"[1, {most}]", whole=True) if most else COUNT
    allowed.check("--workers", num_workers, f"this machine has {counted(most, 'core')}" if most else "each is a process")
    if executor == "ray":
        require_extra("ray", "--executor ray")


@contextmanager
def open_workers(executor: str | None, num_workers: int | None, study: StudyContext) -> Iterator[Workers | None]:
    """The workers of pool and ray, inside this block; `None` for other executors."""
    if executor not in WORKERS:
        yield None
        return
    plugins = ",".join(plugin["name"] for plugin in loaded_plugins())
    setup = Setup(study.folder.path.resolve(), study.precision, plugins)
    with closing((Pool if executor == "pool" else RayWorkers)(setup, num_workers)) as workers:
        yield workers


def assign_executors(specs: list[RunSpec], study: StudyContext, executor: str | None) -> list[tuple[str, list[RunSpec]]]:
    """
    Names in `EXECUTORS` and the runs of each: the requested one, or by default stacks of all runs that can be stacked.

    The reason why runs cannot be stacked is logged. Workers follow the default, or with a stack size of 1 compute each run
    separately.
    """
    if executor in EXECUTORS:
        return [(executor, specs)]
    if executor in WORKERS and study.stack_size == 1:
        return [("local", specs)]
    reasons = {spec.id: not_stackable(spec, study) for spec in specs}
    for reason in sorted({*filter(None, reasons.values())}):
        named = sorted({f"{spec.arm} on {spec.dataset}" for spec in specs if reasons[spec.id] == reason})
        study.progress.log(f"Not stacked ({reason}): {', '.join(named)}.")
    stacked = [spec for spec in specs if not reasons[spec.id]]
    local = [spec for spec in specs if reasons[spec.id]]
    return [(name, some) for name, some in (("stacked", stacked), ("local", local)) if some]
