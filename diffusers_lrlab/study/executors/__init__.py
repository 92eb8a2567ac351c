"""Executors: functions that compute those runs of a list that have no result yet. Each is a file, and a row here.

They get all runs, since stacks must be the same whatever is done already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..runs.study_data import StudyData
from ..spec.spec import RunSpec
from ..stacked.stacks import not_stackable
from .local import run_local
from .stacked import run_stacked

Executor = Callable[[list[RunSpec], StudyData], None]
EXECUTORS: dict[str, Executor] = {"local": run_local, "stacked": run_stacked}


def share_out(specs: Iterable[RunSpec], study: StudyData, executor: str | None) -> list[tuple[str, list[RunSpec]]]:
    """
    Which executor computes which runs: the one that was asked for, or stacks of all runs that can be stacked.

    Returns:
        `list`: of names in `EXECUTORS` and their runs. Runs that cannot be stacked are logged with the reason.
    """
    specs = list(specs)
    if executor is not None:
        return [(executor, specs)]
    reasons = {spec.id: not_stackable(spec, study) for spec in specs}
    alone = [spec for spec in specs if reasons[spec.id]]
    for reason in sorted({str(reasons[spec.id]) for spec in alone}):
        named = sorted({f"{spec.arm} on {spec.dataset}" for spec in alone if reasons[spec.id] == reason})
        study.progress.log(f"One by one, as they cannot be stacked ({reason}): {', '.join(named)}.")
    stacked = [spec for spec in specs if not reasons[spec.id]]
    return [(name, some) for name, some in (("stacked", stacked), ("local", alone)) if some]
