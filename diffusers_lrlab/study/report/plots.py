"""The plots of a report: differences from the baseline, curves, seeds and ranks; and how they are saved."""

import io
import math
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ...core.errors import did_you_mean, must_be
from ...core.plotting import (
    BLUE,
    DARK,
    GREEN,
    GREY,
    ORANGE,
    SMALLEST_TEXT,
    new_figure,
    plain_axes,
    plain_log_scale,
    smallest_text,
)
from ...core.ranges import Range
from ...core.words import counted
from ...evaluation.metrics import better_of
from ..analysis.verdicts import DIVERGED, word_of
from ..spec.spec import Cell
from .curves import CurveKind, MeanCurve, Style, shown_arms, shown_datasets, spans_decades

_MOST_ROWS_OF_DIFFERENCES = 40
_NARROWEST, _NARROWEST_PANEL = 3.6, 2.2  # inches; as wide as a phone, at the size of print
_CHARACTER, _LEFT_OF_PANEL = 0.068, 0.8  # inches; of text of 8 points, and for the numbers and name of an axis
_ROOM_OF_LEGEND = 0.96  # of the width of a figure
_VERDICT_COLORS = {"better": BLUE, "worse": ORANGE, "higher": GREEN, "lower": GREEN}


def plain(text: str, most: int = 40) -> str:
    """A name on one line, cut to `most` characters, that matplotlib shows literally: a dollar sign would begin a formula."""
    text = " ".join(str(text).split())
    return (text if len(text) <= most else text[: most - 1] + "…").replace("$", r"\$")


def axis_label(text: str) -> str:
    """A name for the vertical axis of a panel, in lines no longer than the axis."""
    return textwrap.fill(plain(text, 60), 30)


class Figures(NamedTuple):
    """How plots are saved for a paper."""

    format: str  # in `FIGURE_FORMATS`
    width: float | None = None  # of the page's text, in inches; `None` leaves each plot as wide as in the report
    dpi: int = 300  # of PNGs, and of samples in the other formats


FIGURE_FORMATS = ("pdf", "png", "svg")
FIGURE_WIDTHS, FIGURE_DPIS = Range("[2, 40]"), Range("[50, 1200]")
# Embedded TrueType fonts, as journals refuse Type 3, and reproducible files.
_FILE_SETTINGS: Any = {"pdf.fonttype": 42, "svg.hashsalt": "diffusers_lrlab"}
_NO_DATE = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}


def check_figures(figures: Figures) -> None:
    """Raises a `LabError` for a format, width or resolution that is not allowed."""
    if figures.format not in FIGURE_FORMATS:
        hint = did_you_mean(figures.format, FIGURE_FORMATS).strip() or "pdf suits LaTeX, svg the web"
        raise must_be("--figures", figures.format, f"one of {', '.join(FIGURE_FORMATS)}", hint)
    FIGURE_WIDTHS.check("--figure_width", figures.width, "it is in inches")
    FIGURE_DPIS.check("--dpi", figures.dpi, "it is in dots per inch")


