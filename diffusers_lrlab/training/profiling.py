"""Where the time of updates goes: a trace by torch's profiler, and a table of its parts, host against device.

The ranges are put around what a trainer does while it is profiled only, so that they cost nothing in any other run.
"""

import functools
import gzip
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from torch.profiler import profile, record_function, schedule
from tqdm.auto import tqdm

from ..core.errors import LabError, warn
from ..core.files import atomic_file
from ..core.words import counted
from .interrupts import InterruptGuard
from .trainer import Trainer

TRACE = "profile.json.gz"  # in `lrlab/`
# Updates before those that are profiled: without the profiler, which also tells of compiling, and while it warms up itself.
_BEFORE, _WARM_UP = 5, 2
_BETWEEN = "validation, samples, checkpoints"
PARTS = (
    *("data", "timesteps and noise", "forward", "backward", "clip", "optimizer", "EMA", "diagnostics"),
    *(_BETWEEN, "waits", "other"),
)
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


def check_profile(num_profiled: int | None, num_updates: int) -> None:
    """Raises a `LabError` for a run with fewer updates, of those that are left, than are to be profiled."""
    most = num_updates - _BEFORE - _WARM_UP
    if num_profiled is None or num_profiled <= most:
        return
    remedy = f"Give {most} or less" if most > 0 else f"It takes {counted(_BEFORE + _WARM_UP + 1, 'update')} at least"
    raise LabError(
        f"--profile {num_profiled} begins after {counted(_BEFORE + _WARM_UP, 'update')}, and only {num_updates} are to be "
        f"done. {remedy}, or leave --profile out."
    )


def profiled_updates(trainer: Trainer, num: int) -> Iterator[int]:
    """`trainer.updates()`, of which the main process profiles `num`: it writes a trace and prints a table."""
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
        rows = rows_of(save_trace(profiler, path))
    except (OSError, LookupError, MemoryError) as error:
        warn(f"No profile: {type(error).__name__}: {error}. Training goes on.")
    else:
        tqdm.write(
            f"{counted(num, 'update')}, which the profiler makes slower; all that they did is in {path}:\n{table(rows)}"
        )
    yield from updates


@contextmanager
def ranges_of(trainer: Trainer) -> Iterator[None]:
    """What the trainer does in this block is recorded by the names of `PARTS`; only the outermost where they are nested."""
    step, objective = trainer.step, trainer.objective
    doing: list[tuple[str, Any, str]] = [
        ("data", trainer, "batches"),
        ("data", trainer, "to_device"),
        *(("timesteps and noise", objective, name) for name in ("draw", "weights", "noise")),
        ("forward", trainer.process, "losses"),
        ("backward", step, "backward"),
        ("clip", step, "clip"),
        ("optimizer", step, "take_step"),
        ("EMA", trainer.average, "step"),
        ("diagnostics", objective, "observe"),
        ("diagnostics", trainer.observer, "add"),
        *(("diagnostics", trainer, name) for name in ("check_schedules", "log_row")),
        *((_BETWEEN, trainer, name) for name in ("_at_boundary", "save")),
        ("waits", InterruptGuard, "received"),  # for the other processes
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
    """The same work, as a range; of work that yields, what is done until the next value."""

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


def save_trace(profiler: Any, path: Path) -> list[dict[str, Any]]:
    """Writes the trace for Perfetto or chrome://tracing; returns its events."""
    with atomic_file(path) as temporary:
        plain = temporary.with_suffix("")
        profiler.export_chrome_trace(str(plain))
        text = plain.read_bytes()
        plain.unlink()
        temporary.write_bytes(gzip.compress(text, compresslevel=1))
    return json.loads(text)["traceEvents"]


def rows_of(events: list[dict[str, Any]]) -> dict[str, tuple[float, float | None]]:
    """
    Milliseconds of an update by part, in the order of [`PARTS`], and of "the update": of the host, and of what the device
    does that was launched meanwhile; `None` for the latter if there is no device.

    Where the host waits for the device counts as "waits" alone. "the update" of the device is the time in which it is busy.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    steps = [event for event in spans if event["name"].startswith("ProfilerStep#") and event["cat"] == "user_annotation"]
    start, end, thread = steps[0]["ts"], max(step["ts"] + step["dur"] for step in steps), steps[0]["tid"]
    spans = [event for event in spans if start <= event["ts"] < end]
    ranges = sorted(
        (event["ts"], event["dur"], event["name"])
        for event in spans
        if event["cat"] == "user_annotation" and event["tid"] == thread and event["name"] in PARTS
    )
    starts = [begun for begun, *_ in ranges]

    def part_at(moment: float) -> str:
        begun, took, part = ranges[place] if (place := bisect_right(starts, moment) - 1) >= 0 else (0.0, 0.0, "other")
        return part if moment < begun + took else "other"

    host, device = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
    for _, took, part in ranges:
        host[part] += took
    host["other"] = sum(step["dur"] for step in steps) - sum(host.values())
    for event in spans:
        if event["cat"] in _LAUNCHES and event["tid"] == thread and "Synchronize" in event["name"]:
            host[part_at(event["ts"])] -= event["dur"]
            host["waits"] += event["dur"]
    launched = {event["args"]["correlation"]: event["ts"] for event in spans if event["cat"] in _LAUNCHES}
    work = [event for event in events if event.get("cat") in _ON_DEVICE and event["args"].get("correlation") in launched]
    for event in work:
        device[part_at(launched[event["args"]["correlation"]])] += event["dur"]
    scale = 1e-3 / len(steps)
    rows = {part: (host[part] * scale, device[part] * scale if work else None) for part in PARTS}
    whole = sum(step["dur"] for step in steps) * scale
    return rows | {"the update": (whole, _busy(work) * scale if work else None)}


def _busy(work: list[dict[str, Any]]) -> float:
    """Microseconds in which a device does any of this."""
    busy, until = 0.0, 0.0
    for event in sorted(work, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        busy += max(0.0, end - max(until, event["ts"]))
        until = max(until, end)
    return busy


def table(rows: dict[str, tuple[float, float | None]]) -> str:
    """[`rows_of`] as text."""
    whole, busy = rows["the update"]
    lines = [
        f"{'part':>32}  {'host, ms':>9}  {'share':>6}" + ("" if busy is None else f"  {'device, ms':>10}  {'share':>6}")
    ]
    for part, (host, device) in rows.items():
        if host or device:
            line = f"{part:>32}  {host:>9.3f}  {host / whole:>6.1%}"
            lines.append(line + ("" if device is None else f"  {device:>10.3f}  {device / whole:>6.1%}"))
    return "\n".join(lines)
