"""Plots of a run: its log, and samples beside the data, over training and from noise to data.

Points of more than two dimensions are shown by their first two coordinates, those of one by a histogram.
"""

from __future__ import annotations

import math
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.files import atomic_file
from ..core.plotting import BLUE, GREEN, GREY, ORANGE, new_figure, plain_axes, plain_log_scale, save_figure
from ..core.words import counted
from ..schedules.schedule import describe_schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .plan import Plan

_MOST_POINTS = 10_000  # more hide the shape
Limits = tuple[np.ndarray, np.ndarray]


def _new_axes(height: float = 3.6, ratios: tuple[int, ...] = (1,)) -> tuple[Any, list[Axes]]:
    figure = new_figure(7, height, dpi=150, layout="tight")
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
    label = "upper bound (follows the validation loss)" if plan.schedule.follows_metric else "expected"
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
    title = fill(describe_schedule(plan.schedule), 90)
    axes.set(xlabel="" if below else "update", ylabel="learning rate", title=title, ylim=(0, None))
    axes.legend(frameon=False)
    save_figure(figure, path)


def _of_rows(rows: list[dict[str, Any]], key: str) -> np.ndarray:
    """Updates and values of the rows that have `key`, float64 `(2, num)`; empty for a removed log."""
    return np.array([(row["update"], row[key]) for row in rows if key in row], np.float64).reshape(-1, 2).T


