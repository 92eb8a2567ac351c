"""Pictures of what each noise level does: heat maps over training, and the validation loss over timesteps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..preview_plots import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_COLUMNS = 120


def _grid(rows: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Updates `(columns,)` and values `(bins, columns)` of the rows that have `key`; NaN where a bin has none."""
    having = {row["update"] for row in rows if row.get(key) is not None}
    updates = np.array(sorted(having))
    place = {update: index for index, update in enumerate(updates.tolist())}
    values = np.full((1 + max(row["bin"] for row in rows), len(updates)), np.nan)
    for row in rows:
        if row["update"] in place and row.get(key) is not None:
            values[row["bin"], place[row["update"]]] = row[key]
    return updates, values


def _thinned(updates: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `_MAX_COLUMNS` columns, by averaging neighbours; returns where columns begin and end."""
    count = min(_MAX_COLUMNS, len(updates))
    groups = np.array_split(np.arange(len(updates)), count)
    known = ~np.isnan(values)
    sums = np.stack([np.where(known, values, 0)[:, group].sum(axis=1) for group in groups], axis=1)
    counts = np.stack([known[:, group].sum(axis=1) for group in groups], axis=1)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    ends = [int(updates[group[-1]]) for group in groups]
    first = int(updates[0]) - (int(updates[1]) - int(updates[0]) if len(updates) > 1 else 1)
    return np.array([first, *ends]), means


def _heat_map(axes: Axes, rows: list[dict[str, Any]], key: str, title: str, log: bool, scale: float = 1.0) -> None:
    from matplotlib.colors import LogNorm, Normalize

    columns, values = _thinned(*_grid(rows, key))
    values = np.ma.masked_invalid(values * scale)
    starts = sorted({row["first_timestep"] for row in rows})
    edges = [*starts, 1 + max(row["last_timestep"] for row in rows)]
    positive = values.compressed()[values.compressed() > 0]
    if log and len(positive):
        values = np.ma.masked_less_equal(values, 0)
        norm: Normalize = LogNorm(positive.min(), max(positive.max(), positive.min() * 1.01))
    else:
        norm = Normalize(0, max(float(positive.max()) if len(positive) else 1.0, 1.0))
    mesh = axes.pcolormesh(columns, edges, values, norm=norm, cmap="viridis", rasterized=True)
    axes.figure.colorbar(mesh, ax=axes, pad=0.02)
    axes.grid(False)
    axes.set_facecolor("#dddddd")  # where there is nothing
    axes.set_title(title, fontsize=9)
    axes.set(xlabel="update", ylabel="timestep (noise)")


def _mark_spikes(axes: Axes, rows: list[dict[str, Any]]) -> None:
    spikes = [row for row in rows if row.get("loss_spike")]
    if spikes:
        middles = [(row["first_timestep"] + row["last_timestep"] + 1) / 2 for row in spikes]
        axes.plot([row["update"] for row in spikes], middles, "rx", markersize=5, label=f"spikes ({len(spikes)})")
        axes.legend(fontsize=7, loc="upper right")


def _validation_lines(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """The validation loss over timesteps, at a few moments."""
    from matplotlib import colormaps

    key = "validation_loss_ema" if any(row.get("validation_loss_ema") is not None for row in rows) else "validation_loss"
    updates, values = _grid(rows, key)
    shown = sorted({round(index) for index in np.linspace(0, len(updates) - 1, 5)})
    middles = [(row["first_timestep"] + row["last_timestep"]) / 2 for row in rows if row["update"] == updates[0]]
    middles = sorted(set(middles))
    for number, index in enumerate(shown):
        color = colormaps["viridis"](0.9 * number / max(1, len(shown) - 1))
        axes.plot(middles, values[:, index], "o-", markersize=3, color=color, label=f"{updates[index]} updates")
    axes.set(xlabel="timestep (noise)", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.grid(alpha=0.25)
    weights = "EMA" if key.endswith("ema") else "raw"
    axes.set_title(f"validation loss, {weights} weights, fixed noise", fontsize=9)
    axes.legend(fontsize=7, frameon=False)


def plot_timesteps(rows: list[dict[str, Any]], path: Path) -> None:
    """
    Losses, gradients and density by noise level.

    Args:
        rows (`list` of `dict`): Of `lrlab/timesteps.parquet`.
        path (`Path`): Of the picture.
    """
    num_bins = 1 + max(row["bin"] for row in rows)
    having = {key for row in rows for key, value in row.items() if value is not None}
    rows_of_panels = [("loss_mean", "validation_loss"), ("asked_share", "share"), ("grad_norm", "grad_noise_scale")]
    rows_of_panels = [pair for pair in rows_of_panels if having & set(pair)]
    titles = {
        "loss_mean": "training loss, unweighted",
        "asked_share": "density asked for / uniform",
        "share": "drawn / uniform",
        "grad_norm": "gradient norm at fixed probes",
        "grad_noise_scale": "gradient noise scale, in images",
    }
    figure = new_figure(9, 2.5 * len(rows_of_panels), dpi=130)
    panels = figure.subplots(len(rows_of_panels), 2, squeeze=False)
    for axes, key in zip(panels.flatten(), (key for pair in rows_of_panels for key in pair), strict=True):
        if key not in having:
            axes.remove()
        elif key == "validation_loss":
            _validation_lines(axes, rows)
        else:
            is_density = key.endswith("share")
            _heat_map(axes, rows, key, titles[key], not is_density, num_bins if is_density else 1)
        if key == "loss_mean" and key in having:
            _mark_spikes(axes, rows)
    save_figure(figure, path)
