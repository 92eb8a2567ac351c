"""Loss weightings against their published forms, written down here in terms of the signal-to-noise ratio."""

import math

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.options import BatchLayout
from diffusers_lrlab.objective.objective import Objective
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS
from diffusers_lrlab.timesteps.weighting import get_loss_weighting
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.resolve import objective_spec, resolve_config

PREDICTION_TYPES = ["epsilon", "sample", "v_prediction"]

# On the squared error of the image, at the defaults of the parameters.
ON_IMAGES = {
    "none": lambda snr: snr,
    "min_snr": lambda snr: min(snr, 5),
    "soft_min_snr": lambda snr: 4 * snr / (4 + snr),
    "max_snr": lambda snr: max(snr, 5),
    "truncated_snr": lambda snr: max(snr, 1),
    "p2": lambda snr: snr / (1 + snr),
    "debiased": math.sqrt,
    "edm": lambda snr: (1 / snr + 0.5**2) / (math.sqrt(1 / snr) * 0.5) ** 2,
    # On the velocity of flow matching: at a fraction of noise of 1 / (1 + sqrt(SNR)), the error of the image is its square.
    "sigma_sqrt": lambda snr: (1 + math.sqrt(snr)) ** 4,
    "cosmap": lambda snr: 2 / math.pi * (1 + math.sqrt(snr)) ** 4 / (1 + snr),
}

TIMESTEPS = [0, 1, 50, 100, 200, 300, 500, 700, 998, 999]


def closed_form(name, prediction_type, snr):
    """The weight on the plain squared error of the prediction."""
    if name == "none" and prediction_type == "v_prediction":
        return 1.0
    return ON_IMAGES[name](snr) / {"epsilon": snr, "sample": 1, "v_prediction": 1 + snr}[prediction_type]


def signal_to_noise(timestep):
    """Of `DDPMScheduler()`, from its float32 table so that nothing but the form is tested."""
    alpha = DDPMScheduler().alphas_cumprod[timestep].double().item()
    return alpha / (1 - alpha)


@cases("prediction_type", PREDICTION_TYPES)
@cases("name", ON_IMAGES)
def test_weights_and_those_of_a_run_with_its_losses_own_are_the_closed_forms(name, prediction_type):
    scheduler = DDPMScheduler(prediction_type=prediction_type)
    weights = get_loss_weighting(name, scheduler).weights(torch.tensor(TIMESTEPS))
    assert weights.dtype == torch.float32
    expected = [closed_form(name, prediction_type, signal_to_noise(timestep)) for timestep in TIMESTEPS]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    spec = objective_spec(resolve_config(TrainingConfig(loss_weighting=name, prediction_type=prediction_type)))
    process = spec.make_process()
    objective = Objective.of(spec, process, BatchLayout(10), 100, torch.device("cpu"), gather=None)
    of_run = objective.weights(torch.tensor(TIMESTEPS), 0)
    assert (of_run is None) == (name == "none")
    of_losses = process.built_in_weights[TIMESTEPS] * (1 if of_run is None else of_run.numpy())
    np.testing.assert_allclose(of_losses, expected, rtol=1e-6)


@cases("prediction_type", PREDICTION_TYPES)
@cases("name", LOSS_WEIGHTINGS)
def test_normalized_weights_have_mean_1(name, prediction_type):
    plain = get_loss_weighting(name, DDPMScheduler(), prediction_type)
    normalized = get_loss_weighting(name, DDPMScheduler(), prediction_type, normalize=True)
    assert normalized.table.mean().item() == pytest.approx(1, rel=1e-6)
    torch.testing.assert_close(normalized.table, plain.table / plain.table.mean(), rtol=1e-6, atol=0)


def test_weights_are_limited_before_the_mean_is_divided_out():
    form = np.array([closed_form("debiased", "epsilon", signal_to_noise(timestep)) for timestep in range(1000)])
    cut = np.minimum(form, 3)
    assert 0 < (form > 3).sum() < 1000
    np.testing.assert_allclose(get_loss_weighting("debiased:max_weight=3", DDPMScheduler()).table, cut, rtol=1e-9)
    both = get_loss_weighting("debiased", DDPMScheduler(), max_weight=3, normalize=True)
    np.testing.assert_allclose(both.table, cut / cut.mean(), rtol=1e-9)
    assert both.table.max() < 3
    limited = get_loss_weighting("debiased:min_snr=0.5", DDPMScheduler()).table[TIMESTEPS]
    expected = [max(signal_to_noise(timestep), 0.5) ** -0.5 for timestep in TIMESTEPS]
    np.testing.assert_allclose(limited, expected, rtol=1e-9)


ZERO = DDPMScheduler(rescale_betas_zero_snr=True)


@cases("prediction_type", ["sample", "v_prediction"])
@cases("name", ON_IMAGES)
def test_pure_noise_is_weighed_by_the_limit(name, prediction_type):
    """There the error of the image and that of the velocity are one; only that of the noise says nothing any more."""
    expected = closed_form(name, prediction_type, 1e-20)
    assert get_loss_weighting(name, ZERO, prediction_type).table[-1].item() == pytest.approx(expected, abs=1e-9)


def test_wrong_arguments():
    for name, text in (("min_snr:gamma=0", r"gamma=0 of 'min_snr': must be a number in \(0, inf\)"), (3, "got 3")):
        with pytest.raises(LabError, match=text):
            get_loss_weighting(name, DDPMScheduler())
    with pytest.raises(LabError, match="'x0'; known: epsilon, sample, v_prediction"):
        get_loss_weighting("none", DDPMScheduler(), "x0")
