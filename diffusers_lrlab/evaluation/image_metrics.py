"""Metrics of images: each is one decorated function here."""

import dataclasses
from typing import Any

import numpy as np

from ..data.layout import BatchLayout
from ..data.loading import load_image_data
from .classifier import NUM_CLASSIFIED, ClassReader, class_reader
from .frechet import frechet_distance, image_features
from .registry import register_metric
from .subject import MOST_REAL, Evaluation

# Keys of `TrainingData.known`; results of latents provide the features of decoded ones.
FEATURES_OF_DECODED, _FEATURES, _ENCODED = "features of decoded latents", "image features", "images that were encoded"


def _has_features(evaluation: Evaluation) -> bool:
    return evaluation.run.data.image_set is not None and len(evaluation.run.data.held_out) > 1


def _images_of(evaluation: Evaluation) -> Any:
    """The images that a run is trained on, or whose latents it is trained on, with the same held-out rows."""
    data, config = evaluation.run.data, evaluation.run.config
    if data.autoencoder is None:
        return data
    if _ENCODED not in data.known:
        config = dataclasses.replace(config, dataset_name=data.image_set, train_data_dir=None, data_kind=None)
        data.known[_ENCODED] = load_image_data(config, config.seed, BatchLayout(1))
    return data.known[_ENCODED]


@register_metric(
    "frechet_distance",
    description="Fréchet distance to held-out images",
    source="Dowson and Landau 1982; as FID, arXiv 1706.08500, eq. 6",
    facts={
        "card_title": "Fréchet distance of samples to held-out images",
        "besides": {
            "of_training_images": "the same, of equally many training images",
            "of_two_real_halves": "the same, between two halves of the real images",
            "of_decoded_latents": "the same, of held-out images encoded and decoded",
        },
        "of": "run",
        "form": "images",
        "needs": ("samples", "features"),
        "notes": ("frechet_features",),
    },
)
def _frechet_distance(evaluation: Evaluation) -> dict[str, Any]:
    """With what real images score in the place of samples; nothing for images of other sets than the embedded ones."""
    if not _has_features(evaluation):
        return {}
    features, data = image_features(evaluation.run.data.image_set), evaluation.run.data
    num = len(evaluation.samples)
    samples = features(evaluation.samples_as_data)
    if _FEATURES not in data.known:
        images = _images_of(evaluation)
        data.known[_FEATURES] = features(images.held_out.data), features(images.all_in_memory().data)
    held_out, training = data.known[_FEATURES]
    # In a random order: neighbours in the data set were written by the same people.
    training = training[np.random.default_rng(0).permutation(len(training))]
    real = np.concatenate([training, held_out])
    real = real[np.random.default_rng(0).permutation(len(real))]
    decoded = data.known.get(FEATURES_OF_DECODED)
    return {
        "frechet_distance": frechet_distance(samples, held_out),
        **({} if decoded is None else {"frechet_distance_of_decoded_latents": frechet_distance(decoded, held_out)}),
        "frechet_distance_of_training_images": frechet_distance(training[:num], held_out),
        "frechet_distance_of_two_real_halves": frechet_distance(real[: len(real) // 2], real[len(real) // 2 :]),
        "frechet_num_samples": num,
        "frechet_features": features.description,
    }


def _class_reader(evaluation: Evaluation) -> ClassReader | None:
    """Trained once on the data of a run; `None` without labels, or for images of other sets than the embedded ones."""
    data, config = evaluation.run.data, evaluation.run.config
    if data.classes is None or not _has_features(evaluation):
        return None
    key = "class reader", config.label_column
    if key not in data.known:
        images = _images_of(evaluation)
        training = images.random_sample(NUM_CLASSIFIED, MOST_REAL)
        data.known[key] = class_reader(data.image_set, training, images.held_out)
    return data.known[key]


@register_metric(
    "class_accuracy",
    description="Share of samples that a classifier assigns to the requested class",
    source="a classifier of the training images; after the classification accuracy score, arXiv 1905.10887",
    traits=("on_hub",),
    facts={
        "hub_type": "accuracy",
        "besides": {"error_of_classifier": "share of held-out images that this classifier misreads"},
        "of": "run",
        "form": "images",
        "better": "larger",
        "needs": ("samples", "features", "labels"),
        "notes": ("class_accuracy_classifier",),
    },
)
def _class_accuracy(evaluation: Evaluation) -> dict[str, Any]:
    """With the classifier's own error; nothing where there is no classifier."""
    reader, classes = _class_reader(evaluation), evaluation.run.data.classes
    if reader is None or classes is None or not len(evaluation.samples):
        return {}
    num = len(evaluation.samples)
    return {
        "class_accuracy": reader.accuracy(evaluation.samples_as_data, classes.to_measure(num).numpy()),
        "class_accuracy_num_samples": num,
        "class_accuracy_error_of_classifier": reader.error,
        "class_accuracy_classifier": reader.description,
    }
