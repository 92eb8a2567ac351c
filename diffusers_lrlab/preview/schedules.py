"""Previews of schedules over a run, here and in diffusers' own script, as text, tables and plots in a terminal."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.progress import Progress
from ..core.values import POSITIVE, Range, checked
from ..core.words import aligned, counted
from ..schedules.expected import resolve_length, schedule_curves
from ..schedules.schedule import Schedule, double_decay, resolve_schedule

# Beyond this, curves take gigabytes.
_UPDATES, _SHARES = Range("[1, 1e7]", whole=True), Range("[1, 1e5]", whole=True)
_SHOWN = (0, 25, 50, 75, 100)  # % of the run, in tables


@checked
@dataclass(frozen=True)
class Run:
    """The run of a preview."""

    num_updates: int
    num_warmup_steps: float = 0  # in updates, or a fraction of the run in (0, 1)
    learning_rate: float = 1e-4
    beta1: float = 0.95
    num_processes: int = 1  # this and the accumulation matter only in diffusers' own script
    accumulation: int = 1

    def __post_init__(self) -> None:
        for flag, value, most in (
            ("num_training_steps", self.num_updates, _UPDATES),
            ("num_processes", self.num_processes, _SHARES),
            ("gradient_accumulation_steps", self.accumulation, _SHARES),
        ):
            most.check(f"--{flag}", value, "more is impractical in a preview")
        POSITIVE.check("--learning_rate", self.learning_rate, "1e-4 is usual")
        Range("(0, 1)").check("--beta1", self.beta1, "0.9 is usual")

    @property
    def layout(self) -> str:
        return f"{counted(self.num_processes, 'process')} x accumulation {self.accumulation}"


@dataclass(frozen=True)
class Curves:
    """The learning rate at each update, and the momentum if the schedule sets it."""

    lr: np.ndarray
    beta1: np.ndarray | None

    @property
    def peak_update(self) -> int:
        """The first update with the highest learning rate."""
        return int(np.argmax(self.lr >= self.lr.max() * (1 - 1e-9)))

    def as_json(self) -> dict[str, Any]:
        return {"lr": self.lr.tolist(), "beta1": None if self.beta1 is None else self.beta1.tolist()}


@dataclass(frozen=True)
class Preview:
    """A schedule over a run."""

    spec: str
    momentum: str | None  # the spec string of the momentum schedule beside it
    curves: Curves
    host: Curves | None  # in diffusers' own script
    notes: list[str]

    @property
    def label(self) -> str:
        return f"{self.spec} + {self.momentum}" if self.momentum else self.spec

    def as_json(self, asked_for_host: bool) -> dict[str, Any]:
        """Everything, with the curves in diffusers' own script on request; `None` there means that it cannot run."""
        shown: dict[str, Any] = {"spec": self.spec, "momentum": self.momentum, **self.curves.as_json(), "notes": self.notes}
        if asked_for_host:
            shown["diffusers"] = self.host and self.host.as_json()
        return shown


@checked
def preview(spec: str, run: Run, momentum: str | None = None) -> Preview:
    """A schedule over a run; also in diffusers' own script if there are several processes or accumulation."""
    schedule = resolve_schedule(spec, None, momentum)
    warmup, total = resolve_length(schedule, run.num_warmup_steps, run.num_updates)
    lrs, momenta = schedule_curves(schedule, run.learning_rate, run.beta1, warmup, total)
    curves = Curves(lrs, momenta if schedule.sets_momentum else None)
    notes = []
    if schedule.follows_metric:
        notes.append(f"{spec} follows the validation loss: this is its curve if the loss never changes it.")
    elif warning := double_decay(schedule, run.learning_rate, run.beta1, warmup, total):
        notes.append(warning)
    host = None
    if run.num_processes * run.accumulation > 1:
        try:
            host = curves_in_host_script(schedule, run, warmup)
            notes.append(f"diffusers' own script, {run.layout}: {_compare(curves, host, run)}")
        except LabError as error:
            notes.append(f"diffusers' own script, {run.layout}: cannot run {spec}. {error}")
    return Preview(spec, momentum, curves, host, notes)


def curves_in_host_script(schedule: Schedule, run: Run, warmup_updates: int) -> Curves:
    """
    The values that diffusers' own `train_unconditional.py` would apply at each update.

    It plans a schedule over the micro-batches of all processes, with warm-up multiplied by the accumulation, and accelerate
    steps the schedule once per process at each update.
    """
    if schedule.follows_metric:
        raise LabError("It has no validation loss.")
    if schedule.momentum is not None:
        raise LabError("It has no --momentum_scheduler; 'mdlrc' is there as an --lr_scheduler.")
    steps, shares = np.arange(run.num_updates) * run.num_processes, run.accumulation * run.num_processes
    clock = Progress(steps, run.num_updates * shares, warmup_updates * run.accumulation)
    lrs, momenta = schedule.at(clock, run.learning_rate, run.beta1)
    return Curves(np.ones(run.num_updates) * lrs, momenta)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def _compare(asked: Curves, host: Curves, run: Run) -> str:
    top = asked.lr.max()
    ends, should_end = _percent(host.lr[-1] / top), _percent(asked.lr[-1] / top)
    parts = [f"ends at {ends} of the peak" + (", as requested" if ends == should_end else f" instead of {should_end}")]
    # Highest at the end, and below the peak: it is still warming up.
    if host.peak_update == run.num_updates - 1 and host.lr[-1] < top * (1 - 1e-9):
        parts.append(f"never reaches it, instead of at update {asked.peak_update}")
    elif host.peak_update != asked.peak_update:
        parts.append(f"reaches it at update {host.peak_update} instead of {asked.peak_update}")
    elif asked.peak_update:
        parts.append(f"reaches it at update {asked.peak_update}, as requested")
    if host.beta1 is not None and asked.beta1 is not None:
        parts.append(f"beta1 ends at {host.beta1[-1]:.3g} instead of {asked.beta1[-1]:.3g}")
    return "; ".join(parts)


def describe(previews: list[Preview], run: Run) -> str:
    """A table of learning rates, and of momenta that are scheduled, at 0, 25, 50, 75 and 100 % of the run; and notes."""
    # The last update stands for the end.
    updates = [min(round(share / 100 * run.num_updates), run.num_updates - 1) for share in _SHOWN]
    rows = [["update", *(f"{update} ({share} %)" for update, share in zip(updates, _SHOWN, strict=True))]]
    notes = []
    for shown in previews:
        for label, curves in ((shown.label, shown.curves), (f"{shown.label}, diffusers' own script", shown.host)):
            if curves is not None:
                rows.append([label, *(f"{curves.lr[update]:.3g}" for update in updates)])
            if curves is not None and curves.beta1 is not None:
                rows.append([f"{label}: beta1", *(f"{curves.beta1[update]:.3g}" for update in updates)])
        notes += [(f"{shown.label}: " if len(previews) > 1 else "") + note for note in shown.notes]
    return "\n\n".join([aligned(rows), *notes])
