"""Plots of the log of a run: losses, expected and applied learning rate."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.plotting import BLUE, GREEN, GREY, ORANGE, new_figure, plain_axes, plain_log_scale, save_figure
from ...core.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..plan import Plan


def _new_axes(height: float = 3.6, ratios: tuple[int, ...] = (1,)) -> tuple[Any, list[Axes]]:
    figure = new_figure(7, height, dpi=150)
    parts = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    for axes in parts:
        plain_axes(axes)
    return figure, parts


def plot_losses(rows: list[dict[str, Any]], path: Path) -> None:
    """Training loss (rows and their running mean) and validation losses over updates."""
    figure, (axes,) = _new_axes()
    updates, losses = _of_rows(rows, "loss")
    axes.plot(updates, losses, color=GREY, alpha=0.45, linewidth=0.8, label="training, as logged")
    window = max(1, len(losses) // 20)
    if window > 1:
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        axes.plot(updates[window - 1 :], smooth, color=BLUE, label=f"training, mean of {counted(window, 'row')}")
    for key, color, label in (
        ("validation_loss", ORANGE, "validation, raw weights"),
        ("validation_loss_ema", GREEN, "validation, EMA weights"),
    ):
        points = _of_rows(rows, key)
        if points.size:
            axes.plot(*points, "o-", color=color, markersize=3, label=label)
    axes.set(xlabel="update", ylabel="denoising loss")
    plain_log_scale(axes)
    axes.legend(frameon=False)
    save_figure(figure, path)


def plot_lr(rows: list[dict[str, Any]], plan: Plan, path: Path) -> None:
    """Learning rate, and momentum if it is scheduled: expected as lines, applied as dots."""
    figure, (axes, *below) = _new_axes(5.2, (3, 2)) if plan.schedule.sets_momentum else _new_axes()
    for part in below:
        part.plot(plan.momenta, color=BLUE)
        _plot_some(part, _of_rows(rows, "beta1"))
        part.set(xlabel="update", ylabel="momentum (beta1)")
    label = "upper bound (follows the validation loss)" if plan.follows_metric else "expected"
    lrs = plan.lrs
    if plan.width is not None and (factor := plan.width.factor("hidden")) != 1:
        axes.plot(lrs * factor, color=GREEN, label=f"{label}, hidden and output matrices (x {factor:.4g})")
        _plot_some(axes, _of_rows(rows, "lr_hidden"), label=None)
    if plan.lr_factors is None:
        axes.plot(lrs, color=BLUE, label=label)
    else:
        for factor in np.unique(plan.lr_factors):
            axes.plot(lrs * factor, color=BLUE, linewidth=0.8, label=f"{label}, bands with the factor {factor:g}")
    _plot_some(axes, _of_rows(rows, "lr"))
    axes.set(xlabel="" if below else "update", ylabel="learning rate", title=fill(plan.schedule_spec, 90), ylim=(0, None))
    axes.legend(frameon=False)
    save_figure(figure, path)


def _of_rows(rows: list[dict[str, Any]], key: str) -> np.ndarray:
    """Updates and values of the rows that have `key`, float64 `(2, num)`; empty for a removed log."""
    return np.array([(row["update"], row[key]) for row in rows if key in row], np.float64).reshape(-1, 2).T


def _plot_some(axes: Axes, points: np.ndarray, label: str | None = "applied") -> None:
    """About 40 of these points, as dots."""
    shown = points[:, :: max(1, points.shape[1] // 40)]
    axes.plot(*shown, "o", color=ORANGE, markersize=3.5, label=label)
