"""A learning-rate curve in words."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ..core.words import times

_SMALLEST_TURN = 0.02  # of the highest rate
_MOST_TURNS = 4  # that are told one by one


def describe_curve(lr: np.ndarray) -> str:
    """First, highest and last rate, and where the curve turns in between."""
    highest = float(np.nanmax(lr))
    peak, end = int(np.nanargmax(lr >= highest * (1 - 1e-9))), len(lr) - 1
    last = f"at the last ({100 * lr[-1] / highest:.3g} % of the highest)"
    turns = turning_points(lr, _SMALLEST_TURN * highest)
    if not turns or turns == [peak]:
        return f"{lr[0]:.4g} at update 0, highest at update {peak:,} ({highest:.4g}), {lr[-1]:.4g} {last}"
    parts = [f"{lr[0]:.4g} at update 0{'' if peak else ' (the highest)'}"]
    moves = [*pairwise([0, *turns, end])]
    if len(turns) > _MOST_TURNS:
        parts += [f"highest at update {peak:,} ({highest:.4g})"] if peak else []
        return ", ".join([*parts, _repeated(lr, moves), f"{lr[-1]:.4g} {last}"])
    for before, index in moves:
        verb = f"{'then ' if index == end else ''}{'falls' if lr[index] < lr[before] else 'rises'}"
        where = last if index == end else f"at update {index:,}{' (the highest)' if index == peak else ''}"
        parts.append(f"{verb} to {lr[index]:.4g} {where}")
    return ", ".join(parts)


def _repeated(lr: np.ndarray, moves: list[tuple[int, int]]) -> str:
    """A phrase for a curve that falls and rises often."""
    rises = [(low, top) for low, top in moves[1:] if lr[top] > lr[low]]
    lowest, highest = min(lr[low] for low, _ in rises), max(lr[top] for _, top in rises)
    if all(top - low == 1 for low, top in rises):
        return f"restarts {times(len(rises))} from {lowest:.4g}, first at update {rises[0][1]:,}"
    return f"falls and rises again {times(len(rises))} between {lowest:.4g} and {highest:.4g}"


def turning_points(lr: np.ndarray, smallest: float) -> list[int]:
    """The updates where a curve turns, without turns after which it changes by less than `smallest`."""
    values = lr.tolist()
    turns: list[int] = []
    low = high = direction = 0
    for index, value in enumerate(values):
        high = index if direction >= 0 and value > values[high] else high
        low = index if direction <= 0 and value < values[low] else low
        if direction >= 0 and values[high] - value >= smallest:
            turns.append(high)
            direction, low = -1, index
        elif direction <= 0 and value - values[low] >= smallest:
            turns.append(low)
            direction, high = 1, index
    return [index for index in turns if index]
