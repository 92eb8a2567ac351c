"""Curves as text: braille dots if colours distinguish the curves, else a character per curve, ASCII if need be.

Not plotext (5.3): it takes 0.2 s to import and 0.3 s to plot 10,000 updates, its legend covers the curves, curves look the
same without colours, and it has no ASCII mode.
"""

import itertools
import string
from collections.abc import Sequence

import numpy as np

# Bits of a braille character, by row and column of the dot.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MARKS = {True: "●○◆◇▲△■□" + string.ascii_lowercase, False: "*o+x#@%=" + string.ascii_lowercase}
_COLORS = (36, 33, 35, 32, 34, 31)


def can_encode(encoding: str | None) -> bool:
    """Whether `encoding` can represent the characters of a plot."""
    try:
        (_MARKS[True] + "\u28ff│└─").encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def terminal_plot(
    curves: dict[str, np.ndarray],
    title: str,
    width: int = 80,
    height: int = 12,
    from_zero: bool = True,
    unicode: bool = True,
    color: bool = False,
) -> str:
    """
    Curves of equal length (values by label) over their index, with axes and a legend, as text.

    `width` is in characters, `height` in lines without axis and legend; `from_zero` starts the vertical axis at 0.
    """
    values = list(curves.values())
    low, high = float(min(map(np.min, values))), float(max(map(np.max, values)))
    if from_zero or low == high:
        low = min(low, 0.0)
    labels = f"{high:.3g}", f"{low:.3g}"
    margin = max(map(len, labels)) + 1
    columns = max(10, width - margin - 2)
    fine = unicode and (color or len(values) == 1)
    cells = _cells(values, low, high, columns, height, (4, 2) if fine else (1, 1))

    def paint(text: str, index: int) -> str:
        return f"\033[{_COLORS[index % len(_COLORS)]}m{text}\033[0m" if color else text

    def character(row: int, column: int) -> str:
        owners = [index for index, cell in enumerate(cells) if cell[row, column]]
        if not owners:
            return " "
        # Curves that coincide take turns.
        owner = owners[column % len(owners)]
        dots = np.bitwise_or.reduce([cell[row, column] for cell in cells])
        return paint(chr(0x2800 + dots) if fine else _mark(owner, unicode), owner)

    bar, corner, dash = "│└─" if unicode else "|+-"
    rows = [f"{labels[0] if row == 0 else '':>{margin}} {bar}" for row in range(height)]
    lines = [row + "".join(character(index, column) for column in range(columns)).rstrip() for index, row in enumerate(rows)]
    last = str(len(values[0]) - 1)
    axis = f"{labels[1]:>{margin}} {corner}{dash * columns}"
    ends = " " * (margin + 2) + "0" + "update".center(columns - len(last) - 1) + last
    keys = [f"{paint('─' * 2 if fine else _mark(index, unicode), index)} {label}" for index, label in enumerate(curves)]
    legend = [" " * (margin + 2) + key for key in keys] if len(keys) > 1 else []
    return "\n".join([title, *lines, axis, ends, *legend])


def _mark(index: int, unicode: bool) -> str:
    return _MARKS[unicode][index % len(_MARKS[unicode])]


def _cells(
    curves: Sequence[np.ndarray], low: float, high: float, columns: int, height: int, dots: tuple[int, int]
) -> list[np.ndarray]:
    """For each curve, the dots of each character that it covers, as bits; a jump is a vertical line."""
    down, across = dots
    grids = []
    for curve in curves:
        rows = np.rint((high - curve) / ((high - low) or 1.0) * (height * down - 1)).astype(int)
        edges = np.arange(columns * across + 1) * len(curve) // (columns * across)
        grid, last = np.zeros((height, columns), int), rows[0]
        for x, (begin, end) in enumerate(itertools.pairwise(edges)):
            part = rows[begin : max(end, begin + 1)]
            for y in range(min(part.min(), last + 1), max(part.max(), last - 1) + 1):
                grid[y // down, x // across] |= _DOTS[y % down][x % across]
            last = part[-1]
        grids.append(grid)
    return grids
