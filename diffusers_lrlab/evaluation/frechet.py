"""The Fréchet distance between two sets of images, on features that suit the data."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from ..core.errors import LabError
from ..core.signatures import checked
from ..core.words import counted
from ..data.image_sets import IMAGE_DATASETS
from ..data.images import normalise
from .classifier import NETWORK, NUM_CLASSIFIED, SIDE, classifier_input, fit_classifier

_CLASSIFIER_SEED = 917  # of the images that a classifier is trained on


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
        raise LabError(f"The sets have {first.shape[1]} and {second.shape[1]} features; these numbers must be equal.")
    covariances = [np.atleast_2d(np.cov(features, rowvar=False)) for features in (first, second)]
    # The trace of the root needs only the eigenvalues of the product, which are real and not negative but for rounding.
    eigenvalues = np.linalg.eigvals(covariances[0] @ covariances[1]).real
    difference = first.mean(axis=0) - second.mean(axis=0)
    traces = np.trace(covariances[0]) + np.trace(covariances[1])
    squared = difference @ difference + traces - 2 * np.sqrt(np.clip(eigenvalues, 0, None)).sum()
    return float(max(squared, 0.0))  # the sum of its terms is rounded, and below 0 for sets that are next to equal


@dataclass(frozen=True)
class ImageFeatures:
    """
    Features of the images of an embedded set, by a small classifier that was trained on the spot.

    Calling it takes images `(num, channels, height, width)` in [-1, 1] and returns `(num, 32)`: the units before the output.
    `description` says how they were made.
    """

    description: str
    layers: tuple[tuple[np.ndarray, np.ndarray], ...]  # weights and biases, up to these units
    prepare: Callable[[torch.Tensor], np.ndarray]

    def __call__(self, images: torch.Tensor) -> np.ndarray:
        hidden = self.prepare(images)
        for weights, bias in self.layers:
            hidden = np.maximum(hidden @ weights + bias, 0)
        return hidden


@cache
def image_features(name: str) -> ImageFeatures:
    """
    Features that suit an embedded set of images, without a download.

    The classifier is scikit-learn's `MLPClassifier` with layers of 64 and 32 units and seed 0. That of `digits` sees all its
    images in grey at 8x8 pixels, those of the other sets 3,000 images at 16x16 pixels, in their own channels.
    """

    def fit(pixels: np.ndarray, labels: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        classifier = fit_classifier(pixels, labels)
        return tuple(zip(classifier.coefs_[:-1], classifier.intercepts_[:-1], strict=True))

    kind, prepare = f"32 penultimate units of scikit-learn's {NETWORK} on", classifier_input(name)
    if name == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        layers = fit(digits.data / 8 - 1, digits.target)
        return ImageFeatures(f"{kind} digits", layers, prepare)
    entry = IMAGE_DATASETS[name]
    is_made = "made" in entry.traits
    some = entry(NUM_CLASSIFIED, _CLASSIFIER_SEED, "train", 2 * SIDE) if is_made else entry()
    rows = np.random.default_rng(0).permutation(len(some.labels))[:NUM_CLASSIFIED]
    channels = entry.facts["defaults"]["image_channels"]
    images = torch.from_numpy(some.images[rows]).reshape(len(rows), *some.images.shape[1:3], channels).permute(0, 3, 1, 2)
    layers = fit(prepare(normalise(images)), some.labels[rows])
    return ImageFeatures(f"{kind} {counted(len(rows), 'image', ',')} of {name}, {SIDE}x{SIDE} pixels", layers, prepare)
