"""All metrics: each is one decorated function here."""

import dataclasses
from typing import Any

import numpy as np
import torch

from ..data.batch import Batch
from ..data.image_loading import load_image_data
from ..data.layout import BatchLayout
from ..data.shapes import RANGES
from ..data.toy2d_entries import LOG_PROBS
from . import distances, kl
from .classifier import NUM_CLASSIFIED, ClassReader, class_reader
from .frechet import frechet_distance, image_features
from .landscape import sharpness
from .likelihood import NUM_STEPS, exact_kl, log_likelihood
from .registry import ALL, METRICS, better_of, metric_label, metrics_table, register_metric, word_for
from .shape_factors import divergences, estimator_error, kind_classifier, read_factors, split_pairs, true_readings
from .validation_loss import ValidationLoss

__all__ = ["METRICS", "better_of", "metric_label", "metrics_table", "register_metric", "word_for"]

# Keys of `TrainingData.known`; results of latents provide the features of decoded ones.
FEATURES_OF_DECODED, _FEATURES, _ENCODED = "features of decoded latents", "image features", "images that were encoded"
NEIGHBOUR = 5  # k of the nearest-neighbour estimates, as in the study
_LIKELIHOOD_POINTS, _HALF_STEPS_POINTS = 1000, 250  # the bias of the steps is estimated at a part of the points
_LOSS_BATCH = 10_000
_LOSS_DRAWS = 5  # a single draw of noise for each point varies too much
MOST_REAL = 100_000  # samples of a stream, or of data that are not in memory, to compare with


class Evaluation:
    """Input of metrics: a trained [`RunState`], and samples of its averaged weights if any were drawn."""

    def __init__(self, run: Any, samples: np.ndarray | None):
        self.run = run
        self.samples = np.empty(0) if samples is None else samples  # metrics that need some are not asked without

    def some_real(self, num: int) -> Batch:
        """The first of these images with their conditions; no others are decoded."""
        data = self.run.data
        return data.random_sample(len(data.in_memory) if data.in_memory is not None else num, MOST_REAL)

    @property
    def samples_as_data(self) -> torch.Tensor:
        """Images `(num, height, width, channels)` in [0, 1] as the tensors of training."""
        return torch.from_numpy(self.samples).permute(0, 3, 1, 2) * 2 - 1

    @property
    def held_out(self) -> np.ndarray:
        return self.run.data.held_out.data.numpy()


# --- what validation logs ---------------------------------------------------------------------------------------------

register_metric(
    "validation_loss_ema",
    description="Loss of the EMA weights on held-out data",
    source="the objective of the run",
    traits=("is_loss", "on_hub"),
    facts={
        "of": "log",
        "hub_type": "mse",
        "card_title": "Validation loss, EMA weights (the ones saved)",
        "needs": ("held_out", "ema"),
    },
)(None)
register_metric(
    "validation_loss",
    description="Loss of the raw weights on held-out data",
    source="the objective of the run",
    traits=("is_loss", "on_hub"),
    facts={"of": "log", "hub_type": "mse", "card_title": "Validation loss, raw weights", "needs": ("held_out",)},
)(None)


# --- images -----------------------------------------------------------------------------------------------------------


def _has_features(evaluation: Evaluation) -> bool:
    return evaluation.run.data.image_set is not None and len(evaluation.run.data.held_out) > 1


def _part_of_frechet(evaluation: Evaluation) -> float:
    """The classifier is what takes time."""
    if not _has_features(evaluation):
        return 0.0
    channels, resolution = evaluation.run.config.image_shape
    images = torch.zeros(NEIGHBOUR, channels, resolution, resolution)
    image_features.__wrapped__(evaluation.run.data.image_set)(images)
    return 1.0


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
        "part": _part_of_frechet,
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
        data.known[key] = class_reader(data.image_set, config.label_column, training, images.held_out)
    return data.known[key]


