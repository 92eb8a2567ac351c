"""Noise levels: those of flow matching, and both ends, where the SNR is 0 or infinite."""

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from tables import cases

from diffusers_lrlab.timesteps.noise_levels import PREDICTIONS, NoiseLevels, flow_levels
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS
from diffusers_lrlab.timesteps.sampling import TimestepSampler
from diffusers_lrlab.timesteps.weighting import LossWeighting

BOTH_ENDS = NoiseLevels(np.array([1.0, 0.9, 0.5, 0.1, 0.0]))
MANY = NoiseLevels(np.linspace(1, 0, 40))


def test_the_levels_of_flow_matching():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    levels = flow_levels(scheduler)
    sigma = scheduler.sigmas[:1000].double().numpy()[::-1]
    np.testing.assert_allclose(levels.snr, ((1 - sigma) / sigma) ** 2, rtol=1e-9, atol=1e-12)
    assert isinstance(levels, NoiseLevels)
    assert (np.diff(levels.snr) < 0).all()
    of_data, of_noise = (flow_levels(FlowMatchEulerDiscreteScheduler(), of_data) for of_data in (True, False))
    np.testing.assert_allclose(of_data.snr[1:], of_noise.snr[:-1], rtol=1e-3)
    for each in (of_data, of_noise):
        assert np.isfinite(each.snr).all()
        assert np.isfinite(each.log_sigma_borders).all()


def test_both_ends_are_safe_and_nothing_else_is_moved():
    assert BOTH_ENDS.snr[1:].tolist() == [0.9 / (1 - 0.9), 1.0, 0.1 / 0.9, 0.0]
    assert BOTH_ENDS.snr[0] == pytest.approx(1e12, rel=1e-3)
    assert BOTH_ENDS.inner_alphas_cumprod[1:4].tolist() == [0.9, 0.5, 0.1]
    assert BOTH_ENDS.inner_alphas_cumprod[[0, 4]].tolist() == [1 - 1e-12, 1e-12]
    assert np.isfinite(BOTH_ENDS.log_sigma_borders).all()


@cases("name", LOSS_WEIGHTINGS)
@cases("prediction_type", PREDICTIONS)
def test_weights_are_finite_at_both_ends(name, prediction_type):
    table = LossWeighting(name, LOSS_WEIGHTINGS[name].resolve({}), BOTH_ENDS, prediction_type).table
    assert table.isfinite().all()
    assert (table >= 0).all()


@cases("name", TIMESTEP_SAMPLERS)
def test_densities_are_finite_at_both_ends(name):
    sampler = TimestepSampler(name, TIMESTEP_SAMPLERS[name].resolve({}), MANY, 10)
    for update in (0, 9):
        probabilities = sampler.probabilities(update)
        assert probabilities.sum() == pytest.approx(1)
        assert (probabilities >= 0).all()
