"""Profile of updates: a trace and a table by torch's profiler, with names for the parts of an update.

The methods of a trainer are wrapped in named ranges only while it is profiled, so that other runs pay nothing.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

from torch.profiler import profile, record_function, schedule
from tqdm.auto import tqdm

from ..core.errors import LabError, warn
from ..core.files import atomic_file
from ..core.words import counted
from .interrupts import InterruptGuard
from .trainer import Trainer

TRACE = "profile.json.gz"  # in `lrlab/`
# Updates before the profiled ones: without the profiler, for compilation, and while the profiler warms up.
_BEFORE, _WARM_UP = 5, 2
_ROWS = 25  # of the table


def check_profile(num_profiled: int | None, num_updates: int) -> None:
    """Raises a `LabError` if fewer updates are left than --profile needs."""
    most = num_updates - _BEFORE - _WARM_UP
    if num_profiled is None or num_profiled <= most:
        return
    remedy = f"Give {most} or less" if most > 0 else f"It takes {counted(_BEFORE + _WARM_UP + 1, 'update')} at least"
    raise LabError(
        f"--profile {num_profiled} begins after {counted(_BEFORE + _WARM_UP, 'update')}, but only {num_updates} are left "
        f"to do. {remedy}, or leave --profile out."
    )


def profiled_updates(trainer: Trainer, num: int) -> Iterator[int]:
    """`trainer.updates()`; the main process profiles `num` of them, writes a trace and prints a table."""
    if not trainer.accelerator.is_main_process:
        yield from trainer.updates()
        return
    with ranges_of(trainer):
        updates = trainer.updates()
        yield from islice(updates, _BEFORE)
        with profile(schedule=schedule(wait=0, warmup=_WARM_UP, active=num, repeat=1)) as profiler:
            for update in islice(updates, _WARM_UP + num):
                profiler.step()
                yield update
    path = trainer.folder.lab / TRACE
    try:
        with atomic_file(path) as temporary:
            profiler.export_chrome_trace(str(temporary))
    except (OSError, RuntimeError, MemoryError) as error:
        warn(f"No profile: {type(error).__name__}: {error}. Training continues.")
    else:
        said = f"{counted(num, 'update')}, which the profiler makes slower; their full trace is in {path}:"
        tqdm.write(f"{said}\n{_table(profiler, trainer)}")
    yield from updates


def _table(profiler: profile, trainer: Trainer) -> str:
    """The table of torch's profiler, with the parts of an update among the operators."""
    where = "cpu" if trainer.accelerator.device.type == "cpu" else "device"
    return profiler.key_averages().table(f"{where}_time_total", row_limit=_ROWS)


@contextmanager
def ranges_of(trainer: Trainer) -> Iterator[None]:
    """A block in which the work of the trainer is recorded under the name of its part; for nested parts, the outermost."""
    run, stepper, objective = trainer.run, trainer.stepper, trainer.run.objective
    doing: list[tuple[str, Any, str]] = [
        ("data", trainer, "batches"),
        ("data", trainer, "to_device"),
        *(("timesteps and noise", objective, name) for name in ("draw", "weights", "noise")),
        ("forward", run.process, "losses"),
        ("backward", stepper, "backward"),
        ("clip", stepper, "clip"),
        ("optimizer", stepper, "take_step"),
        ("EMA", run.average, "advance"),
        ("diagnostics", objective, "observe"),
        *(("diagnostics", trainer.log, name) for name in ("add", "write_row")),
        ("diagnostics", run, "check_schedules"),
        *(("validation, samples, checkpoints", trainer, name) for name in ("_at_boundary", "save")),
        ("waits", InterruptGuard, "received"),  # for other processes
    ]
    inside: list[str] = []
    with ExitStack() as restoring:
        for part, owner, name in doing:
            if owner is not None:
                work = getattr(owner, name)
                restoring.callback(*((setattr, owner, name, work) if name in vars(owner) else (delattr, owner, name)))
                setattr(owner, name, _recorded(part, work, inside))
        yield


def _recorded(part: str, work: Callable[..., Any], inside: list[str]) -> Callable[..., Any]:
    """The same work in a named range; for an iterator, the work for each value."""

    @contextmanager
    def recording() -> Iterator[None]:
        if inside:
            yield
            return
        inside.append(part)
        try:
            with record_function(part):
                yield
        finally:
            inside.pop()

    @functools.wraps(work)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with recording():
            result = work(*args, **kwargs)
        return values(result) if isinstance(result, Iterator) else result

    def values(iterator: Iterator[Any]) -> Iterator[Any]:
        end = object()
        while True:
            with recording():
                value = next(iterator, end)
            if value is end:
                return
            yield value

    return recorded