def _part_of_class_accuracy(evaluation: Evaluation) -> float:
    """The classifier is what takes time."""
    _class_reader(evaluation)
    return 1.0


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
        "part": _part_of_class_accuracy,
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


def _part_of_factors(evaluation: Evaluation) -> float:
    """The classifier of kinds is what takes time."""
    kind_classifier.__wrapped__(evaluation.run.config.resolution)
    return 1.0


@register_metric(
    "factor_divergence",
    description="Mean Jensen-Shannon divergence between the factors of sampled shapes and the true ones",
    source="J. Lin, IEEE Trans. Inf. Theory 37, 1991; histograms of factors read from pixels",
    facts={
        "besides": {
            "of_true_images": "the same, of equally many true images in place of samples",
            "of_pairs": "mean divergence of pairs of factors",
            "of_pairs_of_true_images": "mean divergence of pairs of factors, of true images",
            "readable_share": "share of samples that show one whole shape",
            "wrong_kinds": "share of true images whose kind is misread",
            **{f"error_of_{factor}": f"mean error of the estimator in {factor}" for factor in RANGES},
        },
        "of": "run",
        "form": "images",
        "unit": "bits",
        "needs": ("samples", "factors"),
        "part": _part_of_factors,
    },
)
def _factor_divergence(evaluation: Evaluation) -> dict[str, float]:
    """With that of each factor and each pair, and the estimator's own errors on true images."""
    samples, name, figures = evaluation.samples, "factor_divergence", {}
    if not len(samples):
        return {}
    resolution = samples.shape[1]
    for end, readings in (("", read_factors(samples)), ("_of_true_images", true_readings(resolution, len(samples))[1])):
        found = divergences(readings.factors[readings.is_readable])
        factors, pairs = split_pairs(found)
        figures[f"{name}{end}"] = float(np.mean([*factors.values()]))
        figures[f"{name}_of_pairs{end}"] = float(np.mean([*pairs.values()]))
        figures |= {f"{name}_of_{which.replace(', ', '_and_')}{end}": value for which, value in found.items()}
        figures[f"{name}_readable_share{end}"] = float(readings.is_readable.mean())
    errors = estimator_error(resolution)
    figures[f"{name}_wrong_kinds"] = errors.pop("kind")
    return figures | {f"{name}_error_of_{factor}": value for factor, value in errors.items()}


# --- points -----------------------------------------------------------------------------------------------------------


