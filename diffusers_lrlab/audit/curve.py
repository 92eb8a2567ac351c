"""A learning-rate curve in words."""

from __future__ import annotations

import numpy as np

from ..core.words import times

_SMALLEST_TURN = 0.02  # of the highest rate
_MOST_TURNS = 4  # that are told one by one


def describe_curve(lr: np.ndarray) -> str:
    """First, highest and last rate, and where the curve turns in between."""
    highest = float(np.nanmax(lr))
    peak = int(np.nanargmax(lr >= highest * (1 - 1e-9)))
    last = f"at the last ({100 * lr[-1] / highest:.3g} % of the highest)"
    turns = turning_points(lr, _SMALLEST_TURN * highest)
    if not turns or turns == [peak]:
        return f"{lr[0]:.4g} at update 0, highest at update {peak:,} ({highest:.4g}), {lr[-1]:.4g} {last}"
    if len(turns) > _MOST_TURNS:
        first = f"{lr[0]:.4g} at update 0{_if_highest(0, peak)}"
        first += f", highest at update {peak:,} ({highest:.4g})" if peak else ""
        return f"{first}, {_repeated(lr, turns)}, {lr[-1]:.4g} {last}"
    parts = [f"{lr[0]:.4g} at update 0{_if_highest(0, peak)}"]
    for before, index in zip([0, *turns], [*turns, len(lr) - 1]):  # noqa: B905
        verb = "falls" if lr[index] < lr[before] else "rises"
        where = last if index == len(lr) - 1 else f"at update {index:,}{_if_highest(index, peak)}"
        parts.append(f"{verb} to {lr[index]:.4g} {where}")
    return ", ".join(parts)


def _if_highest(index: int, peak: int) -> str:
    return " (the highest)" if index == peak else ""


def _repeated(lr: np.ndarray, turns: list[int]) -> str:
    """A phrase for a curve that falls and rises often."""
    is_low = [lr[index] < lr[after] for index, after in zip(turns, [*turns[1:], len(lr) - 1])]  # noqa: B905
    lows = [index for index, low in zip(turns, is_low) if low]  # noqa: B905
    tops = [lr[after] for index, after in zip(turns, [*turns[1:], len(lr) - 1]) if index in lows]  # noqa: B905
    lowest = min(lr[index] for index in lows)
    if all(after - index == 1 for index, after in zip(turns, [*turns[1:], len(lr) - 1]) if index in lows):  # noqa: B905
        return f"restarts {times(len(lows))} from {lowest:.4g}, first at update {lows[0] + 1:,}"
    return f"falls and rises again {times(len(lows))} between {lowest:.4g} and {max(tops):.4g}"


def turning_points(lr: np.ndarray, smallest: float) -> list[int]:
    """The updates where a curve turns, without turns after which it changes by less than `smallest`."""
    values = lr.tolist()
    moves = np.flatnonzero(np.diff(lr))
    turns: list[int] = []
    low = high = direction = 0
    for index in [*(moves + 1).tolist()]:
        value = values[index]
        high = index if direction >= 0 and value > values[high] else high
        low = index if direction <= 0 and value < values[low] else low
        if direction >= 0 and values[high] - value >= smallest:
            turns.append(high)
            direction, low = -1, index
        elif direction <= 0 and value - values[low] >= smallest:
            turns.append(low)
            direction, high = 1, index
    return [index for index in turns if index]
