"""scikit-learn's handwritten digits as a Hugging Face dataset: 1,797 images of 8x8 pixels, without a download."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import datasets


def load_digits_dataset() -> datasets.Dataset:
    """
    The UCI optical recognition of handwritten digits test set, as scikit-learn ships it (CC BY 4.0).

    Returns:
        `datasets.Dataset`: columns `image` (8-bit grey, the set's 0..16 scaled to 0..255) and `label` (0..9).
    """
    from datasets import ClassLabel, Dataset, Features, Image
    from PIL import Image as images
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    return Dataset.from_dict(
        {"image": [images.fromarray(image) for image in pixels], "label": digits.target},
        features=Features({"image": Image(), "label": ClassLabel(names=[str(digit) for digit in range(10)])}),
    )
