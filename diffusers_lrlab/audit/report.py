"""The report of an audit: at most ten lines, and the plot `lr_audit.png`."""

from __future__ import annotations

import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..core.plotting import BLUE, COLORS, DARK, GREY, new_figure, plain_axes, save_figure
from ..core.words import counted, times
from .evidence import AuditedOptimizer, Finding
from .result import Audit, Comparison, Expectation, Section

_MAX_LINES = 9  # and one that names the files
_MAX_OPTIMIZERS = 3  # in the text
_SMALLEST_TURN = 0.02  # of the highest rate
_MOST_TURNS = 4  # that are told one by one
_MAX_POINTS = 20_000
_MAX_GROUPS = 5


def lines_of(audit: Audit) -> list[str]:
    """The report as at most nine lines."""
    if not audit.sections:
        failed = [f"The program ended with status {audit.status}."] if audit.status else []
        return [f"LR audit: {_why_nothing(audit)}", *failed]
    lines: list[str] = []
    shown = audit.sections[:_MAX_OPTIMIZERS]
    for section in shown:
        lines += _facts(section)
        if section.comparison is not None and audit.expectation is not None:
            lines.append(_verdict(section.comparison, audit.expectation))
        elif section.not_compared is not None and audit.expectation is not None:
            lines.append(f"Expected {audit.expectation.spec}: cannot be compared. {section.not_compared}")
    if others := audit.sections[len(shown) :]:
        lines.append(f"{counted(len(others), 'more optimizer')} in lr_audit.json.")
    if audit.status:
        lines.append(f"The program ended with status {audit.status}; this is the audit of what ran.")
    if audit.differing_process is not None:
        rank, update = audit.differing_process
        lines.append(
            f"Problem: process {rank} had a different learning rate from the main process, first at update {update:,}."
        )
    if audit.num_others:
        more = counted(audit.num_others, "other process")
        lines.append(f"This is the first program of the command that trained; {more} also trained. Audit each separately.")
    first: dict[Finding, Section] = {}  # of the optimizers with the same text
    for section in shown:
        for finding in section.findings:
            first.setdefault(finding, section)
    findings = sorted(first.items(), key=lambda pair: not pair[0].is_problem)
    room = max(_MAX_LINES - len(lines), 0)
    room -= 0 < room < len(findings)
    for finding, section in findings[:room]:
        name = f" ({_title(section.optimizer, shown)})" if len(shown) > 1 else ""
        lines.append(f"{'Problem' if finding.is_problem else 'Note'}{name}: {finding.text}")
    if len(findings) > room:
        lines.append(f"{counted(len(findings) - room, 'more finding')} in lr_audit.json.")
    return lines


def _title(optimizer: AuditedOptimizer, shown: list[Section]) -> str:
    same = [each for each in shown if each.optimizer.name == optimizer.name]
    return f"{optimizer.name} {optimizer.number}" if len(same) > 1 else optimizer.name


def _facts(section: Section) -> list[str]:
    optimizer, seen = section.optimizer, section.evidence
    scheduler = optimizer.scheduler["name"] if optimizer.scheduler else "no torch scheduler"
    accumulated = f", {counted(seen.accumulated, 'backward pass')} each" if seen.accumulated else ""
    groups = f", {counted(len(optimizer.group_sizes), 'parameter group')}" if len(optimizer.group_sizes) > 1 else ""
    if partial := int((~optimizer.exists.all(axis=0)).sum()):
        groups += f" ({partial} of them for a part of the run)"
    first = (
        f"LR audit: {optimizer.name} ({scheduler}), {counted(optimizer.num_updates, 'update', ',')}{accumulated}{groups}."
    )
    lr = seen.lr
    if not np.isfinite(lr).any():
        return [first, "Its learning rate could not be read."]
    if np.ptp(lr[np.isfinite(lr)]) == 0:
        where = "at every update" if np.isfinite(lr).all() else "wherever it is finite"
        return [first, f"Learning rate: {np.nanmin(lr):.4g} {where}."]
    return [first, f"Learning rate: {describe_curve(lr)}."]


