"""Previews in words, numbers and characters."""

from __future__ import annotations

from typing import Any

from ..core.listing import aligned
from ..core.terminal_plot import terminal_plot
from .schedules import Course, Preview, Run

_SHARES = (0, 25, 50, 75, 100)


def describe(previews: list[Preview], run: Run, terminal: dict[str, Any] | None) -> str:
    """Plots, a table and notes; `terminal` holds the options of [`terminal_plot`], `None` for no plots."""
    parts = []
    if terminal is not None:
        courses = courses_by_label(previews)
        title = "learning rate" + (f" of {previews[0].label}" if len(previews) == 1 else "")
        parts.append(terminal_plot({label: course.lr for label, course in courses.items()}, title, **terminal))
        momenta = {label: course.beta1 for label, course in courses.items() if course.beta1 is not None}
        if momenta:
            parts.append(terminal_plot(momenta, "beta1", height=6, from_zero=False, **terminal))
    parts.append(table(previews, run))
    parts += [(f"{shown.label}: " if len(previews) > 1 else "") + note for shown in previews for note in shown.notes]
    return "\n\n".join(parts)


def courses_by_label(previews: list[Preview]) -> dict[str, Course]:
    """All curves to draw: each schedule, followed by what diffusers' own script makes of it."""
    courses = {}
    for shown in previews:
        courses[shown.label] = shown.course
        if shown.host is not None:
            courses[f"{shown.label}, diffusers' own script"] = shown.host
    return courses


def table(previews: list[Preview], run: Run) -> str:
    """The learning rates, and the momenta that are driven, at 0, 25, 50, 75 and 100 % of the run."""
    # The last update that happens stands for the end.
    updates = [min(round(share / 100 * run.num_updates), run.num_updates - 1) for share in _SHARES]
    rows = [["update", *(f"{update} ({share} %)" for update, share in zip(updates, _SHARES, strict=True))]]
    for label, course in courses_by_label(previews).items():
        rows.append([label, *(f"{course.lr[update]:.3g}" for update in updates)])
        if course.beta1 is not None:
            rows.append([f"{label}: beta1", *(f"{course.beta1[update]:.3g}" for update in updates)])
    return aligned(rows)
