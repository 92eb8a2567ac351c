"""Metrics of points: each is one decorated function here."""

from typing import Any

import numpy as np
import torch

from ..data.toy2d import LOG_PROBS
from . import distances, kl
from .likelihood import NUM_STEPS, exact_kl, log_likelihood
from .registry import ALL, register_metric
from .subject import MOST_REAL, NEIGHBOUR, Evaluation
from .validation_loss import ValidationLoss

_LIKELIHOOD_POINTS, _HALF_STEPS_POINTS = 1000, 250  # the bias of the steps is estimated at a part of the points
_LOSS_BATCH = 10_000
_LOSS_DRAWS = 5  # a single draw of noise for each point varies too much


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