def _verdict(comparison: Comparison, expectation: Expectation) -> str:
    if comparison.holds:
        return f"Expected {expectation.spec}: every update was as expected."
    size = f", by up to {comparison.largest_deviation:.3g} of the peak" if comparison.largest_deviation else ""
    text = f"Expected {expectation.spec}: NOT as expected from update {comparison.first_deviating_update:,} on{size}."
    if not comparison.largest_deviation:
        text += " There were more updates than --num_updates."
    return text


def _why_nothing(audit: Audit) -> str:
    """Explains why no update of a torch optimizer was recorded."""
    if not audit.processes:
        return (
            "nothing was recorded: the command started no Python process that imports torch, or started it with -E or -I, "
            "which ignore PYTHONPATH."
        )
    main = audit.processes[0]
    end = main.end or {}
    names = ", ".join(each.name for each in main.optimizers.values()) or "no torch optimizer"
    passes = counted(end.get("backward", 0), "backward pass", ",")
    foreign = "" if main.optimizers else " An optimizer that is not a torch.optim.Optimizer cannot be audited."
    about = "".join(f" An engine of {engine} was made, whose own steps are not seen." for engine in end.get("engines", []))
    return f"no optimizer took a step. The program made {names} and had {passes}.{foreign}{about}"


# --- a curve in words ---------------------------------------------------------------------------------------------------


def describe_curve(lr: np.ndarray) -> str:
    """First, highest and last rate, and where the curve turns in between."""
    highest = float(np.nanmax(lr))
    peak, end = int(np.nanargmax(lr >= highest * (1 - 1e-9))), len(lr) - 1
    last = f"at the last ({100 * lr[-1] / highest:.3g} % of the highest)"
    turns = turning_points(lr, _SMALLEST_TURN * highest)
    if not turns or turns == [peak]:
        return f"{lr[0]:.4g} at update 0, highest at update {peak:,} ({highest:.4g}), {lr[-1]:.4g} {last}"
    parts = [f"{lr[0]:.4g} at update 0{'' if peak else ' (the highest)'}"]
    moves = [*pairwise([0, *turns, end])]
    if len(turns) > _MOST_TURNS:
        parts += [f"highest at update {peak:,} ({highest:.4g})"] if peak else []
        return ", ".join([*parts, _repeated(lr, moves), f"{lr[-1]:.4g} {last}"])
    for before, index in moves:
        verb = f"{'then ' if index == end else ''}{'falls' if lr[index] < lr[before] else 'rises'}"
        where = last if index == end else f"at update {index:,}{' (the highest)' if index == peak else ''}"
        parts.append(f"{verb} to {lr[index]:.4g} {where}")
    return ", ".join(parts)


def _repeated(lr: np.ndarray, moves: list[tuple[int, int]]) -> str:
    """A phrase for a curve that falls and rises often."""
    rises = [(low, top) for low, top in moves[1:] if lr[top] > lr[low]]
    lowest, highest = min(lr[low] for low, _ in rises), max(lr[top] for _, top in rises)
    if all(top - low == 1 for low, top in rises):
        return f"restarts {times(len(rises))} from {lowest:.4g}, first at update {rises[0][1]:,}"
    return f"falls and rises again {times(len(rises))} between {lowest:.4g} and {highest:.4g}"


def turning_points(lr: np.ndarray, smallest: float) -> list[int]:
    """The updates where a curve turns, without turns after which it changes by less than `smallest`."""
    values = lr.tolist()
    turns: list[int] = []
    low = high = direction = 0
    for index, value in enumerate(values):
        high = index if direction >= 0 and value > values[high] else high
        low = index if direction <= 0 and value < values[low] else low
        if direction >= 0 and values[high] - value >= smallest:
            turns.append(high)
            direction, low = -1, index
        elif direction <= 0 and value - values[low] >= smallest:
            turns.append(low)
            direction, high = 1, index
    return [index for index in turns if index]


# --- plot ---------------------------------------------------------------------------------------------------------------


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
            axes.plot(*_thinned(_momentum(section)), color=BLUE, linewidth=1.6)
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
        expected = section.comparison.lr[:, different[0]]
        axes.plot(*_thinned(expected), color=DARK, linewidth=1.2, linestyle="--", label="expected")
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
