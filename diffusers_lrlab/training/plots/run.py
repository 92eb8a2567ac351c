"""Pictures of the log of a run: losses, expected and applied learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.plotting import BLUE, GREEN, GREY, ORANGE, new_figure, plain_axes, save_figure

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
    training = [(row["update"], row["loss"]) for row in rows if "loss" in row]
    updates, losses = np.array(training).T
    axes.plot(updates, losses, color=GREY, alpha=0.45, linewidth=0.8, label="training, as logged")
    window = max(1, len(losses) // 20)
    if window > 1:
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        axes.plot(updates[window - 1 :], smooth, color=BLUE, label=f"training, mean of {window} rows")
    for key, color, label in (
        ("validation_loss", ORANGE, "validation, raw weights"),
        ("validation_loss_ema", GREEN, "validation, EMA weights"),
    ):
        points = [(row["update"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=3, label=label)
    axes.set(xlabel="update", ylabel="denoising loss", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="y", which="minor", labelsize=7)
    axes.legend(frameon=False)
    save_figure(figure, path)


def plot_lr(rows: list[dict[str, Any]], plan: Plan, path: Path, changes: np.ndarray) -> None:
    """
    Learning rate, and momentum if it is scheduled: expected as lines, applied as dots. `changes` are factors on the rate of
    each update, of a run that went back and on at a lower one.
    """
    figure, (axes, *below) = _new_axes(5.2, (3, 2)) if plan.schedule.sets_momentum else _new_axes()
    for part in below:
        part.plot(plan.momenta, color=BLUE)
        _plot_some(part, [(row["update"], row["beta1"]) for row in rows if "beta1" in row])
        part.set(xlabel="update", ylabel="momentum (beta1)")
    label = "upper bound (follows the validation loss)" if plan.follows_metric else "expected"
    lrs = plan.lrs * changes
    if (changes != 1).any():
        axes.plot(plan.lrs, color=GREY, linestyle="--", label="expected, before the run diverged and went back")
    if plan.lr_factors is None:
        axes.plot(lrs, color=BLUE, label=label)
    else:
        for factor in np.unique(plan.lr_factors):
            axes.plot(lrs * factor, color=BLUE, linewidth=0.8, label=f"{label}, bands with the factor {factor:g}")
    _plot_some(axes, [(row["update"], row["lr"]) for row in rows if "lr" in row])
    axes.set(xlabel="" if below else "update", ylabel="learning rate", title=plan.schedule_spec, ylim=(0, None))
    axes.legend(frameon=False)
    save_figure(figure, path)


def _plot_some(axes: Axes, points: list[tuple[int, float]]) -> None:
    """About 40 of these points, as dots."""
    axes.plot(*zip(*points[:: max(1, len(points) // 40)], strict=True), "o", color=ORANGE, markersize=3.5, label="applied")
