"""Likelihoods by the ODE of flow matching, of exact models of known densities."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tables import cases

from diffusers_lrlab.evaluation.likelihood import NUM_STEPS, exact_kl, log_likelihood
from diffusers_lrlab.objective.process import make_process

ANGLES = torch.arange(8, dtype=torch.float64) * math.pi / 4
EIGHT = 3 * torch.stack((ANGLES.cos(), ANGLES.sin()), 1)
# Centres and standard deviations of equally likely Gaussians.
DENSITIES = {
    "gaussian": ([[0.5, -0.3]], [0.7]),
    "wide gaussian": ([[0.0, 0.0]], [3.0]),
    "two": ([[-1.0, 0.0], [1.5, 0.5]], [0.3, 0.6]),
    "eight": (EIGHT.tolist(), [0.3] * 8),
}


class ExactModel:
    """The velocity that the best of all models predicts, which knows the noise level by the time alone."""

    def __init__(self, name, num_steps, dtype=torch.float64):
        centres, scales = DENSITIES[name]
        self.centres = torch.tensor(centres, dtype=torch.float64)
        self.scales = torch.tensor(scales, dtype=torch.float64)
        self.num_steps, self.dtype, self.times = num_steps, dtype, []

    def __call__(self, noisy, times):
        assert noisy.dtype == self.dtype
        self.times.append(float(times[0]))
        sigma = (times / self.num_steps).double()[:, None]
        variances = (1 - sigma) ** 2 * self.scales**2 + sigma**2
        offsets = noisy[:, None] - (1 - sigma)[..., None] * self.centres
        logits = -offsets.square().sum(-1) / (2 * variances) - noisy.shape[1] / 2 * variances.log()
        data = self.centres + ((1 - sigma) * self.scales**2 / variances)[..., None] * offsets
        noise = (sigma / variances)[..., None] * offsets
        velocity = (logits.softmax(1)[..., None] * (noise - data)).sum(1)
        return SimpleNamespace(sample=velocity.to(self.dtype))

    def points(self, num):
        generator = torch.Generator().manual_seed(0)
        which = torch.randint(len(self.centres), (num,), generator=generator)
        noise = torch.randn(num, 2, generator=generator, dtype=torch.float64)
        return self.centres[which] + self.scales[which, None] * noise

    def log_prob(self, points, sigma=0.0):
        """Of the data with noise of this size on it."""
        variances = self.scales**2 + sigma**2
        squares = (points[:, None] - self.centres).square().sum(-1)
        logs = -squares / (2 * variances) - (2 * math.pi * variances).log()
        return logs.logsumexp(1) - math.log(len(self.centres))


def process_of(num_steps, shift=1.0):
    return make_process("flow_matching", num_steps=num_steps, shift=shift, is_bounded=False)


@pytest.mark.slow
@cases("shift", [1.0, 3.0])
@cases("num_steps", [100, 1000])
@cases("name", DENSITIES)
def test_the_density_of_the_data_is_found_to_a_thousandth_of_a_nat(name, num_steps, shift):
    model, process = ExactModel(name, num_steps), process_of(num_steps, shift)
    points = model.points(400)
    found = log_likelihood(model, process, points)
    assert len(model.times) == 4 * NUM_STEPS
    assert (found - model.log_prob(points)).mean().abs() < 1e-3
    # Point by point, it is the density with the noise of the first timestep on it.
    first = process.levels.snr[0] ** -0.5
    torch.testing.assert_close(found, model.log_prob(points, first), rtol=0, atol=1e-2)


def test_the_model_is_asked_from_the_least_trained_noise_to_pure_noise():
    model, process = ExactModel("two", 100), process_of(100, 3.0)
    log_likelihood(model, process, model.points(5))
    trained = process.model_time(torch.arange(100))
    assert model.times[0] == pytest.approx(float(trained[0]), rel=1e-6)
    assert model.times[-1] == pytest.approx(100, rel=1e-5)
    assert model.times == sorted(model.times)


def test_twice_the_steps_have_a_sixteenth_of_the_error():
    model, process = ExactModel("wide gaussian", 100), process_of(100)
    points = model.points(50)
    exact = model.log_prob(points, process.levels.snr[0] ** -0.5)
    errors = [float((log_likelihood(model, process, points, num) - exact).abs().mean()) for num in (40, 80)]
    assert errors[0] / errors[1] == pytest.approx(16, rel=0.4)


def test_a_model_in_float32_is_near():
    process = process_of(100)
    exact, single = ExactModel("two", 100), ExactModel("two", 100, torch.float32)
    points = exact.points(50)
    found = log_likelihood(single, process, points)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, log_likelihood(exact, process, points), rtol=0, atol=1e-4)


@pytest.mark.slow
@cases("name", DENSITIES)
def test_the_divergence_of_an_exact_model_is_0_within_its_error(name):
    model, process = ExactModel(name, 100), process_of(100)
    points = model.points(400)
    of_model, half = log_likelihood(model, process, points), log_likelihood(model, process, points[:100], NUM_STEPS // 2)
    mean, error = exact_kl(model.log_prob(points).numpy(), of_model.numpy(), half.numpy())
    assert abs(mean) < 1e-3 / math.log(2)
    assert np.isfinite(error)
