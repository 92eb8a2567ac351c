"""Connects the functions that the table's rows name to a hook, once the trainer's modules are imported."""

import functools
from types import ModuleType
from typing import Any

from ...core.errors import LabError
from ..host.run import HostRun
from ..registration.register import forget, when_imported
from ..trainer_table import TrainerRow


def install(run: HostRun, rows: list[TrainerRow], shapes: ModuleType, hook: Any) -> None:
    """Replaces the functions of the rows of an option by their shapes, which act for a hook."""
    for row in rows:
        action = functools.partial(_wrap, run, row, functools.partial(getattr(shapes, row.shape), hook))
        when_imported(row.module, action)
        run.patches.callback(forget, row.module, action)
    run.on_parsed.append(functools.partial(_check_options, rows))


def _wrap(run: HostRun, row: TrainerRow, shape: Any, module: ModuleType) -> None:
    *classes, name = row.attribute.split(".")
    owner = functools.reduce(getattr, classes, module)
    run.patches.wrap(owner, name, shape)


def _check_options(rows: list[TrainerRow], arguments: Any) -> None:
    """An error for options of the trainer's own that would have no effect, or act twice."""
    for row in rows:
        for name, off in row.excludes.items():
            value = getattr(arguments, name, None)
            if value not in off:
                raise LabError(
                    f"--{row.option}: must be used without --{name} of {row.trainer}, got --{name} {value}. Hint: leave out "
                    "one of them."
                )
