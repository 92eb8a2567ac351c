"""Plots by noise level: heat maps over training, and the validation loss over timesteps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ..core.plotting import new_figure, plain_log_labels, plain_log_scale, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_COLUMNS = 120


class _Rows:
    def __init__(self, table: pa.Table):
        self._table = table
        self.updates, self.bins = self._column("update", int), self._column("bin", int)
        first, last = self._column("first_timestep", int), self._column("last_timestep", int)
        self.edges = np.append(np.unique(first), last.max() + 1)

    def _column(self, key: str, kind: type) -> np.ndarray:
        """Numbers, with NaN for null; `to_numpy` of pyarrow imports pandas."""
        return np.array(self._table[key].to_pylist(), kind)

    def has(self, key: str) -> bool:
        return self._table[key].null_count < len(self._table)

    def grid(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Updates `(columns,)` and values `(bins, columns)` of the rows with `key`; NaN for bins without."""
        values = self._column(key, float)
        known = ~np.isnan(values)
        updates, columns = np.unique(self.updates[known], return_inverse=True)
        grid = np.full((len(self.edges) - 1, len(updates)), np.nan)
        grid[self.bins[known], columns] = values[known]
        return updates, grid


def _thinned(updates: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `_MAX_COLUMNS` columns, by averaging neighbours, and the edges of these columns."""
    count = min(_MAX_COLUMNS, len(updates))
    groups = np.array_split(np.arange(len(updates)), count)
    known = ~np.isnan(values)
    sums = np.stack([np.where(known, values, 0)[:, group].sum(axis=1) for group in groups], axis=1)
    counts = np.stack([known[:, group].sum(axis=1) for group in groups], axis=1)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    ends = [int(updates[group[-1]]) for group in groups]
    return np.array([min(0, int(updates[0]) - 1), *ends]), means


def _heat_map(axes: Axes, rows: _Rows, key: str, title: str, is_density: bool) -> None:
    from matplotlib.colors import LogNorm, Normalize

    columns, values = _thinned(*rows.grid(key))
    values = np.ma.masked_invalid(values)
    positive = values.compressed()[values.compressed() > 0]
    if is_density:
        uniform = (np.diff(rows.edges) / rows.edges[-1])[:, None]
        values = values / uniform
        # One scale for the expected (if known) and the drawn density, with uniform in the middle unless more is needed.
        most = _thinned(*rows.grid("asked_share" if rows.has("asked_share") else key))[1] / uniform
        norm: Normalize = Normalize(0, max(2.0, np.nanmax(most)))
    elif len(positive):
        values = np.ma.masked_less_equal(values, 0)
        norm = LogNorm(positive.min(), max(positive.max(), positive.min() * 1.01))
    else:
        norm = Normalize(0, 1)
    mesh = axes.pcolormesh(columns, rows.edges, values, norm=norm, cmap="viridis", rasterized=True)
    colors = axes.figure.colorbar(mesh, ax=axes, pad=0.02)
    if isinstance(norm, LogNorm):
        plain_log_labels(colors.ax.yaxis)
    axes.grid(False)
    axes.set_facecolor("#dddddd")  # for missing values
    axes.set_title(title, fontsize=8)
    axes.set(xlabel="update", ylabel="timestep (noise)")


def _mark_spikes(axes: Axes, rows: _Rows) -> None:
    updates, spikes = rows.grid("loss_spike")
    bins, columns = np.nonzero(spikes == 1)
    if len(bins):
        middles = (rows.edges[bins] + rows.edges[bins + 1]) / 2
        axes.plot(updates[columns], middles, "rx", markersize=5, label=f"spikes ({len(bins)})")
        axes.legend(fontsize=8, loc="upper right")


def _validation_lines(axes: Axes, rows: _Rows) -> None:
    """The validation loss over timesteps, at a few updates."""
    from matplotlib import colormaps

    key = "validation_loss_ema" if rows.has("validation_loss_ema") else "validation_loss"
    updates, values = rows.grid(key)
    shown = sorted({round(index) for index in np.linspace(0, len(updates) - 1, 5)})
    first, last = (updates[shown[index]] for index in (0, -1))
    middles = (rows.edges[:-1] + rows.edges[1:] - 1) / 2
    for number, index in enumerate(shown):
        color = colormaps["viridis"](0.9 * number / max(1, len(shown) - 1))
        axes.plot(middles, values[:, index], "o-", markersize=3, color=color)
    axes.set(xlabel="timestep (noise)")
    plain_log_scale(axes)
    axes.grid(alpha=0.25)
    weights = "EMA" if key.endswith("ema") else "raw"
    # Not a legend, which would cover curves.
    named = f"update {first:,}" if first == last else f"updates {first:,} (dark) to {last:,} (light)"
    title = f"validation loss, {weights} weights, fixed noise\n{named}"
    axes.set_title(title, fontsize=8)


def plot_timesteps(table: pa.Table, path: Path) -> None:
    """Plots losses, gradients and density by noise level, from `lrlab/timesteps.parquet`."""
    rows = _Rows(table)
    pairs = [("loss_mean", "validation_loss"), ("asked_share", "share"), ("grad_norm", "grad_noise_scale")]
    pairs = [pair for pair in pairs if any(map(rows.has, pair))]
    titles = {
        "loss_mean": "training loss, before weights",
        "asked_share": "expected density / uniform",
        "share": "drawn / uniform",
        "grad_norm": "gradient norm at fixed probes",
        "grad_noise_scale": "gradient noise scale, in images",
    }
    figure = new_figure(7.2, 2.2 * len(pairs), dpi=130, layout="tight")
    panels = figure.subplots(len(pairs), 2, squeeze=False)
    for axes, key in zip(panels.flatten(), (key for pair in pairs for key in pair), strict=True):
        if not rows.has(key):
            axes.remove()
        elif key == "validation_loss":
            _validation_lines(axes, rows)
        else:
            _heat_map(axes, rows, key, titles[key], is_density=key.endswith("share"))
        if key == "loss_mean" and rows.has(key):
            _mark_spikes(axes, rows)
    save_figure(figure, path)
