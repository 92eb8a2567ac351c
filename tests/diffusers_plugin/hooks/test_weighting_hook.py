"""Weighted losses of third-party scripts for DDPM and for flow matching."""

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from test_timesteps_hook import run

from diffusers_lrlab import get_loss_weighting, get_timestep_sampler


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_losses_of_ddpm_are_weighted(tmp_path, prediction_type):
    arguments = [f"--prediction_type={prediction_type}"]
    (done,), stderr = run(tmp_path / "run", "ddpm", *arguments, options=["--loss_weighting=min_snr", "--strict"])
    weighting = get_loss_weighting("min_snr", DDPMScheduler(prediction_type=prediction_type))
    for row in done["rows"]:
        weights = weighting.weights(torch.tensor(row["timesteps"])).numpy()
        np.testing.assert_allclose(row["loss"], np.mean(weights * row["errors"]), rtol=1e-5)
    assert "--loss_weighting min_snr: 6 losses weighted." in stderr


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("precondition", [0, 1])
def test_losses_of_flow_matching_are_weighted(tmp_path, shift, precondition):
    """Min-SNR is on the error of the image: min(SNR, 5) of it, and SNR is ((1 - sigma) / sigma)^2."""
    arguments = [f"--shift={shift}", f"--precondition_outputs={precondition}"]
    options = ["--loss_weighting=min_snr", "--timestep_sampler=logit_normal:mean=1", "--strict"]
    (done,), _ = run(tmp_path / "run", "flow", *arguments, options=options)
    for row in done["rows"]:
        sigmas = np.array(row["sigmas"])
        weights = np.minimum(((1 - sigmas) / sigmas) ** 2, 5.0)
        weights = weights if precondition else weights * sigmas**2
        np.testing.assert_allclose(row["loss"], np.mean(weights * row["errors"]), rtol=1e-4)


def test_what_makes_up_for_a_density_weighs_losses(tmp_path):
    spec = "logit_normal:unbiased=true"
    (done,), _ = run(tmp_path / "run", "ddpm", options=[f"--timestep_sampler={spec}"])
    probabilities = get_timestep_sampler(spec, 1000).probabilities(0).numpy()
    for row in done["rows"]:
        weights = 1 / (1000 * probabilities[row["timesteps"]])
        np.testing.assert_allclose(row["loss"], np.mean(weights * row["errors"]), rtol=1e-5)
