"""Plot of an audit, `lr_audit.png`: the learning rate at each update, and what was expected."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from ..core.plotting import COLORS, DARK, GREY, ORANGE, new_figure, plain_axes, save_figure
from .report import Audit, Section

_MAX_POINTS = 20_000
_MAX_GROUPS = 5


def plot_audit(audit: Audit, path: Path) -> None:
    """Draws a panel for each optimizer, and one for its momentum if that changes."""
    panels = [(section, key) for section in audit.sections for key in ("lr", "m") if key == "lr" or _varies(section)]
    figure = new_figure(7, 1.0 + 2.4 * len(panels), dpi=150)
    rows = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, (section, key) in zip(rows, panels, strict=True):
        plain_axes(axes)
        axes.margins(x=0.01)
        if key == "lr":
            _draw_lr(axes, section, len(audit.sections) > 1)
        else:
            axes.plot(*_thinned(_momentum(section)), color=ORANGE, linewidth=1.2)
            axes.set_ylabel("momentum")
    rows[-1].set_xlabel("update")
    save_figure(figure, path)


def _varies(section: Section) -> bool:
    momentum = _momentum(section)
    return bool(np.isfinite(momentum).all() and np.ptp(momentum) > 0)


def _momentum(section: Section) -> np.ndarray:
    """Of the group that exists for the most updates."""
    most = int(np.argmax(section.optimizer.exists.sum(axis=0)))
    return section.optimizer.of_groups("m")[:, most]


def _draw_lr(axes: Any, section: Section, shows_name: bool) -> None:
    lr = section.optimizer.lr
    different = [indices[0] for indices in section.optimizer.equal_groups(lr)]
    for color, index in zip(COLORS, different[:_MAX_GROUPS]):  # noqa: B905
        label = "ran" if len(different) == 1 else f"ran, group {index}"
        axes.plot(*_thinned(lr[:, index]), color=color, linewidth=1.6, label=label)
    if section.comparison is not None:
        axes.plot(
            *_thinned(section.comparison.lr[:, different[0]]), color=ORANGE, linewidth=1.2, linestyle="--", label="expected"
        )
    positions, length = section.optimizer.positions, section.evidence.length
    if length and (ended := np.flatnonzero(positions >= length)).size:
        axes.axvline(ended[0], color=GREY, linestyle=":", linewidth=1.2, label="end of the schedule")
    axes.set_ylim(0, None)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    axes.set_ylabel(f"learning rate\n{section.optimizer.name}" if shows_name else "learning rate")
    axes.legend(frameon=False, fontsize=8)
    problems = [finding.text for finding in section.findings if finding.is_problem]
    if problems:
        axes.set_title("\n".join(textwrap.wrap(problems[0], 100)), fontsize=8, loc="left", color=DARK, pad=14)


def _thinned(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Updates and values, no more than can be seen."""
    shown = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MAX_POINTS)).astype(int))
    return shown, values[shown]
