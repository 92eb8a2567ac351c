"""Plots of sampled images: over training, and the final grid."""

import math
from pathlib import Path

import numpy as np

from ...core.files import atomic_file
from ...core.plotting import new_figure, save_figure


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


def plot_progress(previews: dict[int, np.ndarray], num_updates: int, path: Path, spread: bool = False) -> None:
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
