"""Pictures of a run: losses, the learning rate as asked and as applied, samples over training, the final grid."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.files import atomic_file
from ...core.plotting import BLUE, GREEN, GREY, ORANGE, new_figure, plain_axes, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..plan import Plan


def _new_axes(width: float = 7, height: float = 3.6) -> tuple[Any, Axes]:
    figure = new_figure(width, height, dpi=150)
    axes = figure.add_subplot()
    plain_axes(axes)
    return figure, axes


def plot_losses(rows: list[dict[str, Any]], path: Path) -> None:
    """Training loss (rows and their running mean) and validation losses over updates."""
    figure, axes = _new_axes()
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


def plot_lr(rows: list[dict[str, Any]], plan: Plan, path: Path) -> None:
    """Learning rate, and momentum if it is scheduled: as asked for as lines, as the optimizer had them as dots on them."""
    figure, axes = _new_axes(height=5.2 if plan.schedule.sets_momentum else 3.6)
    if plan.schedule.sets_momentum:
        axes.remove()
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for part in (axes, below):
            plain_axes(part)
        below.plot(plan.momenta, color=BLUE)
        points = [(row["update"], row["beta1"]) for row in rows if "beta1" in row]
        below.plot(*zip(*points[:: max(1, len(points) // 40)], strict=True), "o", color=ORANGE, markersize=3.5)
        below.set(xlabel="update", ylabel="momentum (beta1)")
    applied = [(row["update"], row["lr"]) for row in rows if "lr" in row]
    shown = applied[:: max(1, len(applied) // 40)]
    label = "upper bound (follows the validation loss)" if plan.follows_metric else "as asked"
    if plan.lr_factors is None:
        axes.plot(plan.lrs, color=BLUE, label=label)
    else:
        for factor in np.unique(plan.lr_factors):
            axes.plot(plan.lrs * factor, color=BLUE, linewidth=0.8, label=f"{label}, bands with the factor {factor:g}")
    axes.plot(*zip(*shown, strict=True), "o", color=ORANGE, markersize=3.5, label="as applied")
    axes.set(
        xlabel="" if plan.schedule.sets_momentum else "update",
        ylabel="learning rate",
        title=plan.schedule_spec,
        ylim=(0, None),
    )
    axes.legend(frameon=False)
    save_figure(figure, path)


def image_grid(images: np.ndarray, columns: int, gap: int = 1) -> np.ndarray:
    """8-bit images `(num, height, width, channels)` as one, with a gap between them: `(rows', columns', channels)`."""
    num, height, width, channels = images.shape
    rows = math.ceil(num / columns)
    grid = np.zeros((rows * (height + gap) + gap, columns * (width + gap) + gap, channels), np.uint8)
    for index, image in enumerate(images):
        top, left = (gap + (index // columns) * (height + gap), gap + (index % columns) * (width + gap))
        grid[top : top + height, left : left + width] = image
    return grid


def _enlarge(images: np.ndarray, target: int) -> np.ndarray:
    """Small images at `target` pixels, smoothly, so that a person can read them."""
    from PIL import Image

    factor = target // images.shape[1]
    if factor < 2:
        return images
    size = (images.shape[2] * factor, images.shape[1] * factor)
    large = [np.asarray(Image.fromarray(image.squeeze()).resize(size, Image.Resampling.BICUBIC)) for image in images]
    return np.stack(large).reshape(len(images), size[1], size[0], -1)


def plot_samples(images: np.ndarray, path: Path) -> None:
    """The final samples (8-bit) as a grid, enlarged if they are small."""
    from PIL import Image

    pixels = _enlarge(images, 64)
    columns = next(number for number in (10, 9, 8, 7, 6, 5, len(images)) if len(images) % number == 0)
    grid = image_grid(pixels, columns=columns, gap=pixels.shape[1] // 4)
    with atomic_file(path) as temporary:
        Image.fromarray(grid.squeeze()).save(temporary)


def plot_progress(previews: dict[int, np.ndarray], num_updates: int, path: Path) -> None:
    """The same starting noise denoised at several moments of training, side by side."""
    figure, axes = _new_axes(width=7, height=2.9)
    figure.delaxes(axes)
    shown = dict(list(previews.items())[-6:])
    columns = figure.subplots(1, len(shown), squeeze=False)[0]
    for column, (update, images) in zip(columns, shown.items(), strict=True):
        grid = image_grid(_enlarge(images[:8], 32), columns=2, gap=6)
        column.imshow(grid.squeeze(), cmap="gray", vmin=0, vmax=255)
        column.set_title(f"update {update}" if update < num_updates else f"end ({update})", fontsize=8)
        column.axis("off")
    save_figure(figure, path)
