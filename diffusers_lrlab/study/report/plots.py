"""The plots of a report: differences from the baseline, curves, seeds and samples, each with a text that describes it."""

import base64
import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from PIL import Image

from ...core.plotting import (
    BLUE,
    DARK,
    GREEN,
    GREY,
    ORANGE,
    new_figure,
    plain_axes,
    plain_log_scale,
)
from ...core.words import counted
from ...evaluation.metrics import better_of
from ...training.plots import draw_points
from ..analysis.summary import DIVERGED, word_of
from ..results import RunResult, by_cell
from . import tables
from .contents import ReportContents
from .curves import CurveKind, compared, shown_arms, shown_datasets

DIFFERENCES, SAMPLES = "differences.png", "samples.png"
_MOST_ARMS = 40  # in a plot with a row for each
_COLUMNS, _PANEL = 2, 3.4  # data sets side by side, and inches of each
_CHARACTER, _LEFT_OF_PANEL = 0.068, 0.8  # inches; of text of 8 points, and for the numbers and name of an axis
_VERDICT_COLORS = {"better": BLUE, "worse": ORANGE, "higher": GREEN, "lower": GREEN}
_SIDES = {"smaller": ("better", "worse"), "larger": ("worse", "better"), "neither": ("lower", "higher")}  # of a difference
# Embedded TrueType fonts, as journals refuse Type 3, and reproducible files.
_FILE_SETTINGS: Any = {"pdf.fonttype": 42, "svg.hashsalt": "diffusers_lrlab"}
_NO_DATE: dict[str, Any] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}


class Plot(NamedTuple):
    """A plot of a report, not made yet."""

    file: str
    title: str
    alt: str  # text for screen readers
    make: Callable[[], Any]  # the figure


def plots_of(contents: ReportContents) -> list[Plot]:
    """All plots for which there are data."""
    found, panels, baseline = [], "a panel for each data set", contents.study["baseline"]
    for metric in contents.metrics[:1]:
        rows = tables.rows_of(contents.summary, metric)
        if any(row["diff"] is not None for row in rows if row["arm"] != baseline):
            title = f"{contents.labels[metric]}: differences from {baseline}"
            alt = f"{title} with their 95 % intervals, {panels}. {' '.join(contents.conclusions()[0].sentences)}"
            found.append(Plot(DIFFERENCES, title, alt, partial(plot_differences, contents, metric)))
    for kind in contents.curve_kinds:
        alt = f"{kind.title} of each arm over the updates, as means over seeds, {panels}."
        found.append(Plot(f"{kind.name}.png", kind.title, alt, partial(plot_curves, contents, kind)))
    for metric, values in contents.values.items():
        if values:
            label = contents.labels[metric]
            alt = f"{label}: every seed as a point over its arm, with the mean and its 95 % interval, {panels}."
            found.append(Plot(seeds_file(metric), f"{label}: every seed", alt, partial(plot_seeds, contents, metric)))
    if any(_has_samples(run) for run in compared(contents.results)):
        alt = "Samples of the lowest seed of each arm: a row for each arm, a column for each data set."
        found.append(Plot(SAMPLES, "Samples of the lowest seed", alt, partial(plot_samples, contents)))
    return found


def _has_samples(run: RunResult) -> bool:
    return bool(run.samples.get("points") or run.samples.get("png"))


def seeds_file(metric: str) -> str:
    return re.sub(r"[^\w-]", "_", f"seeds_{metric}") + ".png"  # file systems may reject other characters


def save_plot(figure: Any, file: Any, form: str = "png") -> None:
    """Saves a plot as a PNG, PDF or SVG."""
    metadata = _NO_DATE.get(form)
    with warnings.catch_warnings(), rc_context(_FILE_SETTINGS):
        # Boxes for characters that the font lacks are no reason to warn or stop.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(file, format=form, metadata=metadata)


def embedded(figure: Any, file: Path) -> str:
    """The address of a plot within the page: as SVG, which is sharp at any size; photos as `file`, a PNG."""
    form, content = "png", io.BytesIO(file.read_bytes())
    if not any(axes.images for axes in figure.axes):
        form, content = "svg+xml", io.BytesIO()
        save_plot(figure, content, "svg")
    return f"data:image/{form};base64,{base64.b64encode(content.getvalue()).decode()}"


# --- the plots -------------------------------------------------------------------------------------------------------


def plain(text: str, most: int = 40) -> str:
    """A name on one line, cut to `most` characters, that matplotlib shows literally: a dollar sign would begin a formula."""
    text = " ".join(str(text).split())
    return (text if len(text) <= most else text[: most - 1] + "…").replace("$", r"\$")


