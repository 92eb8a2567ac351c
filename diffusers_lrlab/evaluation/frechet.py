"""The Fréchet distance between two sets of images, on features that suit the data."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from ..core.errors import LabError
from ..core.signatures import checked


@checked
def frechet_distance(first: np.ndarray, second: np.ndarray) -> float:
    r"""
    The squared Fréchet (2-Wasserstein) distance between Gaussians fitted to two sets of features.

    \(|\mu_1 - \mu_2|^2 + \mathrm{tr}(C_1 + C_2 - 2 (C_1 C_2)^{1/2})\) (Dowson and Landau 1982; as FID, arXiv
    1706.08500, eq. 6), of features `(num, dimension)`. It is biased upwards for small sets: compare only values of sets of
    the same sizes.
    """
    for features in (first, second):
        if features.ndim != 2 or len(features) < 2:
            raise LabError(f"Expected features of shape (at least 2, dimension), got {features.shape}.")
    if first.shape[1] != second.shape[1]:
        raise LabError(f"The sets have {first.shape[1]} and {second.shape[1]} features; they must have the same.")
    covariances = [np.atleast_2d(np.cov(features, rowvar=False)) for features in (first, second)]
    # The trace of the root needs only the eigenvalues of the product, which are real and not negative but for rounding.
    eigenvalues = np.linalg.eigvals(covariances[0] @ covariances[1]).real
    difference = first.mean(axis=0) - second.mean(axis=0)
    traces = np.trace(covariances[0]) + np.trace(covariances[1])
    squared = difference @ difference + traces - 2 * np.sqrt(np.clip(eigenvalues, 0, None)).sum()
    return float(max(squared, 0.0))  # the sum of its terms is rounded, and below 0 for sets that are next to equal


def digit_features() -> Callable[[torch.Tensor], np.ndarray]:
    """
    Features of images `(num, channels, height, width)` in [-1, 1], `(num, 32)`: the units before the output of a classifier.

    It is scikit-learn's `MLPClassifier` with layers of 64 and 32 units and seed 0, trained here in a second or two on all
    the embedded digits, so that nothing is downloaded. Images are brought to grey and 8x8 pixels. Its only use is this.
    """
    from sklearn.datasets import load_digits
    from sklearn.neural_network import MLPClassifier

    digits = load_digits()
    classifier = MLPClassifier((64, 32), random_state=0, max_iter=400).fit(digits.data / 8 - 1, digits.target)

    def features(images: torch.Tensor) -> np.ndarray:
        pixels = F.interpolate(images.float().cpu().mean(dim=1, keepdim=True), (8, 8), mode="bilinear", antialias=True)
        hidden = pixels.flatten(1).double().numpy()
        for weights, bias in zip(classifier.coefs_[:-1], classifier.intercepts_[:-1], strict=True):
            hidden = np.maximum(hidden @ weights + bias, 0)
        return hidden

    return features
