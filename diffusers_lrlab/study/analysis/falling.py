"""Whether a run was long enough to say how it ends: the slope of its curve over the last part of it."""

import numpy as np

LAST_PART = 0.2  # of the updates of a run
# Of all that a curve changes over a run. exp(-t / T) falls by 4 % in the last fifth of 3 T, and by 2 % in that of 4 T.
STILL_FALLING = 0.03
_FEWEST_POINTS = 3  # that have a slope and a scatter around it


def has_end(updates: np.ndarray) -> bool:
    """Whether a curve has points enough in its last part to tell a fall from scatter."""
    return len(updates) > 0 and int(_is_last(updates).sum()) >= _FEWEST_POINTS


def still_falling(updates: np.ndarray, values: np.ndarray) -> bool:
    """
    Whether a curve falls over its last part by more than `STILL_FALLING` of its whole range, and by more than its scatter.

    Both are `(num,)`, finite, and of a curve that [`has_end`]. The fall is that of the line through the last part, and the
    slope has to be two standard errors below 0.
    """
    from scipy import stats

    last = _is_last(updates)
    line = stats.linregress(updates[last], values[last])
    fall = -line.slope * np.ptp(updates[last])
    return bool(line.slope < -2 * line.stderr and fall > STILL_FALLING * np.ptp(values))


def _is_last(updates: np.ndarray) -> np.ndarray:
    return updates >= (1 - LAST_PART) * updates[-1]