def panels_for(datasets: list[str], height: float) -> tuple[Any, list[Axes]]:
    """A figure with a panel for each data set."""
    columns = min(len(datasets), _COLUMNS)
    rows = math.ceil(len(datasets) / columns)
    figure = new_figure(max(_PANEL * columns, 3.6), height * rows + 0.5, dpi=130)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in axes[len(datasets) :]:
        panel.set_axis_off()
    for panel, dataset in zip(axes, datasets, strict=False):
        plain_axes(panel)
        panel.tick_params(labelsize=8)
        panel.set_title(plain(dataset), fontsize=9)
    return figure, axes[: len(datasets)]


def add_legend(figure: Any, handles: list[Any]) -> None:
    """Above the panels, in as many columns as fit, four at most."""
    for columns in range(min(len(handles), 4), 0, -1):
        legend = figure.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False, fontsize=8)
        width = legend.get_window_extent(figure.canvas.get_renderer()).width
        if columns == 1 or width < 0.96 * figure.bbox.width:
            return
        legend.remove()


def _axis_label(text: str) -> str:
    """A name for the vertical axis of a panel, in lines no longer than the axis."""
    return textwrap.fill(plain(text, 60), 30)


def plot_differences(contents: ReportContents, metric: str) -> Any:
    """Differences of all arms from the baseline in one metric, coloured where the adjusted test shows one."""
    baseline, rows = contents.study["baseline"], tables.rows_of(contents.summary, metric)
    found = {(row["arm"], row["dataset"]): row for row in rows if row["arm"] != baseline}
    datasets, arms = shown_datasets(contents.datasets, found), [arm for arm in contents.study["arms"] if arm != baseline]
    shown = arms[:_MOST_ARMS]
    figure, panels = panels_for(datasets, 0.6 + 0.24 * max(len(shown), 2))
    for index, (axes, dataset) in enumerate(zip(panels, datasets, strict=True)):
        axes.axvline(0, color=DARK, linewidth=1)
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_yticks(range(len(shown)), [plain(arm, 24) * (index % _COLUMNS == 0) for arm in shown], fontsize=8)
        for height, arm in enumerate(shown):
            if row := found.get((arm, dataset)):
                _plot_difference(axes, height, row)
    sides = _SIDES[better_of(metric)]
    cut = f"; the first {len(shown)} of {counted(len(arms), 'arm')}" if len(shown) < len(arms) else ""
    figure.supxlabel(f"← {sides[0]}    difference from {plain(baseline, 20)}    {sides[1]} →{cut}", fontsize=9)
    legend = {word: _VERDICT_COLORS[word] for word in sorted(sides)} | {"the test shows no difference": GREY}
    handles = [panels[0].plot([], [], "o-", color=color, markersize=5, label=word)[0] for word, color in legend.items()]
    add_legend(figure, handles)
    return figure


def _plot_difference(axes: Axes, height: float, row: dict[str, Any]) -> None:
    """Grey where the adjusted test shows no difference."""
    word, diff = word_of(row), row["diff"]
    color = _VERDICT_COLORS.get(word or "", GREY)
    if diff is None:
        axes.text(0, height, f" {word if word == DIVERGED else 'no test'}", va="center", fontsize=8, color=DARK)
        return
    if row["diff_low"] is not None:
        axes.plot([row["diff_low"], row["diff_high"]], [height] * 2, color=color, linewidth=2)
    axes.plot(diff, height, "o", color=color, markersize=5)


def plot_curves(contents: ReportContents, kind: CurveKind) -> Any:
    """Mean curves with their bands; losses on a logarithmic scale if all means are positive."""
    shown, styles = contents.curves[kind.name], contents.styles
    datasets = shown_datasets(contents.datasets, shown)
    figure, panels = panels_for(datasets, 2.4)
    for axes, dataset in zip(panels, datasets, strict=True):
        axes.set_xlabel("update", fontsize=8)
        axes.margins(x=0.01)
        for arm, style in styles.items():
            if curve := shown.get((arm, dataset)):
                axes.fill_between(curve.updates, curve.low, curve.high, color=style.color, alpha=0.15, linewidth=0)
                axes.plot(curve.updates, curve.mean, color=style.color, linestyle=style.line, linewidth=1.2)
        if kind.is_loss and all(curve.mean.min() > 0 for curve in shown.values()):
            plain_log_scale(axes)
    panels[0].set_ylabel(_axis_label(kind.axis), fontsize=8)
    handles = [
        panels[0].plot([], [], color=styles[arm].color, linestyle=styles[arm].line, label=plain(arm))[0]
        for arm in shown_arms(styles, shown)
    ]
    add_legend(figure, handles)
    return figure


