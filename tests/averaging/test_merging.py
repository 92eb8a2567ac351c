"""Weights of merged checkpoints against the decays that they stand for."""

import numpy as np
import pytest
from tables import cases

from diffusers_lrlab.averaging.merging import MERGES, merge_weights

SQRT = [0.4082, 0.1691, 0.1298, 0.1094, 0.0964, 0.0871]  # of 1-sqrt, known


def test_known_weights():
    np.testing.assert_allclose(merge_weights([0, 10, 20, 30, 40, 50], "1-sqrt"), SQRT, atol=5e-5)
    np.testing.assert_allclose(merge_weights([5, 6, 7, 8], "linear"), 4 * [0.25], rtol=1e-12)
    np.testing.assert_allclose(merge_weights([5, 6, 9], "uniform"), 3 * [1 / 3], rtol=1e-12)
    np.testing.assert_allclose(merge_weights([0, 10, 40], "linear"), [1 / 6, 1 / 2, 1 / 3], rtol=1e-12)


@cases("name", MERGES)
def test_a_merge_is_a_run_whose_rate_fell(name):
    """By steps of random gradients at a constant rate, and by the same gradients at the falling one."""
    rng, num, every = np.random.default_rng(0), 5, 7
    steps = rng.normal(size=(num - 1) * every)
    path = np.concatenate([[0.0], -np.cumsum(steps)])
    updates = np.arange(num) * every
    weights = merge_weights(updates.tolist(), name)
    assert weights.sum() == pytest.approx(1, rel=1e-12)
    assert (weights >= 0).all()
    rates = np.repeat(np.cumsum(weights[::-1])[::-1][1:], every)
    assert (np.diff(rates) <= 0).all()
    assert weights @ path[updates] == pytest.approx(-(rates * steps).sum(), rel=1e-12)
    if name == "1-sqrt":
        np.testing.assert_allclose(rates[::every], 1 - np.sqrt(np.arange(1, num) / num), rtol=1e-12)
