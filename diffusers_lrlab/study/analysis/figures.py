"""Shares and p-values as text."""

import math

from .statistics import LEVEL

NONE = "–"


def percent(value: float) -> str:
    """A share in percent, to two digits."""
    width = 100 * abs(value)
    decimals = min(max(1 - math.floor(math.log10(width)), 0), 6) if width > 0 else 0
    rounded = round(100 * value, decimals) + 0.0  # no minus before a 0
    return f"{rounded:.{decimals}f} %".replace("-", "−")


def probability(p: float | None) -> str:
    """A p-value; one below the level of the tests is never rounded up to it."""
    if p is None:
        return NONE
    text = f"{p:.3f}"
    if p < LEVEL <= float(text):
        return f"< {LEVEL:g}"
    return "< 0.001" if p < 0.001 else text
