"""The picture of a report that shows samples of every arm."""

import base64
import io
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from PIL import Image

from ...core.plotting import DARK, new_figure
from ...core.words import counted
from ...training.plots.points import draw_points
from ..runs.results import RunResult
from . import plots
from .report_data import Look, Place, compared, shown_arms, shown_datasets

_MOST_COLUMNS = 24  # a picture is at most some thousand pixels wide


def samples_to_show(results: list[RunResult]) -> dict[Place, RunResult]:
    """For every arm and data set, the finished run of the lowest seed that has samples."""
    chosen: dict[Place, RunResult] = {}
    for result in compared(results):
        if result.samples.get("points") or result.samples.get("png"):
            chosen.setdefault((result.arm, result.dataset), result)
    return chosen


def plot_sample_grid(
    chosen: dict[Place, RunResult], datasets: list[str], looks: dict[str, Look], width: float | None = None
) -> Any:
    """Samples of one seed: a row for each data set, a column for each arm, one scale in a row."""
    every = shown_arms(looks, chosen)
    arms = every[:_MOST_COLUMNS]
    datasets = shown_datasets(datasets, chosen)
    side = 1.5 if width is None else (width - 0.4) / len(arms)
    figure = new_figure(side * len(arms) + 0.4, side * len(datasets) + 0.4, dpi=130)
    panels = figure.subplots(len(datasets), len(arms), squeeze=False)
    for row, dataset in zip(panels, datasets, strict=True):
        draw = _drawer([chosen[arm, dataset].samples for arm in arms if (arm, dataset) in chosen])
        for axes, arm in zip(row, arms, strict=True):
            axes.set(xticks=[], yticks=[])
            for spine in axes.spines.values():
                spine.set_alpha(0.3)
            if (arm, dataset) in chosen:
                draw(axes, chosen[arm, dataset].samples, looks[arm].color)
            else:
                axes.text(0.5, 0.5, "none", ha="center", va="center", fontsize=8, color=DARK, transform=axes.transAxes)
        row[0].set_ylabel(plots.plain(dataset, 16), fontsize=11 if side >= 1.2 else 7)
    narrow = {"fontsize": 7, "rotation": 40, "ha": "left"}
    for axes, arm in zip(panels[0], arms, strict=True):
        axes.set_title(plots.plain(arm, 16), **({"fontsize": 11} if side >= 1.2 else narrow))
    if len(arms) < len(every):
        figure.supxlabel(f"the first {len(arms)} of {counted(len(every), 'arm')}", fontsize=9)
    return figure


def _drawer(of_row: list[dict[str, Any]]) -> Callable[[Axes, dict[str, Any], str], None]:
    """A function that draws samples of one data set, points on the scale of the whole row."""
    every = [np.asarray(samples["points"], dtype=float) for samples in of_row if samples.get("points")]
    limits = (np.zeros(2), np.ones(2))
    if every:
        together = np.concatenate(every)
        together = together[np.isfinite(together).all(axis=1)]
        # A few points far away would leave the shape a dot.
        lowest, highest = np.quantile(together, [0.005, 0.995], axis=0) if len(together) else limits
        margin = np.where(highest > lowest, 0.08 * (highest - lowest), 0.5)
        limits = (lowest - margin, highest + margin)

    def draw(axes: Axes, samples: dict[str, Any], color: str) -> None:
        if samples.get("points"):
            draw_points(axes, np.asarray(samples["points"], dtype=float), limits, color)
        else:
            with Image.open(io.BytesIO(base64.b64decode(samples["png"]))) as image:
                axes.imshow(np.asarray(image.convert("RGB")))

    return draw
