"""Points of Gaussians."""

import numpy as np


def normal(seed, n, dimension=2):
    return np.random.default_rng(seed).normal(size=(n, dimension))
