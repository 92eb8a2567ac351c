"""Previews of schedules over a run, as text, tables and plots."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.plotting import COLORS, new_figure, plain_axes, save_figure
from ..core.values import POSITIVE, Range
from ..core.words import aligned
from ..schedules.expected import resolve_length, schedule_curves
from ..schedules.schedule import double_decay, resolve_schedule

_UPDATES = Range("[1, 1e7]", whole=True)  # beyond this, curves take gigabytes
_SHOWN = (0, 25, 50, 75, 100)  # % of the run, in tables
_CYCLES = ("-", "-.", ":")


@dataclass(frozen=True)
class Run:
    """The run of a preview."""

    num_updates: int
    num_warmup_steps: float = 0  # in updates, or a fraction of the run in (0, 1)
    learning_rate: float = 1e-4
    beta1: float = 0.95

    def __post_init__(self) -> None:
        _UPDATES.check("--num_training_steps", self.num_updates, "more is impractical in a preview")
        POSITIVE.check("--learning_rate", self.learning_rate, "1e-4 is usual")
        Range("(0, 1)").check("--beta1", self.beta1, "0.9 is usual")


@dataclass(frozen=True)
class Preview:
    """A schedule over a run: the learning rate at each update, and the momentum if the schedule sets it."""

    spec: str
    momentum: str | None  # the spec string of the momentum schedule beside it
    lr: np.ndarray
    beta1: np.ndarray | None
    notes: list[str]

    @property
    def label(self) -> str:
        return f"{self.spec} + {self.momentum}" if self.momentum else self.spec

    def as_json(self) -> dict[str, Any]:
        beta1 = None if self.beta1 is None else self.beta1.tolist()
        named = {"spec": self.spec, "momentum": self.momentum}
        return {**named, "lr": self.lr.tolist(), "beta1": beta1, "notes": self.notes}


def preview(spec: str, run: Run, momentum: str | None = None) -> Preview:
    """A schedule over a run."""
    schedule = resolve_schedule(spec, None, momentum)
    warmup, total = resolve_length(schedule, run.num_warmup_steps, run.num_updates)
    lrs, momenta = schedule_curves(schedule, run.learning_rate, run.beta1, warmup, total)
    notes = []
    if schedule.follows_metric:
        notes.append(f"{spec} follows the validation loss: this is its curve if the loss never changes it.")
    elif warning := double_decay(schedule, run.learning_rate, run.beta1, warmup, total):
        notes.append(warning)
    return Preview(spec, momentum, lrs, momenta if schedule.sets_momentum else None, notes)


def describe(previews: list[Preview], run: Run) -> str:
    """A table of learning rates, and of momenta that are scheduled, at 0, 25, 50, 75 and 100 % of the run; and notes."""
    # The last update stands for the end.
    updates = [min(round(share / 100 * run.num_updates), run.num_updates - 1) for share in _SHOWN]
    rows = [["update", *(f"{update} ({share} %)" for update, share in zip(updates, _SHOWN, strict=True))]]
    notes = []
    for shown in previews:
        rows.append([shown.label, *(f"{shown.lr[update]:.3g}" for update in updates)])
        if shown.beta1 is not None:
            rows.append([f"{shown.label}: beta1", *(f"{shown.beta1[update]:.3g}" for update in updates)])
        notes += [(f"{shown.label}: " if len(previews) > 1 else "") + note for note in shown.notes]
    return "\n\n".join([aligned(rows), *notes])


def plot_previews(previews: list[Preview], path: Path) -> None:
    """Schedules in one plot."""
    has_momentum = any(shown.beta1 is not None for shown in previews)
    heights = [2] + [1] * has_momentum
    figure = new_figure(7, 2 + 1.6 * (sum(heights) - 1), dpi=150)
    rows = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes in rows:
        plain_axes(axes)
        axes.margins(x=0.01)
    for index, shown in enumerate(previews):
        # More points than these cannot be seen in a plot.
        updates = np.unique(np.linspace(0, len(shown.lr) - 1, min(len(shown.lr), 20_000)).astype(int))
        style = {"color": COLORS[index % len(COLORS)], "linestyle": _CYCLES[index // len(COLORS) % len(_CYCLES)]}
        label = shown.label if len(shown.label) <= 90 else shown.label[:89] + "…"
        for axes, values in zip(rows, (shown.lr, shown.beta1), strict=False):
            if values is not None:
                axes.plot(updates, values[updates], linewidth=1.4, label=label, **style)
    rows[0].set(ylabel="learning rate", ylim=(-0.02 * max(rows[0].get_ylim()), None))
    rows[0].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    if has_momentum:
        rows[1].set(ylabel="beta1")
    rows[-1].set(xlabel="update")
    handles, labels = rows[0].get_legend_handles_labels()
    columns = len(labels) if sum(map(len, labels)) < 70 else 1
    # Outside, so that it covers no curve.
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False, fontsize=8)
    save_figure(figure, path)
