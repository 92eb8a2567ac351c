"""Weights of checkpoints that are merged in place of a decay of the learning rate: WSM, arXiv 2507.17634.

With updates g_i at a constant rate, sum_j c_j theta_(n+j) = theta_n - rate * sum_i w_i g_i with w_i = c_i + c_(i+1) + ... :
the merged weights are those of a run whose rate fell as w, on gradients taken at the undecayed weights.
"""

import math
from collections.abc import Sequence

import numpy as np

MERGES = ("linear", "1-sqrt", "uniform")
_FALLEN = {"linear": lambda share: share, "1-sqrt": math.sqrt}  # how far the rate has fallen, by the share of the decay


def merge_weights(updates: Sequence[int], name: str) -> np.ndarray:
    """
    The weight of each checkpoint, in the order of their updates: float64 `(num,)`, of sum 1.

    "linear" and "1-sqrt" stand for a decay of that shape over the window; "uniform" weighs all alike, which for equally
    spaced checkpoints is the linear decay.
    """
    num = len(updates)
    if name == "uniform":
        return np.full(num, 1 / num)
    places = np.arange(num, dtype=np.float64)
    if num > 1:
        at = np.asarray(updates, np.float64)
        places = (at - at[0]) / (at[-1] - at[0]) * (num - 1)
    fallen = [_FALLEN[name](place / num) for place in [*places, num]]
    return np.diff(fallen)
