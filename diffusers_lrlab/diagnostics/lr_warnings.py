"""Warnings of a bad learning rate from the log of a run, with remedies. They do not change the run."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.words import counted

_WINDOW = 20  # rows of the log
_NOT_FALLEN, _RISEN, _SWINGS, _SWING_GROWTH = 0.95, 1.25, 0.1, 3.0
_WILD = 0.5  # swings that need not have grown
_CLIPPED, _SPIKES = 0.9, 5
_FIRST = 50  # updates: losses first logged later have fallen before


def find_lr_warnings(
    rows: Sequence[dict[str, Any]], warmup_updates: int, num_updates: int, max_grad_norm: float, still: bool = True
) -> dict[str, str]:
    """
    Warnings about the learning rate from the rows of `metrics.jsonl` so far, by name ("not_falling", "rising", "swinging",
    "clipped", "spikes"). Empty before 40 rows, and before a fifth of the run.

    They rest on medians and median deviations, which single batches do not move. Losses are `still` if their timesteps and
    weights have the same distribution throughout: those of a curriculum may rise because it moves to harder ones.
    """
    rows = [row for row in rows if "loss" in row]
    if len(rows) < 2 * _WINDOW or rows[-1]["update"] < max(num_updates / 5, 2 * warmup_updates):
        return {}
    losses = np.array([row["loss"] for row in rows])
    windows = np.lib.stride_tricks.sliding_window_view(losses, _WINDOW)
    medians = np.median(windows, axis=1)
    at = f"at update {rows[-1]['update']}, learning rate {rows[-1]['lr']:.3g}"
    warnings = _trend_warning(rows, losses, medians, at) if still else {}
    if swings := _swings(windows, medians):
        scatter, growth = swings
        compared = f", {growth:.1f} times as much as in calmer rows" if growth > _SWING_GROWTH else ""
        warnings["swinging"] = (
            f"The loss swings by {100 * scatter:.0f} % from row to row {at}{compared}. Lower --learning_rate or "
            "--max_grad_norm, or use larger batches."
        )
    norms = np.array([row["grad_norm"] for row in rows[-_WINDOW:]])
    share = float(np.mean(norms > max_grad_norm)) if max_grad_norm else 0.0
    if share >= _CLIPPED:
        warnings["clipped"] = (
            f"Nearly all gradients are clipped (their norm is {np.median(norms):.3g}, --max_grad_norm {max_grad_norm:g}) "
            f"{at}: only their direction counts. Raise --max_grad_norm, or lower --learning_rate."
        )
    spiked = [row["loss_spike_bins"] for row in rows if row.get("loss_spike_bins")]
    if len(spiked) >= max(_SPIKES, 0.02 * len(rows)):
        bins = [index for row in spiked for index in row]
        most = max(set(bins), key=bins.count)
        warnings["spikes"] = (
            f"{counted(len(spiked), 'row')} of the log with loss spikes so far, mostly in bin {most} of the noise levels (0 "
            f"has least noise), {at}. Lower --learning_rate, or weight this bin less (--timestep_lr weight:...)."
        )
    return warnings


def _trend_warning(rows: list[dict[str, Any]], losses: np.ndarray, medians: np.ndarray, at: str) -> dict[str, str]:
    """The warning that the loss does not fall, or rises again, if any."""
    start, now, best = float(np.median(losses[:3])), medians[-1], int(np.argmin(medians))
    if now > _NOT_FALLEN * start and rows[2]["update"] <= _FIRST:
        return {
            "not_falling": f"The loss has not fallen: {start:.3g} in the first rows, {now:.3g} {at}. The rate may be far "
            "too low, or too high to learn; test it with `lrlab find-lr`."
        }
    if now > _RISEN * medians[best]:
        return {
            "rising": f"The loss has risen from {medians[best]:.3g} around update {rows[best + _WINDOW // 2]['update']} to "
            f"{now:.3g} {at}. Lower --learning_rate, or use a schedule that falls earlier."
        }
    return {}


def _swings(windows: np.ndarray, medians: np.ndarray) -> tuple[float, float] | None:
    """Scatter of the last rows over their median, and its growth since calmer rows; `None` if both are usual."""
    steps = np.abs(np.diff(windows, axis=1))
    scatter = np.median(steps, axis=1) / np.maximum(np.abs(medians), 1e-12)
    # The calmest of many windows is so by chance; the calmest quarter is not.
    growth = scatter[-1] / max(float(np.quantile(scatter, 0.25)), 1e-12)
    swings = scatter[-1] > _WILD or (scatter[-1] > _SWINGS and growth > _SWING_GROWTH)
    return (float(scatter[-1]), growth) if swings else None
