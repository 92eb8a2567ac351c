"""Points of Gaussians, and the divergence between two of them."""

import math

import numpy as np


def normal(seed, n, dimension=2):
    return np.random.default_rng(seed).normal(size=(n, dimension))


def gaussian_kl(mean, scales, other_mean, other_scales):
    """In bits, of Gaussians with independent coordinates."""
    mean, scales, other_mean, other_scales = map(np.asarray, (mean, scales, other_mean, other_scales))
    squares = (scales**2 + (mean - other_mean) ** 2) / other_scales**2
    return float((squares - 1 + 2 * np.log(other_scales / scales)).sum() / 2 / math.log(2))
