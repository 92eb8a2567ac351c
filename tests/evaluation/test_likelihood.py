"""The density that a model gives to points, by the probability-flow ODE of DDPM and of flow matching."""

import itertools
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from diffusers import DDPMScheduler
from gaussians import normal
from tables import cases

from diffusers_lrlab.evaluation.likelihood import NUM_STEPS, _NoisePrediction, exact_kl, log_likelihood
from diffusers_lrlab.objective.process import make_process
from diffusers_lrlab.objective.processes import DDPM

GAUSSIANS = [([1.5], [0.3]), ([0.7, -1.2], [0.5, 2.0]), ([0.0, 0.4, -3.0], [1.0, 0.1, 0.6]), ([0.0, 0.0], [2.0, 2.0])]
MIXTURE = np.array([[-2.0, 0.0], [1.0, 1.5], [1.0, -1.5]])


def make_scheduler(beta_schedule="squaredcos_cap_v2", prediction_type="epsilon", timesteps=1000):
    return DDPMScheduler(timesteps, beta_schedule=beta_schedule, prediction_type=prediction_type)


def log_noise_levels(scheduler):
    alphas = scheduler.alphas_cumprod.double().numpy()
    return np.log((1 - alphas) / alphas) / 2


class OptimalModel:
    """What a perfect model of a mixture of Gaussians predicts; between timesteps it interpolates the log of sigma."""

    def __init__(self, scheduler, means, scales, dtype=torch.float64):
        self.dtype, self.scheduler = dtype, scheduler
        self.means, self.variances = torch.tensor(means, dtype=dtype), torch.tensor(scales, dtype=dtype) ** 2
        self.levels = log_noise_levels(scheduler)

    def __call__(self, noisy, timesteps):
        assert (noisy.dtype, timesteps.shape) == (self.dtype, (len(noisy),))
        assert 0 <= timesteps.min() <= timesteps.max() <= len(self.levels) - 1
        levels = np.interp(timesteps.double().numpy(), np.arange(len(self.levels)), self.levels)
        sigma = torch.from_numpy(np.exp(levels)).to(self.dtype)[:, None]
        scaled = noisy * (1 + sigma**2).sqrt()
        variances = self.variances + sigma**2
        offsets = scaled[:, None] - self.means
        shares = torch.softmax(-(offsets**2 / variances[:, None]).sum(-1) / 2, dim=1)[..., None]
        noise = sigma * (shares * offsets).sum(1) / variances
        points = scaled - sigma * noise
        velocity = (noise - sigma * points) / (1 + sigma**2).sqrt()
        predictions = {"epsilon": noise, "sample": points, "v_prediction": velocity}
        return SimpleNamespace(sample=predictions[self.scheduler.config.prediction_type])


def pushed_gaussian(levels, mean, scales):
    """Mean and standard deviation of what the exact ODE makes of N(0, 1 + sigma ** 2) at the last level."""
    first, last = np.exp(levels[0]), np.exp(levels[-1])
    shrink = np.sqrt((np.square(scales) + first**2) / (np.square(scales) + last**2))
    return np.asarray(mean) * (1 - shrink), shrink * math.sqrt(1 + last**2)


def log_likelihoods(beta_schedule, prediction_type, mean, scales, steps, timesteps=1000):
    """Of a perfect model of a Gaussian by the ODE in so many steps, one row each; and the exact ones."""
    scheduler = make_scheduler(beta_schedule, prediction_type, timesteps)
    model = OptimalModel(scheduler, [mean], scales)
    points = mean + 1.5 * normal(0, 50, len(mean)) * scales
    exact = scipy.stats.norm.logpdf(points, *pushed_gaussian(model.levels, mean, scales)).sum(axis=1)
    # What the model was made for, but for the first and the last noise, which are less in 100 timesteps.
    assert timesteps < 1000 or np.abs(exact - scipy.stats.norm.logpdf(points, mean, scales).sum(axis=1)).max() < 0.3
    logs = [log_likelihood(model, DDPM(scheduler), torch.from_numpy(points), num_steps) for num_steps in steps]
    assert all(values.shape == (50,) and values.dtype == torch.float64 for values in logs)
    return torch.stack(logs).numpy(), exact


@pytest.mark.slow
@cases(("prediction_type", "beta_schedule", "gaussian", "timesteps"), [
    ("epsilon", "linear", 0, 100), ("sample", "squaredcos_cap_v2", 1, 1000), ("v_prediction", "linear", 2, 1000),
    ("epsilon", "squaredcos_cap_v2", 3, 100),
])  # fmt: skip
def test_the_density_is_that_of_the_pushed_gaussian(prediction_type, beta_schedule, gaussian, timesteps):
    """Of each point with many steps; on average, which is in the divergence of the model, with the usual number."""
    steps = [NUM_STEPS, 2 * NUM_STEPS, 200]
    logs, exact = log_likelihoods(beta_schedule, prediction_type, *GAUSSIANS[gaussian], steps, timesteps)
    assert logs[0].mean() == pytest.approx(exact.mean(), abs=1e-3)
    np.testing.assert_allclose(logs[2], exact, atol=1e-4)
    if gaussian == 1:  # the error falls with the fourth power of the number of steps
        errors = np.abs(logs[:2] - exact).mean(axis=1)
        assert errors[0] / errors[1] == pytest.approx(16, rel=0.4)


