"""All metrics. Those of images and of points are one decorated function each."""

import dataclasses
from typing import Any

import numpy as np
import torch

from diffusers_lrlab.data.loading import load_image_data
from diffusers_lrlab.data.toy2d import LOG_PROBS

from ..data.options import BatchLayout
from . import distances
from .features import NUM_CLASSIFIED, ClassReader, class_reader, frechet_distance, image_features
from .likelihood import NUM_STEPS, exact_kl, log_likelihood
from .registry import (
    ALL,
    FEATURES_OF_DECODED,
    METRICS,
    MOST_REAL,
    NEIGHBOUR,
    Evaluation,
    better_of,
    metric_label,
    metrics_table,
    register_metric,
    word_for,
)
from .validation_loss import ValidationLoss

__all__ = ["METRICS", "better_of", "metric_label", "metrics_table", "register_metric", "word_for"]

# --- images ----------------------------------------------------------------------------------------------------------

_FEATURES, _ENCODED = "image features", "images that were encoded"  # keys of `TrainingData.known`


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


# --- points ----------------------------------------------------------------------------------------------------------

_LIKELIHOOD_POINTS, _HALF_STEPS_POINTS = 1000, 250  # the bias of the steps is estimated at a part of the points
_LOSS_BATCH = 10_000
_LOSS_DRAWS = 5  # a single draw of noise for each point varies too much


def _of_points(name: str, description: str, source: str, *traits: str, **facts: Any) -> Any:
    return register_metric(name, description=description, source=source, traits=traits, facts={"form": "points", **facts})


@_of_points(
    "training_set_loss",
    'Loss of the raw weights on all training points (the paper\'s "evaluation loss")',
    "the objective of the run",
    "is_loss",
    fewest_samples=10_000,
    card_title="Loss of raw weights on all training points",
    of="run",
)
def _training_set_loss(evaluation: Evaluation) -> float:
    """Of fixed draws of noise."""
    run = evaluation.run
    model, data = run.model, evaluation.some_real(MOST_REAL)
    with run.raw_weights():
        losses = [ValidationLoss(data, run.process, _LOSS_BATCH, model.device, draw)(model) for draw in range(_LOSS_DRAWS)]
    return float(np.mean(losses))


_of_points(
    "kl",
    "KL(data ‖ samples) by 5th neighbours",
    "Q. Wang, S. Kulkarni, S. Verdú, IEEE Trans. Inf. Theory 55, 2009, eq. 5 and 25",
    unit="bits",
    num_real=ALL,
)(distances.knn_kl)


@_of_points(
    "exact_kl",
    "KL(data ‖ model) by the known density",
    "DDIM, arXiv 2010.02502, eq. 14, and arXiv 2011.13456, eq. 39",
    card_title="KL(data ‖ model, with the noise of the first timestep) by the known density, bits",
    of="run",
    unit="bits",
    needs=("samples", "density"),
)
def _exact_kl(evaluation: Evaluation) -> dict[str, float]:
    """With its standard error; nothing where the density of the data is not known."""
    run = evaluation.run
    # No more than samples are measured: fewer after a short run.
    points = evaluation.held_out[: min(_LIKELIHOOD_POINTS, run.config.distance_samples or 0)]
    log_prob = LOG_PROBS.get(run.config.dataset_name or "")
    if log_prob is None or len(points) < 2 or run.process.num_train_timesteps < 2:
        return {}  # the path of the ODE is from the first timestep to the last
    with run.averaged_weights():
        points_there = torch.from_numpy(points).to(run.model.device)
        of_model = log_likelihood(run.model, run.process, points_there)
        half_steps = log_likelihood(run.model, run.process, points_there[:_HALF_STEPS_POINTS], NUM_STEPS // 2)
    mean, error = exact_kl(log_prob(points), of_model.cpu().numpy(), half_steps.cpu().numpy())
    return {"exact_kl": mean, "exact_kl_standard_error": error}


_of_points(
    "energy_distance",
    "Energy distance, of 5,000 points at most",
    "Székely and Rizzo 2013",
    num_real=5000,
    num_generated=5000,
)(distances.energy_distance)
_of_points(
    "sliced_wasserstein",
    "Sliced 2-Wasserstein distance",
    "N. Bonneel et al., J. Math. Imaging Vis. 51, 2015",
    num_real=ALL,
)(distances.sliced_wasserstein)


@_of_points("density", "Density", "M. Naeem et al., arXiv 2002.09797, eq. 4", better="larger")
def _density(real: np.ndarray, generated: np.ndarray) -> float:
    return distances.density_and_coverage(real, generated, NEIGHBOUR)[0]


@_of_points("coverage", "Coverage", "M. Naeem et al., arXiv 2002.09797, eq. 6", better="larger")
def _coverage(real: np.ndarray, generated: np.ndarray) -> float:
    return distances.density_and_coverage(real, generated, NEIGHBOUR)[1]
