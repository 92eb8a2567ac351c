"""scikit-learn's handwritten digits: 1,797 images of 8x8 pixels, no download."""

from __future__ import annotations

import numpy as np

from .image_sets import ImageSet


def load_digits_set() -> ImageSet:
    """The UCI optical recognition of handwritten digits test set (CC BY 4.0); its levels 0 to 16 are scaled to 0 to 255."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return ImageSet(np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target)
