"""Extension of a grid of learning rates, or of factors, beyond its edges."""

import math
from collections.abc import Sequence

_REL_TOL = 1e-9


def next_beyond(grid: Sequence[float], higher: bool) -> float | None:
    """
    The next number above or below a grid; `None` beyond the range of floats.

    A grid whose last two numbers are neighbours in 1, 3, 10, 30 continues that series, and so does a single number. Any
    other grid continues by the ratio of its last two.
    """
    *inner, edge = sorted(grid, reverse=not higher)
    # Numbers that agree to nearly all digits have no ratio to go on by.
    if not inner or _are_neighbours(inner[-1], edge, higher) or math.isclose(inner[-1], edge, rel_tol=1e-11):
        number = _next_in_series(edge, higher)
    else:
        number = float(f"{edge * (edge / inner[-1]):.12g}")
    is_beyond = edge < number < math.inf if higher else 0 < number < edge
    return number if is_beyond else None


def extended(grid: Sequence[float], extensions: int) -> tuple[float, ...]:
    """A grid with this many numbers added on both sides, within the range of floats."""
    numbers = list(grid)
    for higher in (False, True):
        for _ in range(extensions):
            if (number := next_beyond(numbers, higher)) is None:
                break
            numbers.append(number)
    return tuple(numbers)


def _are_neighbours(inner: float, edge: float, higher: bool) -> bool:
    there, back = _next_in_series(inner, higher), _next_in_series(edge, not higher)
    return math.isclose(there, edge, rel_tol=_REL_TOL) and math.isclose(back, inner, rel_tol=_REL_TOL)


def _next_in_series(number: float, higher: bool) -> float:
    """The nearest of 1, 3, 10, 30, ..., 0.3, 0.1, ... above or below a number, as a float literal."""
    exponent = math.floor(math.log10(number))
    series = [float(f"{digit}e{exponent + shift}") for shift in (-1, 0, 1) for digit in (1, 3)]
    if higher:
        return min(other for other in series if other > number * (1 + _REL_TOL))
    return max(other for other in series if other < number * (1 - _REL_TOL))
