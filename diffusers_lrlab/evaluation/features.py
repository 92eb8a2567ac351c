"""Features and classes of images: the Fréchet distance, and small classifiers that are trained on the spot."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..core.errors import LabError
from ..core.plugins import Unusable, call_registered, real_values
from ..core.values import checked
from ..core.words import counted
from ..data.batch import Batch
from ..data.image_sets import IMAGE_DATASETS
from ..data.images import normalise
from ..data.labels import KEYWORD
from .registry import register_metric

NUM_CLASSIFIED, _SIDE = 3000, 16  # images that a classifier is trained on, and their pixels
_CLASSIFIER_SEED = 917  # of the images that a classifier is trained on
_NETWORK = "MLPClassifier((64, 32), random_state=0)"


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


@checked
def register_features(name: str, *, description: str, source: str) -> Callable[[Any], Any]:
    """
    A decorator that registers features of images, and with them the metric `frechet_NAME`.

    ```python
    @register_features("colours", description="mean colours", source="own")
    def colours(images):
        return images.mean(axis=(1, 2))
    ```

    The metric is the [`frechet_distance`] between features of samples and of as many training images. Beside it stands the
    distance of held-out images in place of samples.

    Args:
        name (`str`): The metric is `frechet_NAME`.
        description (`str`): What the features are, in a few words.
        source (`str`): The paper or model that they come from.

    The function gets images `(num, height, width, channels)` in [0, 1], as float32, all of a set at once, and returns
    finite numbers `(num, dimension)`, as an array or a tensor.
    """

    def decorator(function: Any) -> Any:
        def distance(real: np.ndarray, generated: np.ndarray) -> float:
            of_sets = (
                call_registered("features", name, function, _returned_features, "", (images,), {})
                for images in (real, generated)
            )
            return frechet_distance(*of_sets)

        title = f"Fréchet distance to training images by {description}"
        register_metric(f"frechet_{name}", description=title, source=source, facts={"form": "images"})(distance)
        return function

    return decorator


def _returned_features(value: Any, images: np.ndarray) -> np.ndarray:
    wanted = f"finite numbers of shape ({len(images)}, dimension)"
    shape = tuple(getattr(value, "shape", None) or np.shape(value))
    features = np.asarray(real_values(value, wanted, (len(images), shape[1] if len(shape) == 2 else 1)), dtype=np.float64)
    if not np.isfinite(features).all():
        raise Unusable(f"must return {wanted}, and some are not finite")
    return features


# --- embedded sets ---------------------------------------------------------------------------------------------------


def _fit_classifier(inputs: np.ndarray, labels: np.ndarray) -> Any:
    from sklearn.neural_network import MLPClassifier

    return MLPClassifier((64, 32), random_state=0, max_iter=400).fit(inputs, labels)


def _classifier_input(name: str, images: torch.Tensor) -> np.ndarray:
    """Images of an embedded set in [-1, 1] as rows of pixels, 8x8 for `digits` and else 16x16, in its channels."""
    side, images = 8 if name == "digits" else _SIDE, images.float().cpu()
    if IMAGE_DATASETS[name].facts["defaults"]["image_channels"] == 1:
        images = images.mean(dim=1, keepdim=True)
    return F.interpolate(images, (side, side), mode="bilinear", antialias=True).flatten(1).double().numpy()


@dataclass(frozen=True)
class ImageClassifier:
    """
    A classifier of the images of an embedded set, which are `(num, channels, height, width)` in [-1, 1].

    Calling it returns their features: its 32 units before the output, `(num, 32)`.
    """

    name: str
    network: Any  # scikit-learn's
    description: str  # how it was made
    error: float = math.nan  # share of held-out images that it misreads, if measured

    def __call__(self, images: torch.Tensor) -> np.ndarray:
        hidden = _classifier_input(self.name, images)
        for weights, bias in zip(self.network.coefs_[:-1], self.network.intercepts_[:-1], strict=True):
            hidden = np.maximum(hidden @ weights + bias, 0)
        return hidden

    def accuracy(self, images: torch.Tensor, labels: np.ndarray) -> float:
        """The share of images that it reads as these labels."""
        return float((self.network.predict(_classifier_input(self.name, images)) == labels).mean())


@cache
def image_features(name: str) -> ImageClassifier:
    """
    Features that suit an embedded set of images, without a download.

    The classifier is scikit-learn's `MLPClassifier` with layers of 64 and 32 units and seed 0. That of `digits` sees all its
    images in grey at 8x8 pixels, those of the other sets 3,000 images at 16x16 pixels, in their own channels.
    """
    if name == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        inputs, labels, some = digits.data / 8 - 1, digits.target, "digits"
    else:
        entry = IMAGE_DATASETS[name]
        made = entry(NUM_CLASSIFIED, _CLASSIFIER_SEED, "train", 2 * _SIDE) if "made" in entry.traits else entry()
        rows = np.random.default_rng(0).permutation(len(made.labels))[:NUM_CLASSIFIED]
        channels = entry.facts["defaults"]["image_channels"]
        images = torch.from_numpy(made.images[rows]).reshape(len(rows), *made.images.shape[1:3], channels)
        inputs, labels = _classifier_input(name, normalise(images.permute(0, 3, 1, 2))), made.labels[rows]
        some = f"{counted(len(rows), 'image', ',')} of {name}, {_SIDE}x{_SIDE} pixels"
    description = f"32 penultimate units of scikit-learn's {_NETWORK} on {some}"
    return ImageClassifier(name, _fit_classifier(inputs, labels), description)


def class_reader(name: str, training: Batch, held_out: Batch) -> ImageClassifier:
    """A classifier for the classes of an embedded set, trained on 3,000 training images at most."""
    some, labels = training[:NUM_CLASSIFIED], held_out.conditions[KEYWORD].numpy()
    network = _fit_classifier(_classifier_input(name, some.data), some.conditions[KEYWORD].numpy())
    description = f"scikit-learn's {_NETWORK} on {counted(len(some), 'training image', ',')}"
    misread = network.predict(_classifier_input(name, held_out.data)) != labels
    return ImageClassifier(name, network, description, float(misread.mean()))