def plot_seeds(contents: ReportContents, metric: str) -> Any:
    """Every seed as a point, and the mean with its 95 % interval."""
    values, styles = contents.values[metric], contents.styles
    datasets, arms = shown_datasets(contents.datasets, values), shown_arms(styles, values)
    row_of = {(row["arm"], row["dataset"]): row for row in tables.rows_of(contents.summary, metric)}
    scores = {cell: np.array([value for _, value in found]) for cell, found in values.items()}
    names = [plain(arm, 24) for arm in arms]
    is_wide = _CHARACTER * (max(map(len, names)) + 2) * len(arms) > _PANEL - _LEFT_OF_PANEL
    turned: dict[str, Any] = {"rotation": 40, "ha": "right"} if is_wide else {}
    figure, panels = panels_for(datasets, 2.6)
    for axes, dataset in zip(panels, datasets, strict=True):
        every = np.concatenate([found for (_, own), found in scores.items() if own == dataset])
        is_log = every.max() > 20 * every.min() > 0  # a linear scale would hide small values
        for x, arm in enumerate(arms):
            if (arm, dataset) in scores:
                found, style, row = scores[arm, dataset], styles[arm], row_of[arm, dataset]
                side_by_side = x + np.linspace(-0.25, 0.25, len(found)) * (len(found) > 1)
                axes.plot(side_by_side, found, "o", color=style.color, markersize=3, alpha=0.6, mew=0)
                axes.plot([x - 0.33, x + 0.33], [found.mean()] * 2, color=style.color, linewidth=1.5)
                if row["ci_low"] is not None and not (is_log and row["ci_low"] <= 0):
                    axes.plot([x] * 2, [row["ci_low"], row["ci_high"]], color=style.color, linewidth=1)
        if is_log:
            plain_log_scale(axes)
        axes.set_xticks(range(len(arms)), names, fontsize=8, **turned)
        axes.grid(axis="x", visible=False)
    panels[0].set_ylabel(_axis_label(contents.labels[metric]), fontsize=8)
    return figure


def plot_samples(contents: ReportContents) -> Any:
    """Samples of the lowest seed: a row for each arm, a column for each data set, with one scale per data set."""
    chosen = {cell: runs[0] for cell, runs in by_cell(filter(_has_samples, compared(contents.results))).items()}
    every = shown_arms(contents.styles, chosen)
    arms, datasets = every[:_MOST_ARMS], shown_datasets(contents.datasets, chosen)
    side = min(1.5, 6.4 / len(datasets))
    figure = new_figure(side * len(datasets) + 0.4, side * len(arms) + 0.4, dpi=130)
    grid = figure.subplots(len(arms), len(datasets), squeeze=False)
    for dataset, column in zip(datasets, grid.T, strict=True):
        samples = {arm: chosen[arm, dataset].samples for arm in arms if (arm, dataset) in chosen}
        points = {arm: np.asarray(of_arm["points"], float) for arm, of_arm in samples.items() if of_arm.get("points")}
        limits = _limits_of([*points.values()])
        for axes, arm in zip(column, arms, strict=True):
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_alpha(0.3)
            if arm in points:
                draw_points(axes, points[arm], limits, contents.styles[arm].color)
            elif arm in samples:
                with Image.open(io.BytesIO(base64.b64decode(samples[arm]["png"]))) as image:
                    axes.imshow(np.asarray(image.convert("RGB")))
            else:
                axes.text(0.5, 0.5, "none", ha="center", va="center", fontsize=8, color=DARK, transform=axes.transAxes)
        column[0].set_title(plain(dataset, 16), fontsize=9)
    for axes, arm in zip(grid[:, 0], arms, strict=True):
        axes.set_ylabel(plain(arm, 16), fontsize=9)
    if len(arms) < len(every):
        figure.supxlabel(f"the first {len(arms)} of {counted(len(every), 'arm')}", fontsize=9)
    return figure


def _limits_of(points: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper limits of both axes, without the farthest points, which would shrink the rest to a dot."""
    together = np.concatenate(points) if points else np.empty((0, 2))
    together = together[np.isfinite(together).all(axis=1)]
    if not len(together):
        return np.zeros(2), np.ones(2)
    lowest, highest = np.quantile(together, [0.005, 0.995], axis=0)
    margin = np.where(highest > lowest, 0.08 * (highest - lowest), 0.5)
    return lowest - margin, highest + margin