@cases(("num_steps", "beta_schedule"), [(10, "linear"), (NUM_STEPS, "squaredcos_cap_v2")])
def test_the_error_of_the_divergence_covers_the_bias_of_the_steps(num_steps, beta_schedule):
    """A perfect model of the data leaves next to no spread of the points: nearly all of the error is the bias."""
    (of_model, half_steps), exact = log_likelihoods(beta_schedule, "epsilon", *GAUSSIANS[0], [num_steps, num_steps // 2])
    mean, error = exact_kl(exact, of_model, half_steps[:20])
    assert abs(mean) < 2 * error
    assert error >= exact_kl(exact, of_model)[1]


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


class Network(torch.nn.Module):
    """Smooth and arbitrary."""

    def __init__(self, dimension, seed=0, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = [(dimension + 1, 16), (16, dimension)]
        self.weights = torch.nn.ParameterList(torch.randn(s, generator=generator).to(dtype) / 2 for s in shapes)

    @property
    def dtype(self):
        return self.weights[0].dtype

    def forward(self, noisy, timesteps):
        inputs = torch.cat([noisy, timesteps.to(noisy)[:, None] / 1000], dim=1)
        return SimpleNamespace(sample=torch.tanh(inputs @ self.weights[0]) @ self.weights[1])


def test_the_density_of_a_mixture_integrates_to_1():
    scheduler = make_scheduler("linear")
    model = OptimalModel(scheduler, MIXTURE.tolist(), [0.4, 0.6])
    axis = np.linspace(-5, 5, 51)
    grid = torch.from_numpy(np.array(list(itertools.product(axis, axis))))
    total = log_likelihood(model, DDPM(scheduler), grid).exp().sum().item() * (axis[1] - axis[0]) ** 2
    assert total == pytest.approx(1, abs=0.03)


@cases(("prediction_type", "dimension"), [("epsilon", 1), ("sample", 2), ("v_prediction", 4)])
def test_the_divergence_is_that_of_finite_differences(prediction_type, dimension):
    predict = _NoisePrediction(Network(dimension), DDPM(make_scheduler(prediction_type=prediction_type)))
    points, width = torch.from_numpy(2 * normal(0, 6, dimension)), 1e-5
    for log_sigma in (-2.0, 1.7):
        value, divergence = predict.with_divergence(points, log_sigma)
        torch.testing.assert_close(value, predict(points, log_sigma).detach(), rtol=0, atol=0)
        assert not value.requires_grad
        expected = torch.zeros(6, dtype=torch.float64)
        for axis, step in enumerate(width * torch.eye(dimension, dtype=torch.float64)):
            change = predict(points + step, log_sigma) - predict(points - step, log_sigma)
            expected += change.detach()[:, axis] / (2 * width)
        torch.testing.assert_close(divergence, expected, rtol=1e-6, atol=1e-7)


def test_neither_the_batch_size_nor_float32_matters_and_nothing_is_left():
    process, points = DDPM(make_scheduler()), torch.from_numpy(normal(0, 7))
    single, expected = Network(2, dtype=torch.float32), log_likelihood(Network(2), process, points, 10)
    for batch_size in (1, 6):
        logs = log_likelihood(Network(2), process, points, 10, batch_size)
        torch.testing.assert_close(logs, expected, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        logs = log_likelihood(single, process, points.float(), 10)
    assert (logs.requires_grad, logs.dtype) == (False, torch.float64)
    assert all(weight.grad is None for weight in single.weights)
    torch.testing.assert_close(logs, expected, rtol=1e-3, atol=1e-3)


@cases(("scheduler", "num_steps", "expected"), [
    (make_scheduler(), 0, "num_steps=0"),
    (DDPMScheduler(1), 5, "noise level of all timesteps .1. is the same"),
    (make_scheduler(prediction_type="flow_prediction"), 5, "flow_prediction"),
])  # fmt: skip
def test_processes_without_a_likelihood_are_told(scheduler, num_steps, expected):
    with pytest.raises(ValueError, match=expected):
        log_likelihood(Network(2), DDPM(scheduler), torch.zeros(3, 2), num_steps)


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

ANGLES = torch.arange(8, dtype=torch.float64) * math.pi / 4
# Centres and standard deviations of equally likely Gaussians.
DENSITIES = {
    "wide gaussian": ([[0.0, 0.0]], [3.0]),
    "two": ([[-1.0, 0.0], [1.5, 0.5]], [0.3, 0.6]),
    "eight": ((3 * torch.stack((ANGLES.cos(), ANGLES.sin()), 1)).tolist(), [0.3] * 8),
}


class ExactModel:
    """The velocity that the best of all models predicts, which knows the noise level by the time alone."""

    def __init__(self, name, num_steps, dtype=torch.float64):
        self.centres, self.scales = (torch.tensor(part, dtype=torch.float64) for part in DENSITIES[name])
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


def flow_of(num_steps, shift=1.0):
    return make_process("flow_matching", num_steps=num_steps, shift=shift, is_bounded=False)


@pytest.mark.slow
@cases(("name", "num_steps", "shift"), [("wide gaussian", 100, 3.0), ("two", 1000, 1.0), ("eight", 100, 1.0)])
def test_flow_matching_finds_the_density_of_the_data_to_a_thousandth_of_a_nat(name, num_steps, shift):
    model, process = ExactModel(name, num_steps), flow_of(num_steps, shift)
    points = model.points(400)
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
    exact, single, process = ExactModel("two", 100), ExactModel("two", 100, torch.float32), flow_of(100, 3.0)
    points = exact.points(50)
    found, in_float32 = log_likelihood(exact, process, points), log_likelihood(single, process, points)
    trained = process.model_time(torch.arange(100))
    assert exact.times[0] == pytest.approx(float(trained[0]), rel=1e-6)
    assert exact.times[-1] == pytest.approx(100, rel=1e-5)
    assert exact.times == sorted(exact.times)
    assert in_float32.dtype == torch.float64
    torch.testing.assert_close(in_float32, found, rtol=0, atol=1e-4)