def _plot_some(axes: Axes, points: np.ndarray, label: str | None = "applied") -> None:
    """About 40 of these points, as dots."""
    shown = points[:, :: max(1, points.shape[1] // 40)]
    axes.plot(*shown, "o", color=ORANGE, markersize=3.5, label=label)


# --- images ---


def image_grid(images: np.ndarray, columns: int, gap: int = 1) -> np.ndarray:
    """8-bit images `(num, height, width, channels)` as one image with gaps between them."""
    num, height, width, channels = images.shape
    rows = math.ceil(num / columns)
    grid = np.zeros((rows * (height + gap) + gap, columns * (width + gap) + gap, channels), np.uint8)
    for index, image in enumerate(images):
        top, left = (gap + (index // columns) * (height + gap), gap + (index % columns) * (width + gap))
        grid[top : top + height, left : left + width] = image
    return grid


def _enlarge(images: np.ndarray, target: int) -> np.ndarray:
    """Small images enlarged to about `target` pixels: a pixel is a square, as blurring flatters."""
    factor = target // images.shape[1]
    return images if factor < 2 else images.repeat(factor, axis=1).repeat(factor, axis=2)


def plot_samples(images: np.ndarray, path: Path, columns: int | None = None) -> None:
    """The final samples (8-bit) as a grid, enlarged if they are small; in about ten columns if their number is not given."""
    from PIL import Image

    pixels = _enlarge(images, 64)
    columns = columns or next(number for number in (10, 9, 8, 7, 6, 5, len(images)) if len(images) % number == 0)
    grid = image_grid(pixels, columns=columns, gap=pixels.shape[1] // 4)
    with atomic_file(path) as temporary:
        Image.fromarray(grid.squeeze()).save(temporary)


def plot_image_progress(previews: dict[int, np.ndarray], num_updates: int, path: Path, spread: bool = False) -> None:
    """
    Samples from the same noise at several updates, side by side: the first eight, or eight that are evenly `spread`, as over
    classes.
    """
    figure = new_figure(7, 2.9, dpi=150)
    shown = dict(list(previews.items())[-6:])
    columns = figure.subplots(1, len(shown), squeeze=False)[0]
    for column, (update, images) in zip(columns, shown.items(), strict=True):
        some = images[np.linspace(0, len(images) - 1, min(8, len(images))).astype(int)] if spread else images[:8]
        grid = image_grid(_enlarge(some, 32), columns=2, gap=6)
        column.imshow(grid.squeeze(), cmap="gray", vmin=0, vmax=255)
        column.set_title(f"update {update}" if update < num_updates else f"end ({update})", fontsize=8)
        column.axis("off")
    save_figure(figure, path)


# --- points ---


def limits_of(real: np.ndarray, samples: np.ndarray | None = None) -> Limits:
    """Lowest and highest coordinates of a plot: the data with a margin, and at least 99 % of the samples."""
    lowest, highest = real.min(axis=0), real.max(axis=0)
    if samples is not None:
        lowest = np.minimum(lowest, np.quantile(samples, 0.005, axis=0))
        highest = np.maximum(highest, np.quantile(samples, 0.995, axis=0))
    width = highest - lowest
    margin = np.where(width > 0, 0.05 * width, 0.5)
    return lowest - margin, highest + margin


def draw_points(axes: Axes, points: np.ndarray, limits: Limits, color: str = BLUE, title: str = "") -> None:
    """Points into one part of a picture, without ticks."""
    lowest, highest = limits
    if points.shape[1] == 1:
        axes.hist(points[:, 0], bins=100, range=(float(lowest[0]), float(highest[0])), density=True, color=color)
        axes.set(xlim=(lowest[0], highest[0]))
    else:
        shown = points[:_MOST_POINTS]
        size = float(np.clip(4000 / len(shown), 0.3, 8))
        axes.scatter(shown[:, 0], shown[:, 1], s=size, color=color, linewidths=0, alpha=0.6, rasterized=True)
        axes.set(xlim=(lowest[0], highest[0]), ylim=(lowest[1], highest[1]), aspect="equal")
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize=8)
    for spine in axes.spines.values():
        spine.set_alpha(0.3)


def plot_beside(real: np.ndarray, samples: np.ndarray, path: Path) -> None:
    """Equally many points of data and samples side by side, on one scale."""
    num = min(len(real), len(samples))
    parts = {f"data, {counted(num, 'point')}": real[:num], f"samples, {counted(num, 'point')}": samples[:num]}
    _side_by_side(parts, limits_of(real, samples), path, colors=[BLUE, ORANGE])


def plot_splits(splits: dict[str, np.ndarray], path: Path) -> None:
    """The splits of a data set side by side, on one scale."""
    shown = {split: f"{_MOST_POINTS} of " if len(points) > _MOST_POINTS else "" for split, points in splits.items()}
    parts = {f"{split}, {shown[split]}{counted(len(points), 'point')}": points for split, points in splits.items()}
    _side_by_side(parts, limits_of(np.concatenate(list(splits.values()))), path, colors=[BLUE] * len(parts))


def _side_by_side(
    parts: dict[str, np.ndarray], limits: Limits, path: Path, width: float = 3.5, colors: list[str] | None = None
) -> None:
    """Points by their titles, in columns of this width in inches."""
    figure = new_figure(width * len(parts), width + 0.2, dpi=150)
    columns = figure.subplots(1, len(parts), squeeze=False)[0]
    for axes, (title, points), color in zip(columns, parts.items(), colors or [ORANGE] * len(parts), strict=True):
        draw_points(axes, points, limits, color, title)
    save_figure(figure, path)


def plot_point_progress(previews: dict[int, np.ndarray], num_updates: int, real: np.ndarray, path: Path) -> None:
    shown = dict(list(previews.items())[-6:])
    parts = {f"update {update}" if update < num_updates else f"end ({update})": points for update, points in shown.items()}
    _side_by_side(parts, limits_of(real, next(reversed(shown.values()))), path, 1.75)


def plot_trajectory(frames: np.ndarray, timesteps: list[int], real: np.ndarray, path: Path) -> None:
    """Six frames of sampling from noise to data, from `frames` `(num_frames, num_points, dimension)`."""
    chosen = np.unique(np.linspace(0, len(frames) - 1, 6).round().astype(int))
    parts = {f"{counted(left, 'timestep')} left" if (left := timesteps[at]) else "samples": frames[at] for at in chosen}
    _side_by_side(parts, limits_of(real, frames[0]), path, 1.75)
