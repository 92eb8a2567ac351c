"""Shares, factors and p-values as text."""

import math

from .statistics import LEVEL

NONE = "–"
_DIGITS = 2  # of an interval's width


def percent(value: float, width: float | None = None, signed: bool = False) -> str:
    """A share in percent, rounded for an interval of this width; without one, to two digits."""
    return f"{_text(100 * value, 100 * abs(value if width is None else width), signed)} %"


def percent_range(low: float, high: float) -> str:
    """An interval of shares in percent."""
    width = 100 * (high - low)
    return f"{_text(100 * low, width, True)} to {_text(100 * high, width, True)} %"


def times(factor: float) -> str:
    return f"{factor:.2f} times"


def times_range(low: float, high: float) -> str:
    return f"{low:.2f} to {high:.2f}"


def probability(p: float | None) -> str:
    """A p-value; one below the level of the tests is never rounded up to it."""
    if p is None:
        return NONE
    text = f"{p:.3f}"
    if p < LEVEL <= float(text):
        return f"< {LEVEL:g}"
    return "< 0.001" if p < 0.001 else text


def _text(value: float, width: float, signed: bool) -> str:
    decimals = min(max(_DIGITS - 1 - math.floor(math.log10(width)), 0), 6) if width > 0 else 0
    rounded = round(value, decimals) + 0.0  # no minus before a 0
    return f"{rounded:{'+' if signed and rounded else ''}.{decimals}f}".replace("-", "−")