def _part_of_training_set_loss(evaluation: Evaluation) -> float:
    """A tenth of a batch."""
    run = evaluation.run
    points = run.data.all_in_memory(_LOSS_BATCH)
    num = min(MOST_REAL, run.data.num_images or MOST_REAL, len(points) if run.data.in_memory is not None else MOST_REAL)
    points = points[: _LOSS_BATCH // 10]
    ValidationLoss(points, run.process, _LOSS_BATCH, run.model.device)(run.model)
    return _LOSS_DRAWS * num / len(points)


@register_metric(
    "training_set_loss",
    description='Loss of the raw weights on all training points (the paper\'s "evaluation loss")',
    source="the objective of the run",
    traits=("is_loss",),
    facts={
        "fewest_samples": 10_000,
        "card_title": "Loss of raw weights on all training points",
        "of": "run",
        "form": "points",
        "part": _part_of_training_set_loss,
    },
)
def _training_set_loss(evaluation: Evaluation) -> float:
    """Of fixed draws of noise."""
    run = evaluation.run
    model, data = run.model, evaluation.some_real(MOST_REAL)
    with run.raw_weights():
        losses = [ValidationLoss(data, run.process, _LOSS_BATCH, model.device, draw)(model) for draw in range(_LOSS_DRAWS)]
    return float(np.mean(losses))


def _of_points(name: str, description: str, source: str, *traits: str, **facts: Any) -> Any:
    return register_metric(name, description=description, source=source, traits=traits, facts={"form": "points", **facts})


_of_points(
    "kl",
    "KL(data ‖ samples) by 5th neighbours",
    "Q. Wang, S. Kulkarni, S. Verdú, IEEE Trans. Inf. Theory 55, 2009, eq. 5 and 25",
    unit="bits",
    num_real=ALL,
)(kl.knn_kl)


def _points_of_likelihood(evaluation: Evaluation) -> np.ndarray:
    """No more than samples are measured: fewer after a short run."""
    return evaluation.held_out[: min(_LIKELIHOOD_POINTS, evaluation.run.config.distance_samples or 0)]


def _part_of_exact_kl(evaluation: Evaluation) -> float:
    """Two steps of the integration."""
    run, points = evaluation.run, _points_of_likelihood(evaluation)
    if run.config.dataset_name not in LOG_PROBS or len(points) < 2 or run.process.num_train_timesteps < 2:
        return 0.0
    log_likelihood(run.model, run.process, torch.from_numpy(points).to(run.model.device), num_steps=2)
    return (NUM_STEPS + NUM_STEPS // 2 * len(points[:_HALF_STEPS_POINTS]) / len(points)) / 2


@_of_points(
    "exact_kl",
    "KL(data ‖ model) by the known density",
    "DDIM, arXiv 2010.02502, eq. 14, and arXiv 2011.13456, eq. 39",
    card_title="KL(data ‖ model, with the noise of the first timestep) by the known density, bits",
    of="run",
    unit="bits",
    needs=("samples", "density"),
    part=_part_of_exact_kl,
)
def _exact_kl(evaluation: Evaluation) -> dict[str, float]:
    """With its standard error; nothing where the density of the data is not known."""
    run, points = evaluation.run, _points_of_likelihood(evaluation)
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
    "histogram_kl",
    "KL(data ‖ samples) of histograms of 50 cells along each axis",
    "the estimate of Krichevsky and Trofimov",
    unit="bits",
    num_real=ALL,
    most_dimensions=2,  # the cells of more axes are mostly empty
)(kl.histogram_kl)
_of_points(
    "energy_distance",
    "Energy distance, of 5,000 points at most",
    "Székely and Rizzo 2013",
    num_real=5000,
    num_generated=5000,
)(distances.energy_distance)
_of_points(
    "squared_mmd",
    "Squared MMD, Gaussian kernel of the median distance, of 5,000 points at most",
    "A. Gretton et al., JMLR 13, 2012, eq. 3",
    num_real=5000,
    num_generated=5000,
)(distances.squared_mmd)
_of_points(
    "sliced_wasserstein",
    "Sliced 2-Wasserstein distance",
    "N. Bonneel et al., J. Math. Imaging Vis. 51, 2015",
    num_real=ALL,
)(distances.sliced_wasserstein)
_of_points(
    "exact_wasserstein",
    "2-Wasserstein distance, of 2,000 points at most",
    "the best assignment",
    "equal_sizes",
    num_real=2000,
    num_generated=2000,
)(distances.exact_wasserstein)


@_of_points("density", "Density", "M. Naeem et al., arXiv 2002.09797, eq. 4", better="larger")
def _density(real: np.ndarray, generated: np.ndarray) -> float:
    return distances.density_and_coverage(real, generated, NEIGHBOUR)[0]


@_of_points("coverage", "Coverage", "M. Naeem et al., arXiv 2002.09797, eq. 6", better="larger")
def _coverage(real: np.ndarray, generated: np.ndarray) -> float:
    return distances.density_and_coverage(real, generated, NEIGHBOUR)[1]


@_of_points(
    "sharpness",
    "Largest eigenvalue of the Hessian of the held-out loss at the averaged weights",
    "power iteration on Hessian-vector products (Pearlmutter 1994)",
    "on_request",
    of="run",
    better="neither",
    needs=("held_out",),
)
def _sharpness(evaluation: Evaluation) -> float:
    with evaluation.run.averaged_weights():
        return sharpness(evaluation.run)