@contextmanager
def _missing_glyphs_ignored() -> Iterator[None]:
    """Matplotlib shows boxes for characters that its font lacks; no reason to warn or stop."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def save_figures(figure: Any, path: Path, figures: Figures) -> None:
    """Saves a plot for a paper."""
    with _missing_glyphs_ignored(), rc_context(_FILE_SETTINGS):
        figure.savefig(path, format=figures.format, dpi=figures.dpi, metadata=_NO_DATE[figures.format])


def as_svg(figure: Any) -> bytes:
    """A plot for the page, which is as sharp at any size."""
    content = io.BytesIO()
    with _missing_glyphs_ignored(), rc_context(_FILE_SETTINGS):
        figure.savefig(content, format="svg", metadata=_NO_DATE["svg"])
    return content.getvalue()


def save_plot(figure: Any, path: Path) -> None:
    """Saves a plot of the report as a small PNG."""
    with _missing_glyphs_ignored():
        figure.canvas.draw()
    image = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    if not any(axes.images for axes in figure.axes):  # a palette makes lines and text a third as large, and spoils photos
        image = image.quantize(dither=Image.Dither.NONE)
    about = PngInfo()
    about.add_text(SMALLEST_TEXT, smallest_text(figure))
    image.save(path, optimize=True, dpi=(figure.dpi, figure.dpi), pnginfo=about)


def _num_columns(num_panels: int, width: float | None) -> int:
    columns = min(num_panels, 2)
    return columns if width is None else max(1, min(columns, int(width / _NARROWEST_PANEL)))


def panels_for(datasets: list[str], height: float, width: float | None) -> tuple[Any, list[Axes]]:
    """A figure with a panel for each data set, of this width or of one that suits them."""
    count = len(datasets)
    columns = _num_columns(count, width)
    rows = math.ceil(count / columns)
    figure = new_figure(width or max(3.4 * columns, _NARROWEST), height * rows + 0.5, dpi=130)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in axes[count:]:
        panel.set_axis_off()
    for panel, dataset in zip(axes[:count], datasets, strict=True):
        plain_axes(panel)
        panel.tick_params(labelsize=8)
        panel.set_title(plain(dataset), fontsize=9)
    return figure, axes[:count]


def add_legend(figure: Any, handles: list[Any]) -> None:
    """Above the panels, in as many columns as fit, four at most."""
    for columns in range(min(len(handles), 4), 0, -1):
        legend = figure.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False, fontsize=8)
        width = legend.get_window_extent(figure.canvas.get_renderer()).width
        if columns == 1 or width < _ROOM_OF_LEGEND * figure.bbox.width:
            return
        legend.remove()


def plot_differences(
    rows: list[dict[str, Any]], datasets: list[str], arms: list[str], baseline: str, width: float | None = None
) -> Any:
    """Differences of all arms from the baseline in one metric, coloured where the adjusted test shows one."""
    found = {(row["arm"], row["dataset"]): row for row in rows}
    datasets = shown_datasets(datasets, found)
    shown = arms[:_MOST_ROWS_OF_DIFFERENCES]
    figure, panels = panels_for(datasets, 0.6 + 0.24 * max(len(shown), 2), width)
    for index, (axes, dataset) in enumerate(zip(panels, datasets, strict=True)):
        axes.axvline(0, color=DARK, linewidth=1)
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_ylim(len(shown) - 0.5, -0.5)
        is_labelled = index % _num_columns(len(datasets), width) == 0
        axes.set_yticks(range(len(shown)), [plain(arm, 24) * is_labelled for arm in shown], fontsize=8)
        for height, arm in enumerate(shown):
            if row := found.get((arm, dataset)):
                _plot_difference(axes, height, row)
    better = better_of(rows[0]["metric"])
    sides = {"smaller": ("better", "worse"), "larger": ("worse", "better"), "neither": ("lower", "higher")}[better]
    cut = f"; the first {len(shown)} of {counted(len(arms), 'arm')}" if len(shown) < len(arms) else ""
    figure.supxlabel(f"← {sides[0]}    difference from {plain(baseline, 20)}    {sides[1]} →{cut}", fontsize=9)
    legend = {word: _VERDICT_COLORS[word] for word in sorted(sides)} | {"the test shows no difference": GREY}
    handles = [panels[0].plot([], [], "o-", color=color, markersize=5, label=word)[0] for word, color in legend.items()]
    add_legend(figure, handles)
    return figure


def color_of(row: dict[str, Any]) -> str:
    """The colour of a difference: grey where the adjusted test shows none."""
    return _VERDICT_COLORS.get(word_of(row) or "", GREY)


def _plot_difference(axes: Axes, height: float, row: dict[str, Any]) -> None:
    word = word_of(row)
    color, diff = color_of(row), row["diff"]
    if diff is None:
        axes.text(0, height, f" {word if word == DIVERGED else 'no test'}", va="center", fontsize=8, color=DARK)
        return
    if row["diff_low"] is not None:
        axes.plot([row["diff_low"], row["diff_high"]], [height] * 2, color=color, linewidth=2)
    axes.plot(diff, height, "o", color=color, markersize=5)


def plot_curves(
    shown: dict[Cell, MeanCurve], datasets: list[str], styles: dict[str, Style], kind: CurveKind, width: float | None = None
) -> Any:
    """Mean curves with their bands; losses on a logarithmic scale if all means are positive."""
    datasets = shown_datasets(datasets, shown)
    figure, panels = panels_for(datasets, 2.4, width)
    for axes, dataset in zip(panels, datasets, strict=True):
        axes.set_xlabel("update", fontsize=8)
        axes.margins(x=0.01)
        for arm, style in styles.items():
            if curve := shown.get((arm, dataset)):
                axes.fill_between(curve.updates, curve.low, curve.high, color=style.color, alpha=0.15, linewidth=0)
                for seed in curve.seeds:
                    axes.plot(curve.seed_updates, seed, color=style.color, linewidth=0.3, alpha=0.4)
                axes.plot(curve.updates, curve.mean, color=style.color, linestyle=style.line, linewidth=1.2)
        if kind.is_loss and all(curve.mean.min() > 0 for curve in shown.values()):
            plain_log_scale(axes)
    panels[0].set_ylabel(axis_label(kind.axis), fontsize=8)
    handles = [
        panels[0].plot([], [], color=styles[arm].color, linestyle=styles[arm].line, label=plain(arm))[0]
        for arm in shown_arms(styles, shown)
    ]
    add_legend(figure, handles)
    return figure


def plot_seeds(
    values: dict[Cell, list[tuple[int, float]]], rows: list[dict[str, Any]], datasets: list[str], styles: dict[str, Style],
    label: str, width: float | None = None,
) -> Any:  # fmt: skip
    """Every seed as a point, the mean with its 95 % interval, and the score of held-out data."""
    datasets = shown_datasets(datasets, values)
    arms = shown_arms(styles, values)
    row_of = {(row["arm"], row["dataset"]): row for row in rows}
    scores = {cell: np.array([value for _, value in found]) for cell, found in values.items()}
    is_log = spans_decades(scores)
    figure, panels = panels_for(datasets, 2.6, width)
    for axes, dataset in zip(panels, datasets, strict=True):
        for x, arm in enumerate(arms):
            if (arm, dataset) in scores:
                found, style, row = scores[arm, dataset], styles[arm], row_of[arm, dataset]
                axes.plot(x + spread(len(found)), found, style.marker, color=style.color, markersize=3, alpha=0.6, mew=0)
                axes.plot([x - 0.33, x + 0.33], [found.mean()] * 2, color=style.color, linewidth=1.5)
                if row["ci_low"] is not None and not (is_log and row["ci_low"] <= 0):
                    axes.plot([x] * 2, [row["ci_low"], row["ci_high"]], color=style.color, linewidth=1)
        if is_log:
            plain_log_scale(axes)
        real = [row["floor"] for row in rows if row["dataset"] == dataset and row.get("floor") is not None]
        _plot_floor(axes, real[0] if real else None)
        names = [plain(arm, 24) for arm in arms]
        room = (figure.get_figwidth() / _num_columns(len(datasets), width) - _LEFT_OF_PANEL) / len(arms)
        turned: dict[str, Any] = {"rotation": 40, "ha": "right"} if _CHARACTER * (max(map(len, names)) + 2) > room else {}
        axes.set_xticks(range(len(arms)), names, fontsize=8, **turned)
        axes.grid(axis="x", visible=False)
    panels[0].set_ylabel(axis_label(label), fontsize=8)
    return figure


def _plot_floor(axes: Axes, floor: float | None) -> None:
    """The score of held-out data: a line among the seeds, or a number where it would press them into a corner."""
    if floor is None:
        return
    low, high = axes.get_ylim()
    margin = (high - low) / 2
    if low - margin <= floor <= high + margin and (floor > 0 or axes.get_yscale() == "linear"):
        axes.axhline(floor, color=DARK, linewidth=1, linestyle=":")
    else:
        axes.set_title(f"held-out: {floor:.3g}", loc="right", fontsize=8, color=DARK)


def spread(count: int) -> np.ndarray:
    """Offsets `(count,)` of points side by side, within a quarter of the middle; the same at every call."""
    return np.linspace(-0.25, 0.25, count) if count > 1 else np.zeros(count)


def plot_ranks(ranks: dict[str, Any], styles: dict[str, Style], width: float | None = None) -> Any:
    """
    Critical-difference diagram (Demšar, JMLR 7, 2006): arms on a line by mean rank, a bar over those that do not differ.

    Without a critical difference, only the arms are shown.
    """
    mean_ranks = sorted(ranks["mean_ranks"].items(), key=lambda item: item[1])
    groups, difference = ranks["groups"] or [], ranks["critical_difference"]
    top, depth = 1.2 + 0.35 * len(groups), 0.55 * math.ceil(len(mean_ranks) / 2) + 0.5
    figure = new_figure(width or 6.8, 0.42 * (top + depth) + 0.3, dpi=130)
    axes = figure.add_subplot()
    axes.set_axis_off()
    last = max(len(mean_ranks), 2)
    axes.set(xlim=(1 - 0.45 * (last - 1), last + 0.45 * (last - 1)), ylim=(-depth, top))
    axes.plot([1, last], [0, 0], color=DARK, linewidth=1)
    for tick in range(1, last + 1):
        axes.plot([tick, tick], [0, 0.12], color=DARK, linewidth=1)
        axes.text(tick, 0.2, str(tick), ha="center", va="bottom", fontsize=8, color=DARK)
    for index, (arm, rank) in enumerate(mean_ranks):
        _add_rank_label(axes, arm, rank, styles[arm].color, index, len(mean_ranks))
    for level, group in enumerate(groups):
        reached, height = [ranks["mean_ranks"][arm] for arm in group], 0.75 + 0.35 * level
        axes.plot([min(reached) - 0.03, max(reached) + 0.03], [height] * 2, color=DARK, linewidth=3.5)
    if difference is not None:
        axes.plot([1, 1 + difference], [top - 0.15] * 2, color=GREY, linewidth=1.5, marker="|", clip_on=False)
        axes.text(1 + difference, top - 0.15, f"  critical difference {difference:.3g}", va="center", fontsize=8, color=DARK)
    return figure


def _add_rank_label(axes: Axes, arm: str, rank: float, color: str, index: int, count: int) -> None:
    """Labels the better half on the left and the other on the right, so that leader lines do not cross."""
    last, is_left = max(count, 2), index < math.ceil(count / 2)
    depth = -0.55 * (1 + (index if is_left else count - 1 - index))
    edge = 1 - 0.06 * (last - 1) if is_left else last + 0.06 * (last - 1)
    axes.plot([rank, rank, edge], [0, depth, depth], color=color, linewidth=1.1)
    text = f"{plain(arm, 24)}  {rank:.2f} " if is_left else f" {rank:.2f}  {plain(arm, 24)}"
    axes.text(edge, depth, text, ha="right" if is_left else "left", va="center", fontsize=8)
