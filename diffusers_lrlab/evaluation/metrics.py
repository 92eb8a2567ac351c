"""All metrics, each a decorated function; of a trained run, and of any two sets of samples."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..core.errors import LabError
from ..data.loading import load_image_data
from ..data.options import BatchLayout
from ..data.toy2d import LOG_PROBS
from . import distances
from .features import NUM_CLASSIFIED, ImageClassifier, class_reader, frechet_distance, image_features
from .likelihood import NUM_STEPS, exact_kl, log_likelihood
from .registry import (
    ALL,
    FEATURES_OF_DECODED,
    METRICS,
    MOST_REAL,
    NEIGHBOUR,
    Evaluation,
    Metric,
    better_of,
    metric_label,
    metrics_table,
    register_metric,
    word_for,
)
from .validation_loss import ValidationLoss

__all__ = ["METRICS", "better_of", "metric_label", "metrics_table", "register_metric", "word_for"]


def evaluate(
    run: Any,
    samples: np.ndarray | None,
    names: Collection[str] | None = None,
    as_samples: Callable[[torch.Tensor], np.ndarray] = torch.Tensor.numpy,
) -> dict[str, Any]:
    """
    The metrics of a trained run (a [`RunState`]) besides those in its log: these `names`, or all.

    `samples` are of its averaged weights; without them, metrics that need some are omitted. `as_samples` converts data to
    arrays in the form of samples.
    """
    evaluation, form = Evaluation(run, samples), run.kind.form
    results: dict[str, Any] = {}
    chosen = _metrics_of(run, samples is not None, names)
    for metric in chosen:
        if metric.of == "run":
            results |= metric(evaluation)
    compared = {metric.name: metric for metric in chosen if metric.of == "samples"}
    if samples is None or not compared:
        return results
    num_real = run.data.num_images or MOST_REAL
    most_real = max(metric.sizes(num_real, len(samples))[0] for metric in compared.values())
    real = as_samples(evaluation.some_real(most_real).data[:most_real])
    results |= compare_samples(real, samples, "distances of samples", compared, form)
    # The score of held-out data in place of samples is the same for all runs on these data.
    items = form if form in ("images", "points") else "data"
    known, key = run.data.known, ("floors", len(samples), frozenset(compared))
    if key not in known:
        held_out = as_samples(run.data.held_out.data[: len(samples)])
        known[key] = compare_samples(real, held_out, f"of held-out {items}", compared, form)
    return results | {f"{name}_of_held_out_{items}": value for name, value in known[key].items()}


def _metrics_of(run: Any, has_samples: bool, names: Collection[str] | None) -> list[Metric]:
    """The metrics that [`evaluate`] computes."""
    metrics = [metric for metric in METRICS.values() if metric.form in (None, run.kind.form) and metric.function]
    metrics = [metric for metric in metrics if has_samples or "samples" not in metric.needs]
    if names is not None:
        return [metric for metric in metrics if metric.name in names]
    if run.data.classes is None:
        metrics = [metric for metric in metrics if "labels" not in metric.needs]
    return [metric for metric in metrics if metric.fewest_samples <= (run.config.distance_samples or 0)]


def compare_samples(
    real: np.ndarray,
    generated: np.ndarray,
    progress: str | None = None,
    names: Collection[str] | None = None,
    form: str = "points",
) -> dict[str, float]:
    """
    Every comparison of samples with data, or those with these `names`; none for too few samples.

    Both are points `(num, dimension)`, or images `(num, height, width, channels)` in [0, 1], in random order. `progress` is
    the text of a progress bar in a terminal.
    """
    results: dict[str, float] = {}
    for images in (real, generated) if form == "images" else ():
        lowest, highest = images.min(initial=1.0), images.max(initial=0.0)
        if images.ndim != 4 or images.shape[1:] != real.shape[1:] or not (lowest >= 0 and highest <= 1):
            got = f"{images.shape}, from {lowest:g} to {highest:g}"
            raise LabError(f"Expected images (num, height, width, channels) of one size in [0, 1], got {got}.")
    if min(len(real), len(generated)) <= NEIGHBOUR:
        return results
    metrics = [metric for metric in METRICS.values() if metric.of == "samples" and metric.form in (None, form)]
    chosen = [metric for metric in metrics if metric.function and (names is None or metric.name in names)]
    for metric in tqdm(chosen, desc=progress, leave=False, disable=None if progress else True):
        num_real, num_generated = metric.sizes(len(real), len(generated))
        results |= metric(real[:num_real], generated[:num_generated])
    return results


# --- images ----------------------------------------------------------------------------------------------------------

_FEATURES, _ENCODED = "image features", "images that were encoded"  # keys of `TrainingData.known`


def _images_of(evaluation: Evaluation) -> Any:
    """
    The images that a run is trained on, or whose latents it is trained on, with the same held-out rows. `None` for images
    of other sets than the embedded ones, which have no features.
    """
    data, config = evaluation.run.data, evaluation.run.config
    if data.image_set is None or len(data.held_out) < 2:
        return None
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
    """With what real images score in the place of samples."""
    data, num, images = evaluation.run.data, len(evaluation.samples), _images_of(evaluation)
    if images is None:
        return {}
    features = image_features(data.image_set)
    samples = features(evaluation.samples_as_data)
    if _FEATURES not in data.known:
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
    """By a classifier that is trained once on the data, with its own error; nothing without labels."""
    data, num, images = evaluation.run.data, len(evaluation.samples), _images_of(evaluation)
    if images is None or data.classes is None or not num:
        return {}
    key = "class reader", evaluation.run.config.label_column
    if key not in data.known:
        training = images.random_sample(NUM_CLASSIFIED, MOST_REAL)
        data.known[key] = class_reader(data.image_set, training, images.held_out)
    reader: ImageClassifier = data.known[key]
    return {
        "class_accuracy": reader.accuracy(evaluation.samples_as_data, data.classes.to_measure(num).numpy()),
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
