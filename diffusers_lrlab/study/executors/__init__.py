"""Executors: functions that compute those runs of a list that have no result yet. Each is a row here.

They get all runs, since stacks must be the same whatever is done already.
"""

from collections.abc import Callable

from ..runs.context import StudyContext
from ..spec.spec import RunSpec
from ..stacked.stacks import not_stackable, run_stacked
from .local import run_local

EXECUTORS: dict[str, Callable[[list[RunSpec], StudyContext], None]] = {"local": run_local, "stacked": run_stacked}


def share_out(specs: list[RunSpec], study: StudyContext, executor: str | None) -> list[tuple[str, list[RunSpec]]]:
    """
    Names in `EXECUTORS` and the runs of each: the one that was asked for, or stacks of all runs that can be stacked.

    Runs that cannot be stacked are logged with the reason.
    """
    if executor is not None:
        return [(executor, specs)]
    reasons = {spec.id: not_stackable(spec, study) for spec in specs}
    for reason in sorted({*filter(None, reasons.values())}):
        named = sorted({f"{spec.arm} on {spec.dataset}" for spec in specs if reasons[spec.id] == reason})
        study.progress.log(f"One by one, as they cannot be stacked ({reason}): {', '.join(named)}.")
    stacked = [spec for spec in specs if not reasons[spec.id]]
    local = [spec for spec in specs if reasons[spec.id]]
    return [(name, some) for name, some in (("stacked", stacked), ("local", local)) if some]
