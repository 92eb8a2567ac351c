"""The plot of samples of every arm."""

import base64
import io
import math
from typing import Any

import numpy as np
from PIL import Image

from ...core.plotting import DARK, new_figure
from ...core.words import counted
from ...training.plots import draw_points
from ..runs.results import RunResult, by_cell
from ..spec.spec import Cell
from . import plots
from .curves import Style, compared, shown_arms, shown_datasets

_MOST_ARMS = 24
_MOST_COLUMNS = 4  # in a report, where samples beside each other should be seen without scrolling


def samples_to_show(results: list[RunResult]) -> dict[Cell, RunResult]:
    """For every arm and data set, the finished run of the lowest seed that has samples."""
    with_samples = [run for run in compared(results) if run.samples.get("points") or run.samples.get("png")]
    return {cell: runs[0] for cell, runs in by_cell(with_samples).items()}


def plot_sample_grid(
    chosen: dict[Cell, RunResult], datasets: list[str], styles: dict[str, Style], width: float | None = None
) -> Any:
    """
    Samples of one seed: a row for each data set, a column for each arm, one scale per data set. In a report, arms beyond the
    fourth follow below.
    """
    every = shown_arms(styles, chosen)
    arms = every[:_MOST_ARMS]
    columns = min(_MOST_COLUMNS, len(arms)) if width is None else len(arms)
    datasets = shown_datasets(datasets, chosen)
    side = 1.5 if width is None else (width - 0.4) / columns
    blocks = math.ceil(len(arms) / columns)
    figure = new_figure(side * columns + 0.4, (side * len(datasets) + 0.4) * blocks, dpi=130)
    panels = _panels_of_arms(figure, len(datasets), len(arms), columns)
    for row, dataset in zip(panels, datasets, strict=True):
        samples = {arm: chosen[arm, dataset].samples for arm in arms if (arm, dataset) in chosen}
        points = {arm: np.asarray(of_arm["points"], float) for arm, of_arm in samples.items() if of_arm.get("points")}
        limits = _limits_of([*points.values()])
        for axes, arm in zip(row, arms, strict=True):
            axes.set(xticks=[], yticks=[])
            for spine in axes.spines.values():
                spine.set_alpha(0.3)
            if arm in points:
                draw_points(axes, points[arm], limits, styles[arm].color)
            elif arm in samples:
                with Image.open(io.BytesIO(base64.b64decode(samples[arm]["png"]))) as image:
                    axes.imshow(np.asarray(image.convert("RGB")))
            else:
                axes.text(0.5, 0.5, "none", ha="center", va="center", fontsize=8, color=DARK, transform=axes.transAxes)
        for axes in row[::columns]:
            axes.set_ylabel(plots.plain(dataset, 16), fontsize=11 if side >= 1.2 else 8)
    heading = {"fontsize": 11} if side >= 1.2 else {"fontsize": 8, "rotation": 40, "ha": "left"}
    for axes, arm in zip(panels[0], arms, strict=True):
        axes.set_title(plots.plain(arm, 16), **heading)
    if len(arms) < len(every):
        figure.supxlabel(f"the first {len(arms)} of {counted(len(every), 'arm')}", fontsize=9)
    return figure


def _panels_of_arms(figure: Any, num_datasets: int, num_arms: int, columns: int) -> np.ndarray:
    """Panels `(num_datasets, num_arms)`, of which `columns` are side by side."""
    blocks = math.ceil(num_arms / columns)
    grid = figure.subplots(blocks * num_datasets, columns, squeeze=False)
    panels = grid.reshape(blocks, num_datasets, columns).swapaxes(0, 1).reshape(num_datasets, -1)
    for axes in panels[:, num_arms:].flat:
        axes.set_axis_off()
    return panels[:, :num_arms]


def _limits_of(points: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper limits of both axes, without the farthest points, which would shrink the rest to a dot."""
    together = np.concatenate(points) if points else np.empty((0, 2))
    together = together[np.isfinite(together).all(axis=1)]
    if not len(together):
        return np.zeros(2), np.ones(2)
    lowest, highest = np.quantile(together, [0.005, 0.995], axis=0)
    margin = np.where(highest > lowest, 0.08 * (highest - lowest), 0.5)
    return lowest - margin, highest + margin
