"""Whether a curve was still falling at the end of a run."""

import numpy as np

LAST_PART = 0.2  # of the updates of a run
# Share of a curve's range. exp(-t / T) falls by 4 % in the last fifth of 3 T, and by 2 % in that of 4 T.
STILL_FALLING = 0.03
_FEWEST_POINTS = 3  # for a slope with a standard error


def has_end(updates: np.ndarray) -> bool:
    """Whether the last part of a curve has enough points to tell a fall from noise."""
    return len(updates) > 0 and int(_is_last(updates).sum()) >= _FEWEST_POINTS


def still_falling(updates: np.ndarray, values: np.ndarray) -> bool:
    """
    Whether a curve falls over its last part by more than `STILL_FALLING` of its range, and by more than its noise.

    Both arrays are `(num,)`, finite, and of a curve that [`has_end`]. The fall is that of the regression line through the
    last part, whose slope must be two standard errors below 0.
    """
    from scipy import stats

    last = _is_last(updates)
    line = stats.linregress(updates[last], values[last])
    fall = -line.slope * np.ptp(updates[last])
    return bool(line.slope < -2 * line.stderr and fall > STILL_FALLING * np.ptp(values))


def _is_last(updates: np.ndarray) -> np.ndarray:
    return updates >= (1 - LAST_PART) * updates[-1]
