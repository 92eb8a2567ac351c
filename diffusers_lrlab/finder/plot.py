"""The finder's plot: losses over the rate with the suggestion of each rule, and losses by noise level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.plotting import BLUE, GREEN, GREY, ORANGE, new_figure, plain_axes
from .range_test import FinderConfig
from .readings import Sweep
from .suggestions import FEWEST, Suggestion, smooth_as_needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = {"steepest": (BLUE, "steepest"), "minimum_tenth": (ORANGE, "a tenth of the minimum"), "valley": (GREEN, "valley")}


def finder_figure(settings: FinderConfig, sweeps: Sequence[Sweep], suggestions: dict[str, Suggestion]) -> Any:
    """Tests as thin lines, their median as a thick one, a line and a band for each rule; noise levels below."""
    by_noise = sweeps[0].bins.shape[1] > 1
    figure = new_figure(7.2, 6.4 if by_noise else 4, dpi=150)
    upper, *lower = np.atleast_1d(
        figure.subplots(2 if by_noise else 1, 1, sharex=True, height_ratios=[3, 2] if by_noise else None)
    )
    for sweep in sweeps:
        upper.plot(sweep.lrs, sweep.losses, color=GREY, linewidth=0.7, alpha=0.8)
    shortest = min(len(sweep.lrs) for sweep in sweeps)  # the part that all tests reached
    lrs = sweeps[0].lrs[:shortest]
    losses = np.median([sweep.losses[:shortest] for sweep in sweeps], axis=0)
    finite = losses[: int(np.argmin(np.isfinite([*losses, np.nan])))]
    if len(finite) >= FEWEST:
        curve, _, _ = smooth_as_needed(finite)
        upper.plot(lrs[: len(curve)], curve, color="black", linewidth=1.8, label="median of the tests, smoothed")
    for name, suggestion in suggestions.items():
        color, label = _STYLES[name]
        if suggestion.lr is None:
            upper.plot([], [], color=color, linestyle=":", label=f"{label}: none")
            continue
        taken = ", taken" if name == settings.rule else ""
        upper.axvline(suggestion.lr, color=color, label=f"{label}: {suggestion.lr:.2g}{taken}")
        if suggestion.interval is not None:
            upper.axvspan(*suggestion.interval, color=color, alpha=0.1, linewidth=0)
    _style(upper, "loss of the probe" if settings.mode == "probe" else "training loss of a batch")
    upper.set_ylim(*_limits(losses))
    upper.legend(frameon=False, fontsize=8)
    for axes in lower:
        _draw_bins(axes, lrs, np.median([sweep.bins[:shortest] for sweep in sweeps], axis=0))
    (lower or [upper])[-1].set_xlabel("learning rate")
    figure.align_ylabels()
    return figure


def _draw_bins(axes: Axes, lrs: np.ndarray, bins: np.ndarray) -> None:
    from matplotlib import colormaps

    shares, num_bins = bins / bins[0], bins.shape[1]
    colors = colormaps["viridis"](np.linspace(0, 0.85, num_bins))
    names = ["least noise", *[""] * (num_bins - 2), "most noise"]
    for values, color, name in zip(shares.T, colors, names, strict=True):
        axes.plot(lrs, values, color=color, linewidth=1.2, label=name or None)
    _style(axes, "relative loss, by noise level")
    axes.set_ylim(0, min(1.6, 1.05 * float(shares[np.isfinite(shares)].max(initial=1))))
    axes.legend(frameon=False, fontsize=8, title="timesteps with", title_fontsize=8)


def _style(axes: Axes, label: str) -> None:
    axes.set(xscale="log", ylabel=label)
    plain_axes(axes)


def _limits(losses: np.ndarray) -> tuple[float, float]:
    """Limits that keep an explosion at the end from flattening the valley."""
    finite = losses[np.isfinite(losses)]
    low, start = (float(finite.min()), float(finite[0])) if len(finite) else (0.0, 1.0)
    margin = 0.05 * max(start - low, 1e-3 * abs(start))
    return low - 2 * margin, start + 6 * margin
