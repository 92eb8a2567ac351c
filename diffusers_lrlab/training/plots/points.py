"""Plots of points: data beside samples on one scale, samples over training, and sampling from noise to data.

Points of more than two dimensions are shown by their first two coordinates, those of one by a histogram.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.files import atomic_file
from ...core.plotting import BLUE, ORANGE, new_figure, save_figure
from ...core.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS = 10_000  # more hide the shape
_FRAME_MS, _LAST_FRAME_MS = 90, 2000
Limits = tuple[np.ndarray, np.ndarray]


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
    figure = new_figure(7, 3.7, dpi=150)
    left, right = figure.subplots(1, 2)
    limits, num = limits_of(real, samples), min(len(real), len(samples))
    draw_points(left, real[:num], limits, title=f"data, {counted(num, 'point')}")
    draw_points(right, samples[:num], limits, ORANGE, title=f"samples, {counted(num, 'point')}")
    save_figure(figure, path)


def plot_splits(splits: dict[str, np.ndarray], path: Path) -> None:
    """The splits of a data set side by side, on one scale."""
    figure = new_figure(3.5 * len(splits), 3.7, dpi=150)
    limits = limits_of(np.concatenate(list(splits.values())))
    for axes, (split, points) in zip(figure.subplots(1, len(splits), squeeze=False)[0], splits.items(), strict=True):
        shown = f"{_MOST_POINTS} of " if len(points) > _MOST_POINTS else ""
        draw_points(axes, points, limits, title=f"{split}, {shown}{counted(len(points), 'point')}")
    save_figure(figure, path)


def _strip(points: list[np.ndarray], titles: list[str], limits: Limits, path: Path) -> None:
    figure = new_figure(1.75 * len(points), 2.0, dpi=150)
    columns = figure.subplots(1, len(points), squeeze=False)[0]
    for axes, shown, title in zip(columns, points, titles, strict=True):
        draw_points(axes, shown, limits, ORANGE, title)
    save_figure(figure, path)


def plot_progress(previews: dict[int, np.ndarray], num_updates: int, real: np.ndarray, path: Path) -> None:
    shown = dict(list(previews.items())[-6:])
    titles = [f"update {update}" if update < num_updates else f"end ({update})" for update in shown]
    _strip(list(shown.values()), titles, limits_of(real, next(reversed(shown.values()))), path)


def plot_trajectory(frames: np.ndarray, timesteps: list[int], real: np.ndarray, path: Path) -> None:
    """Six frames of sampling from noise to data, from `frames` `(num_frames, num_points, dimension)`."""
    chosen = np.unique(np.linspace(0, len(frames) - 1, 6).round().astype(int))
    titles = [f"{counted(timesteps[index], 'timestep')} left" if timesteps[index] else "samples" for index in chosen]
    _strip([frames[index] for index in chosen], titles, limits_of(real, frames[0]), path)


def as_picture(points: np.ndarray, limits: Limits, title: str = "", pixels: int = 320) -> np.ndarray:
    """Points as an 8-bit RGB image `(pixels, pixels, 3)`."""
    figure = new_figure(pixels / 100, pixels / 100, dpi=100)
    draw_points(figure.add_subplot(), points, limits, ORANGE, title)
    return _pixels(figure)


def _pixels(figure: Any) -> np.ndarray:
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[:, :, :3].copy()


def animate(frames: np.ndarray, timesteps: list[int], real: np.ndarray, path: Path) -> None:
    """Sampling from noise to data as an animated GIF, which ends with a pause."""
    from PIL import Image

    limits = limits_of(real, frames[0])
    figure = new_figure(3.2, 3.2, dpi=100)
    axes = figure.add_subplot()
    pictures: list[Any] = []
    for points, left in zip(frames, timesteps, strict=True):
        axes.clear()
        draw_points(axes, points, limits, ORANGE, f"{counted(left, 'timestep')} left" if left else "samples")
        pictures.append(Image.fromarray(_pixels(figure)).quantize(32))
        figure.set_layout_engine("none")  # that of the first frame holds for all; it takes most of the time
    durations = [_FRAME_MS] * (len(pictures) - 1) + [_LAST_FRAME_MS]
    with atomic_file(path) as temporary:
        pictures[0].save(temporary, save_all=True, append_images=pictures[1:], duration=durations, loop=0)
