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
from ..data.image_sets import IMAGE_DATASETS
from ..data.labels import KEYWORD

NUM_CLASSIFIED, SIDE = 3000, 16  # images that a classifier is trained on, and their pixels
NETWORK = "MLPClassifier((64, 32), random_state=0)"


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
        read (`Callable`): From images to labels.
        error (`float`): Share of held-out images that it misreads.
        description (`str`): How it was made.
    """

    read: Callable[[torch.Tensor], np.ndarray]
    error: float
    description: str

    def accuracy(self, images: torch.Tensor, labels: np.ndarray) -> float:
        """The share of images that it reads as these labels."""
        return float((self.read(images) == labels).mean())


def class_reader(name: str, training: Batch, held_out: Batch) -> ClassReader:
    """An `MLPClassifier` of the classes of an embedded set, trained on 3,000 training images at most."""
    prepare, some = classifier_input(name), training[:NUM_CLASSIFIED]
    classifier = fit_classifier(prepare(some.data), some.conditions[KEYWORD].numpy())
    read = partial(_read_by, classifier, prepare)
    error = float((read(held_out.data) != held_out.conditions[KEYWORD].numpy()).mean())
    return ClassReader(read, error, f"scikit-learn's {NETWORK} on {counted(len(some), 'training image', ',')}")


def _read_by(classifier: Any, prepare: Callable[[torch.Tensor], np.ndarray], images: torch.Tensor) -> np.ndarray:
    return classifier.predict(prepare(images))
