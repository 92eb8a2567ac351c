"""The plot of every schedule in the README: the learning rate relative to the peak, and the momentum where it is driven.

python docs/schedule_gallery.py docs/schedules.png
"""

import dataclasses
import math
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from diffusers_lrlab.core.plotting import BLUE, DARK, GREY, ORANGE, new_figure, save_figure
from diffusers_lrlab.core.spec import format_spec
from diffusers_lrlab.core.words import counted
from diffusers_lrlab.preview.schedules import Run, preview
from diffusers_lrlab.schedules.registries import SCHEDULERS

_COLUMNS = 4
_RUN = Run(num_updates=1000, num_warmup_steps=50, learning_rate=1e-4, beta1=0.95)
# Arguments for schedules whose defaults are not typical.
_EXAMPLES: dict[str, dict[str, Any]] = {
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"power": 2},
    "piecewise_constant": {"step_rules": "1:400,0.4:750,0.1"},
    "cosine_annealing_warm_restarts": {"T_0": 136, "T_mult": 2},
    "rex": {"d": 0.9},
    "piecewise": {"updates": [0.2, 0.7], "values": [1, 0.3]},
    "join": {"schedules": ["linear", "rex"], "boundaries": [0.4]},
}
_WIDEST = 30  # letters of arguments above a small plot
_CAPTION = (
    f"Relative to the optimizer's learning rate, over {counted(_RUN.num_updates, 'update')}, {_RUN.num_warmup_steps} of "
    f"them warm-up where there is one. Arguments are the defaults unless shown; momentum starts at {_RUN.beta1}. Schedules "
    "that follow the validation loss, at the end, are shown as if it never changed them."
)


def plot_gallery(path: Path) -> None:
    """Every schedule in a separate panel: learning rate relative to the peak, and momentum if the schedule sets it."""
    names = sorted(SCHEDULERS, key=lambda name: "feedback" in SCHEDULERS[name].traits)
    rows = math.ceil(len(names) / _COLUMNS)
    figure = new_figure(7.2, 1.2 * rows + 0.8, dpi=200)
    figure.get_layout_engine().set(wspace=0.06, hspace=0.06)
    panels = [*figure.subplots(rows, _COLUMNS, squeeze=False).flat]
    for index, (axes, name) in enumerate(zip(panels, names, strict=False)):
        _draw_panel(axes, name)
        axes.tick_params(labelbottom=index + _COLUMNS >= len(names))
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    keys = {
        "diffusers' own": {"color": DARK, "linewidth": 1.4},
        "added by diffusers_lrlab": {"color": BLUE, "linewidth": 1.4},
        "momentum (beta1), where it is driven": {"color": ORANGE, "linewidth": 0.9},
    }
    lines = [panels[0].plot([], [], label=label, **style)[0] for label, style in keys.items()]
    figure.legend(handles=lines, loc="outside upper left", ncols=2, frameon=False, fontsize=8)
    figure.supxlabel(textwrap.fill(_CAPTION, 116), x=0.01, ha="left", fontsize=8, color=DARK)
    save_figure(figure, path)


def _draw_panel(axes: Any, name: str) -> None:
    # Some have their own rise.
    warmup = 0 if SCHEDULERS[name].traits & {"no_warmup", "rises"} else _RUN.num_warmup_steps
    curves = preview(format_spec(name, _EXAMPLES.get(name, {})), dataclasses.replace(_RUN, num_warmup_steps=warmup))
    scales = curves.lr / _RUN.learning_rate
    top, color = max(1.0, scales.max()), DARK if "host" in SCHEDULERS[name].traits else BLUE
    axes.fill_between(np.arange(_RUN.num_updates), scales, color=color, alpha=0.1, linewidth=0)
    axes.plot(scales, color=color, linewidth=1.4)
    if curves.beta1 is not None:
        axes.plot(curves.beta1, color=ORANGE, linewidth=0.9)
    axes.set(xlim=(-15, _RUN.num_updates), ylim=(-0.03 * top, 1.08 * top), xticks=(0, 500, 1000))
    axes.set_yticks(sorted({0, 1, math.floor(top)}))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(color=GREY, linewidth=0.6)
    axes.tick_params(labelsize=8, color=GREY, width=0.6, length=2, labelcolor=DARK)
    axes.set_title(_in_lines(name), fontsize=8, loc="left", x=-0.04, pad=14)
    arguments = ", ".join(f"{key}={value}" for key, value in _EXAMPLES.get(name, {}).items()).replace("'", "")
    shown = textwrap.shorten(arguments, _WIDEST, placeholder=" ...")  # or it would reach into the next column
    small = axes.annotate(shown, (-0.04, 1.05), xycoords="axes fraction", fontsize=8, color=DARK)
    # Otherwise a long one would widen its column.
    small.set_in_layout(False)


def _in_lines(name: str) -> str:
    """A name that is broken after an underscore if it would reach into the next column."""
    lines = textwrap.wrap(name.replace("_", "_ "), _WIDEST)
    return "\n".join(line.replace(" ", "") for line in lines)


if __name__ == "__main__":
    plot_gallery(Path(sys.argv[1]))
