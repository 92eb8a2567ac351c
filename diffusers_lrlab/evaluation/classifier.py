"""Small classifiers of images, trained on the spot, and the share of samples that they assign to the requested class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..core.words import counted
from ..data.batch import Batch
from ..data.image_sets import IMAGE_DATASETS, has_factors
from ..data.labels import KEYWORD
from .shape_factors import read_factors

NUM_CLASSIFIED, SIDE = 3000, 16  # images that a classifier is trained on, and their pixels
NETWORK = "MLPClassifier((64, 32), random_state=0)"
_UNREADABLE = -1


def fit_classifier(inputs: np.ndarray, labels: np.ndarray) -> Any:
    """scikit-learn's `MLPClassifier` with layers of 64 and 32 units and seed 0."""
    from sklearn.neural_network import MLPClassifier

    return MLPClassifier((64, 32), random_state=0, max_iter=400).fit(inputs, labels)


def classifier_input(name: str) -> Callable[[torch.Tensor], np.ndarray]:
    """Images of an embedded set in [-1, 1] as rows of pixels, 8x8 for `digits` and else 16x16, in its channels."""
    side = 8 if name == "digits" else SIDE
    return partial(_reduced, side=side, channels=IMAGE_DATASETS[name].facts["defaults"]["image_channels"])


def _reduced(images: torch.Tensor, side: int, channels: int) -> np.ndarray:
    images = images.float().cpu()
    if channels == 1:
        images = images.mean(dim=1, keepdim=True)
    return F.interpolate(images, (side, side), mode="bilinear", antialias=True).flatten(1).double().numpy()


@dataclass(frozen=True)
class ClassReader:
    """
    Reads classes from images `(num, channels, height, width)` in [-1, 1].

    Args:
        read (`Callable`): From images to labels, -1 for images that show no class.
        error (`float`): Share of held-out images that it misreads.
        description (`str`): How it was made.
    """

    read: Callable[[torch.Tensor], np.ndarray]
    error: float
    description: str

    def accuracy(self, images: torch.Tensor, labels: np.ndarray) -> float:
        """The share of images that it reads as these labels."""
        return float((self.read(images) == labels).mean())


def class_reader(name: str, label_column: str, training: Batch, held_out: Batch) -> ClassReader:
    """
    A reader of the classes of an embedded set, which has not seen the held-out images.

    Kinds of `shapes` are read by the estimator of their factors, classes of other sets by an `MLPClassifier` that is
    trained on 3,000 training images at most.
    """
    labels = held_out.conditions[KEYWORD].numpy()
    if has_factors(name) and label_column == "label":
        read, how = _read_kinds, "estimator of the factors of shapes"
    else:
        prepare, some = classifier_input(name), training[:NUM_CLASSIFIED]
        classifier = fit_classifier(prepare(some.data), some.conditions[KEYWORD].numpy())
        read = partial(_read_by, classifier, prepare)
        how = f"scikit-learn's {NETWORK} on {counted(len(some), 'training image', ',')}"
    error = float((read(held_out.data) != labels).mean())
    return ClassReader(read, error, how)


def _read_by(classifier: Any, prepare: Callable[[torch.Tensor], np.ndarray], images: torch.Tensor) -> np.ndarray:
    return classifier.predict(prepare(images))


def _read_kinds(images: torch.Tensor) -> np.ndarray:
    readings = read_factors(((images + 1) / 2).clamp(0, 1).permute(0, 2, 3, 1).numpy())
    return np.where(readings.is_readable, readings.factors.kind, _UNREADABLE)
