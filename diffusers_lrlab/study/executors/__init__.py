"""Executors: functions that compute those runs of a list that have no result yet, here (`EXECUTORS`) or by workers.

They get all runs, since stacks must be the same whatever is done already.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from ...core.environment import available_cores
from ...core.errors import LabError
from ...core.extras import require_extra
from ...core.plugins import loaded_plugins
from ...core.ranges import COUNT, Range
from ..runs.context import StudyContext
from ..spec.spec import RunSpec
from ..stacked.stacks import not_stackable, run_stacked
from .jobs import Workers
from .local import run_local
from .worker import Setup

EXECUTORS: dict[str, Callable[[list[RunSpec], StudyContext], None]] = {"local": run_local, "stacked": run_stacked}
WORKERS = ("pool", "ray")  # executors whose runs are computed by other processes


def check_executor(
    executor: str | None, stack_size: int | None = None, num_workers: int | None = None, address: str | None = None
) -> None:
    """Raises a `LabError` for an unknown executor, and for options that it does not have."""
    known = (*EXECUTORS, *WORKERS)
    if executor is not None and executor not in known:
        raise LabError(f"There is no executor {executor!r}. Known: {', '.join(known)}.")
    COUNT.check("--stack_size", stack_size, "it is the number of runs that are computed together")
    if num_workers is not None and executor not in WORKERS:
        raise LabError(f"--workers {num_workers} has no effect without --executor {' or '.join(WORKERS)}.")
    if address is not None and executor != "ray":
        raise LabError(f"--address {address} has no effect without --executor ray.")
    most = available_cores() if executor == "pool" else None
    allowed = Range(f"[1, {most}]", whole=True) if most else COUNT
    allowed.check("--workers", num_workers, f"the cores here are {most}" if most else "each is a process")
    if executor == "ray":
        require_extra("ray", "--executor ray")


@contextmanager
def open_workers(
    executor: str | None, num_workers: int | None, address: str | None, study: StudyContext
) -> Iterator[Workers | None]:
    """The workers of an executor that has such, inside this block; `None` for others."""
    if executor not in WORKERS:
        yield None
        return
    from .pool import Pool
    from .ray_cluster import RayWorkers

    plugins = ",".join(plugin["name"] for plugin in loaded_plugins())
    setup = Setup(study.folder.path.resolve(), study.precision, plugins)
    with closing(Pool(setup, num_workers) if executor == "pool" else RayWorkers(setup, num_workers, address)) as workers:
        yield workers


def assign_executors(specs: list[RunSpec], study: StudyContext, executor: str | None) -> list[tuple[str, list[RunSpec]]]:
    """
    Names in `EXECUTORS` and the runs of each: the one that was asked for, or stacks of all runs that can be stacked.

    Runs that cannot be stacked are logged with the reason. Workers do as the default does, and with a stack size of 1 each
    run by itself.
    """
    if executor in EXECUTORS:
        return [(executor, specs)]
    if executor in WORKERS and study.stack_size == 1:
        return [("local", specs)]
    reasons = {spec.id: not_stackable(spec, study) for spec in specs}
    for reason in sorted({*filter(None, reasons.values())}):
        named = sorted({f"{spec.arm} on {spec.dataset}" for spec in specs if reasons[spec.id] == reason})
        study.progress.log(f"One by one, as they cannot be stacked ({reason}): {', '.join(named)}.")
    stacked = [spec for spec in specs if not reasons[spec.id]]
    local = [spec for spec in specs if reasons[spec.id]]
    return [(name, some) for name, some in (("stacked", stacked), ("local", local)) if some]
