"""The density that a model gives to points, by the probability-flow ODE of DDPM and of flow matching."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from diffusers import DDPMScheduler
from helpers import normal
from tables import cases

from diffusers_lrlab import MLPDenoiser
from diffusers_lrlab.evaluation.held_out import NUM_STEPS, exact_kl, log_likelihood
from diffusers_lrlab.objective.process import make_process
from diffusers_lrlab.objective.processes import DDPM

GAUSSIANS = [([1.5], [0.3]), ([0.7, -1.2], [0.5, 2.0]), ([0.0, 0.4, -3.0], [1.0, 0.1, 0.6]), ([0.0, 0.0], [2.0, 2.0])]


def make_scheduler(beta_schedule="squaredcos_cap_v2", prediction_type="epsilon", timesteps=1000):
    return DDPMScheduler(timesteps, beta_schedule=beta_schedule, prediction_type=prediction_type)


class ExactModel:
    """What the best of all models predicts for a mixture of Gaussians, which knows the noise level by the time alone."""

    def __init__(self, means, scales, amounts, prediction_type, dtype=torch.float64):
        self.means, self.scales = torch.tensor(means, dtype=torch.float64), torch.tensor(scales, dtype=torch.float64)
        self.amounts, self.prediction_type = amounts, prediction_type  # amounts: of data and of noise at some times
        self.dtype, self.times = dtype, []

    def __call__(self, noisy, times):
        assert (noisy.dtype, times.shape) == (self.dtype, (len(noisy),))
        self.times.append(float(times[0]))
        signal, sigma = (amount[:, None, None] for amount in self.amounts(times.double()))
        variances, offsets, logs = self.parts(noisy, signal, sigma)
        shares = logs.softmax(1)[..., None]
        data = (shares * (self.means + signal * self.scales**2 / variances * offsets)).sum(1)
        noise = (shares * sigma / variances * offsets).sum(1)
        velocity = signal[:, 0] * noise - sigma[:, 0] * data
        predictions = {"epsilon": noise, "sample": data, "v_prediction": velocity, "flow": noise - data}
        return SimpleNamespace(sample=predictions[self.prediction_type].to(self.dtype))

    def parts(self, noisy, signal, sigma):
        """For each point and Gaussian: variances, differences to the mean, and the logarithm of the density."""
        variances, offsets = (signal * self.scales) ** 2 + sigma**2, noisy[:, None] - signal * self.means
        return variances, offsets, -(offsets**2 / variances + (2 * math.pi * variances).log()).sum(-1) / 2

    def log_prob(self, points, sigma=0.0):
        """Of the data with noise of this size on it."""
        return self.parts(points, 1.0, sigma)[-1].logsumexp(1) - math.log(len(self.means))


def model_for(scheduler, means, scales):
    """Between timesteps it interpolates the log of the noise level."""
    alphas = scheduler.alphas_cumprod.double().numpy()
    levels = np.log((1 - alphas) / alphas) / 2

    def amounts(times):
        assert 0 <= times.min() <= times.max() <= len(levels) - 1
        sigma = torch.from_numpy(np.exp(np.interp(times, np.arange(len(levels)), levels)))
        return (1 + sigma**2) ** -0.5, sigma * (1 + sigma**2) ** -0.5

    model = ExactModel(means, scales, amounts, scheduler.config.prediction_type)
    model.levels = levels
    return model


@pytest.mark.slow
@cases(("prediction_type", "beta_schedule", "gaussian", "timesteps"), [
    ("epsilon", "linear", 0, 100), ("sample", "squaredcos_cap_v2", 1, 1000), ("v_prediction", "linear", 2, 1000),
    ("epsilon", "squaredcos_cap_v2", 3, 100),
])  # fmt: skip
def test_the_density_is_that_of_the_pushed_gaussian(prediction_type, beta_schedule, gaussian, timesteps):
    """Of each point with many steps; on average, which is in the divergence of the model, with the usual number."""
    mean, scales = GAUSSIANS[gaussian]
    scheduler = make_scheduler(beta_schedule, prediction_type, timesteps)
    model = model_for(scheduler, [mean], scales)
    points = mean + 1.5 * normal(0, 50, len(mean)) * scales
    # What the exact ODE makes of N(0, 1 + sigma ** 2) at the last level.
    first, last = np.exp(model.levels[[0, -1]])
    shrink = np.sqrt((np.square(scales) + first**2) / (np.square(scales) + last**2))
    pushed = scipy.stats.norm(np.asarray(mean) * (1 - shrink), shrink * math.sqrt(1 + last**2))
    exact = pushed.logpdf(points).sum(axis=1)
    # What the model was made for, but for the first and the last noise, which are less in 100 timesteps.
    assert timesteps < 1000 or np.abs(exact - scipy.stats.norm.logpdf(points, mean, scales).sum(axis=1)).max() < 0.3
    steps = (NUM_STEPS, 2 * NUM_STEPS, 200)
    logs = torch.stack([log_likelihood(model, DDPM(scheduler), torch.from_numpy(points), num) for num in steps]).numpy()
    assert (logs.shape, logs.dtype) == ((3, 50), np.float64)
    assert logs[0].mean() == pytest.approx(exact.mean(), abs=1e-3)
    np.testing.assert_allclose(logs[2], exact, atol=1e-4)
    if gaussian == 1:  # the error falls with the fourth power of the number of steps
        errors = np.abs(logs[:2] - exact).mean(axis=1)
        assert errors[0] / errors[1] == pytest.approx(16, rel=0.4)


def test_noise_of_the_steps_is_not_taken_for_a_bias():
    """What halving the steps changes by chance, with a mean of 0, is in the spread of the points."""
    rows = list(np.random.default_rng(0).normal(size=(200, 3, 1000)))
    alone = np.mean([exact_kl(data, model)[1] for data, model, _ in rows])
    together, shifted = (
        np.mean([exact_kl(data, model, (model + chance + shift)[:250])[1] for data, model, chance in rows])
        for shift in (0, 1)
    )
    assert together < 1.4 * alone
    assert shifted == pytest.approx(math.log2(math.e), rel=0.01)


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return MLPDenoiser(hidden_size=16, num_layers=1, embedding_size=8, coordinate_scale=1.0).to(dtype)


def test_neither_the_batch_size_nor_float32_matters_and_nothing_is_left():
    process, points = DDPM(make_scheduler()), torch.from_numpy(normal(0, 7))
    single, expected = network(torch.float32), log_likelihood(network(), process, points, 10)
    alone = torch.cat([log_likelihood(network(), process, point[None], 10) for point in points])
    torch.testing.assert_close(alone, expected, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        logs = log_likelihood(single, process, points.float(), 10)
    assert (logs.requires_grad, logs.dtype) == (False, torch.float64)
    assert all(weight.grad is None for weight in single.parameters())
    torch.testing.assert_close(logs, expected, rtol=1e-3, atol=1e-3)


@cases(("scheduler", "num_steps", "expected"), [
    (make_scheduler(), 0, "num_steps=0"),
    (DDPMScheduler(1), 5, "noise level of all timesteps .1. is the same"),
    (make_scheduler(prediction_type="flow_prediction"), 5, "flow_prediction"),
])  # fmt: skip
def test_processes_without_a_likelihood_are_told(scheduler, num_steps, expected):
    with pytest.raises(ValueError, match=expected):
        log_likelihood(network(), DDPM(scheduler), torch.zeros(3, 2), num_steps)


# --- the divergence --------------------------------------------------------------------------------------------------


def test_the_exact_divergence_is_a_mean_with_its_error():
    of_data, of_model = np.random.default_rng(0).normal(size=(2, 50))
    mean, error = exact_kl(of_data, of_model)
    differences = (of_data - of_model) / math.log(2)
    assert mean == pytest.approx(differences.mean(), rel=1e-12)
    assert error == pytest.approx(scipy.stats.sem(differences), rel=1e-12)
    assert exact_kl(of_data, of_data) == (0, 0)
    for first, second in (((5,), (6,)), ((1,), (1,)), ((5, 1), (5, 1))):
        with pytest.raises(ValueError, match=re.escape(f"{first} and {second}")):
            exact_kl(np.zeros(first), np.zeros(second))


# --- flow matching ---------------------------------------------------------------------------------------------------

ANGLES = np.arange(8) * math.pi / 4
# Centres and standard deviations of equally likely Gaussians.
DENSITIES = {
    "wide gaussian": ([[0.0, 0.0]], [[3.0]]),
    "two": ([[-1.0, 0.0], [1.5, 0.5]], [[0.3], [0.6]]),
    "eight": ((3 * np.stack((np.cos(ANGLES), np.sin(ANGLES)), 1)).tolist(), [[0.3]]),
}


def flow_model(name, num_steps, dtype=torch.float64):
    """The model, and points that it makes."""
    model = ExactModel(*DENSITIES[name], lambda times: (1 - times / num_steps, times / num_steps), "flow", dtype)
    generator = torch.Generator().manual_seed(0)
    which = torch.randint(len(model.means), (400,), generator=generator)
    noise = torch.randn(400, 2, generator=generator, dtype=torch.float64)
    return model, model.means[which] + model.scales.expand(len(model.means), 1)[which] * noise


def flow_of(num_steps, shift=1.0):
    return make_process("flow_matching", num_steps=num_steps, shift=shift, is_bounded=False)


@pytest.mark.slow
@cases(("name", "num_steps", "shift"), [("wide gaussian", 100, 3.0), ("two", 1000, 1.0), ("eight", 100, 1.0)])
def test_flow_matching_finds_the_density_of_the_data_to_a_thousandth_of_a_nat(name, num_steps, shift):
    (model, points), process = flow_model(name, num_steps), flow_of(num_steps, shift)
    found = log_likelihood(model, process, points)
    assert len(model.times) == 4 * NUM_STEPS
    assert (found - model.log_prob(points)).mean().abs() < 1e-3
    # Point by point, it is the density with the noise of the first timestep on it.
    torch.testing.assert_close(found, model.log_prob(points, process.levels.snr[0] ** -0.5), rtol=0, atol=1e-2)
    half = log_likelihood(model, process, points[:100], NUM_STEPS // 2)
    mean, error = exact_kl(model.log_prob(points).numpy(), found.numpy(), half.numpy())
    assert abs(mean) < 1e-3 / math.log(2)
    assert np.isfinite(error)


def test_a_flow_model_is_asked_from_the_least_trained_noise_to_pure_noise():
    (exact, points), process = flow_model("two", 100), flow_of(100, 3.0)
    found = log_likelihood(exact, process, points)
    in_float32 = log_likelihood(flow_model("two", 100, torch.float32)[0], process, points)
    assert exact.times[0] == pytest.approx(float(process.model_time(torch.arange(100))[0]), rel=1e-6)
    assert exact.times[-1] == pytest.approx(100, rel=1e-5)
    assert exact.times == sorted(exact.times)
    assert (found - exact.log_prob(points)).mean().abs() < 1e-3
    assert in_float32.dtype == torch.float64
    torch.testing.assert_close(in_float32, found, rtol=0, atol=1e-4)
