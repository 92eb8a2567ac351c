"""Common parts of all plots: palette, figures without a display, plain axes."""

from pathlib import Path
from typing import Any, Literal

from .environment import require_extra
from .files import atomic_file

# Colour-blind safe (Okabe and Ito), without yellow, which is too faint for a thin line on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
BLUE, ORANGE, GREEN, GREY, DARK = *COLORS[:3], "#999999", "#555555"
# No plot is wider than 7.2 inches or has text below 8 points, so that it can be read in a column of text.


def new_figure(width: float, height: float, dpi: int, layout: Literal["constrained", "tight"] = "constrained") -> Any:
    """A figure that needs no display; sizes in inches. The layout "tight" takes half the time, without a legend outside."""
    require_extra("plots", "Plotting", ["matplotlib"])
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure atomically, in the format of its name."""
    with atomic_file(path) as temporary:
        if path.suffix == ".png":
            figure.canvas.print_png(temporary)  # `savefig` draws twice, first to find the layout
        else:
            figure.savefig(temporary)


def plain_axes(axes: Any) -> None:
    """A light grid, and no lines at the top and at the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def plain_log_scale(axes: Any) -> None:
    """A logarithmic vertical axis with plain numbers."""
    axes.set_yscale("log")
    plain_log_labels(axes.yaxis)


def plain_log_labels(axis: Any) -> None:
    """Plain numbers (0.75, not 8e-01) on a logarithmic axis, between powers of ten, too, where there are few of these."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def _num_to_string(self, x: float, vmin: float, vmax: float) -> str:
            return f"{x:,g}"

    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain(minor_thresholds=(1, 0.4)))
    axis.set_tick_params(which="minor", labelsize=8)
