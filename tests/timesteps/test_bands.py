"""Learning rates and weights by bands of timesteps."""

import numpy as np

from diffusers_lrlab.timesteps.bands import TimestepLR


def test_bands_have_rates_and_weights_have_losses():
    banded, weight = (TimestepLR(form, [0.5, 2.0], [0.25]) for form in ("banded", "weight"))
    assert weight.weights(8).tolist() == [0.5] * 2 + [2.0] * 6
    # Multiples of the golden ratio: 0.62, 0.24, 0.85, 0.47, 0.09 and 0.71 of the way.
    assert banded.lr_factors(np.arange(6), 8).tolist() == [2.0, 0.5, 2.0, 2.0, 0.5, 2.0]
    assert banded.weights(8) is None
    assert weight.lr_factors(np.arange(6), 8) is None
