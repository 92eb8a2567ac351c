"""The density that a model gives to points, by the probability-flow ODE."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from diffusers import DDPMScheduler
from gaussians import gaussian_kl, normal
from tables import rows

from diffusers_lrlab.data.toy2d import mixture_log_prob
from diffusers_lrlab.evaluation.likelihood import NUM_STEPS, _NoisePrediction, exact_kl, log_likelihood
from diffusers_lrlab.objective.ddpm import DDPM

# --- densities of models ---------------------------------------------------------------------------------------------

PREDICTION_TYPES = ["epsilon", "sample", "v_prediction"]
BETA_SCHEDULES = ["linear", "squaredcos_cap_v2"]
every_prediction = rows("prediction_type", PREDICTION_TYPES)
every_schedule = rows("beta_schedule", BETA_SCHEDULES)


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
        self.levels, self.calls = log_noise_levels(scheduler), []

    def __call__(self, noisy, timesteps):
        assert noisy.dtype == self.dtype
        assert timesteps.shape == (len(noisy),)
        assert (timesteps >= 0).all()
        assert (timesteps <= len(self.levels) - 1).all()
        self.calls.append((len(noisy), float(timesteps[0])))
        sigma = torch.from_numpy(np.exp(np.interp(timesteps.double().numpy(), np.arange(len(self.levels)), self.levels)))[
            :, None
        ]
        sigma = sigma.to(self.dtype)
        scaled = noisy * (1 + sigma**2).sqrt()
        variances = self.variances + sigma**2
        offsets = scaled[:, None] - self.means
        shares = torch.softmax(-(offsets**2 / variances[:, None]).sum(-1) / 2, dim=1)[..., None]
        noise = sigma * (shares * offsets).sum(1) / variances
        points = scaled - sigma * noise
        prediction = {
            "epsilon": noise,
            "sample": points,
            "v_prediction": (noise - sigma * points) / (1 + sigma**2).sqrt(),
        }[self.scheduler.config.prediction_type]
        return SimpleNamespace(sample=prediction)


def pushed_gaussian(levels, mean, scales):
    """Mean and standard deviation of what the exact ODE makes of N(0, 1 + sigma ** 2) at the last level."""
    first, last = np.exp(levels[0]), np.exp(levels[-1])
    shrink = np.sqrt((np.square(scales) + first**2) / (np.square(scales) + last**2))
    return np.asarray(mean) * (1 - shrink), shrink * math.sqrt(1 + last**2)


WIDE_GAUSSIAN = ([0.0, 0.0], [2.0, 2.0])
GAUSSIANS = [([0.0], [1.0]), ([1.5], [0.3]), ([0.7, -1.2], [0.5, 2.0]), ([0.0, 0.4, -3.0], [1.0, 0.1, 0.6])]


def log_likelihoods(beta_schedule, prediction_type, mean, scales, steps, timesteps=1000):
    """Of a perfect model of a Gaussian by the ODE in so many steps, one row each; and the exact ones."""
    scheduler = make_scheduler(beta_schedule, prediction_type, timesteps)
    model = OptimalModel(scheduler, [mean], scales)
    points = mean + 1.5 * normal(0, 50, len(mean)) * scales
    pushed_mean, pushed_scales = pushed_gaussian(model.levels, mean, scales)
    exact = scipy.stats.norm.logpdf(points, pushed_mean, pushed_scales).sum(axis=1)
    # What the model was made for, but for the first and the last noise, which are less in 100 timesteps.
    assert timesteps < 1000 or np.abs(exact - scipy.stats.norm.logpdf(points, mean, scales).sum(axis=1)).max() < 0.3
    logs = [log_likelihood(model, DDPM(scheduler), torch.from_numpy(points), num_steps) for num_steps in steps]
    assert all(values.shape == (50,) and values.dtype == torch.float64 for values in logs)
    return torch.stack(logs).numpy(), exact


@pytest.mark.slow
@every_prediction
@every_schedule
@rows(("mean", "scales"), [GAUSSIANS[1], GAUSSIANS[3]])
def test_the_density_is_that_of_the_pushed_gaussian(mean, scales, prediction_type, beta_schedule):
    (logs,), exact = log_likelihoods(beta_schedule, prediction_type, mean, scales, [200])
    np.testing.assert_allclose(logs, exact, atol=1e-4)


@pytest.mark.slow
def test_points_start_as_standard_normal_ones_where_signal_is_left():
    """At the last level of this schedule the noise has but 1.4 times the size of the signal."""
    scheduler = DDPMScheduler(1000, beta_end=0.002)
    model = OptimalModel(scheduler, [[0.7, -1.2]], [0.5, 2.0])
    assert math.exp(model.levels[-1]) == pytest.approx(1.4, abs=0.1)
    points = normal(0, 50)
    pushed_mean, pushed_scales = pushed_gaussian(model.levels, [0.7, -1.2], [0.5, 2.0])
    exact = scipy.stats.norm.logpdf(points, pushed_mean, pushed_scales).sum(axis=1)
    np.testing.assert_allclose(log_likelihood(model, DDPM(scheduler), torch.from_numpy(points), 200), exact, atol=3e-3)


@pytest.mark.slow
@rows("timesteps", [100, 1000])
@every_schedule
@rows(("mean", "scales"), [*GAUSSIANS, WIDE_GAUSSIAN])
def test_the_default_number_of_steps_is_enough(mean, scales, beta_schedule, timesteps):
    """The mean, which is in the divergence of the model, is right to a thousandth of a nat."""
    (logs,), exact = log_likelihoods(beta_schedule, "epsilon", mean, scales, [NUM_STEPS], timesteps)
    assert logs.mean() == pytest.approx(exact.mean(), abs=1e-3)


@pytest.mark.slow
@every_schedule
def test_twice_the_steps_have_a_sixteenth_of_the_error(beta_schedule):
    logs, exact = log_likelihoods(beta_schedule, "v_prediction", *GAUSSIANS[2], [40, 80], 1000)
    errors = np.abs(logs - exact).mean(axis=1)
    assert errors[0] / errors[1] == pytest.approx(16, rel=0.4)


@rows("num_steps", [10, 20, NUM_STEPS])
@every_schedule
def test_the_error_of_the_divergence_covers_the_bias_of_the_steps(beta_schedule, num_steps):
    """A perfect model of the data leaves next to no spread of the points: nearly all of the error is the bias."""
    (of_model, half_steps), exact = log_likelihoods(beta_schedule, "epsilon", *GAUSSIANS[1], [num_steps, num_steps // 2])
    mean, error = exact_kl(exact, of_model, half_steps[:20])
    assert abs(mean) < 2 * error
    _, error_of_points = exact_kl(exact, of_model)
    assert error >= error_of_points


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


MIXTURE = np.array([[-2.0, 0.0], [1.0, 1.5], [1.0, -1.5]])


@pytest.mark.slow
@every_prediction
def test_the_density_of_a_mixture(prediction_type):
    """A perfect model gives back the density of the data with the noise of the first timestep."""
    scheduler = make_scheduler("squaredcos_cap_v2", prediction_type)
    model = OptimalModel(scheduler, MIXTURE.tolist(), [0.4, 0.6])
    rng = np.random.default_rng(0)
    points = MIXTURE[rng.integers(3, size=40)] + rng.normal(size=(40, 2)) * [0.4, 0.6]
    scales = np.hypot([0.4, 0.6], math.exp(model.levels[0]))
    logs = log_likelihood(model, DDPM(scheduler), torch.from_numpy(points), 100).numpy()
    np.testing.assert_allclose(logs, mixture_log_prob(points, MIXTURE, scales), atol=0.01)


class Network(torch.nn.Module):
    """Smooth and arbitrary: knows nothing of any data."""

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


@pytest.mark.slow
@pytest.mark.parametrize(("prediction_type", "width"), [("epsilon", 900), ("v_prediction", 12)])
def test_the_density_of_any_network_integrates_to_1(prediction_type, width):
    """Nothing but the flow makes it so. A network that predicts little noise leaves points as wide as the last level."""
    points = torch.linspace(-width, width, 4001, dtype=torch.float64)[:, None]
    logs = log_likelihood(Network(1), DDPM(make_scheduler("linear", prediction_type)), points, 200)
    assert torch.trapezoid(logs.exp(), points[:, 0]).item() == pytest.approx(1, abs=0.01)


@every_schedule
def test_the_density_of_a_mixture_integrates_to_1(beta_schedule):
    scheduler = make_scheduler(beta_schedule)
    model = OptimalModel(scheduler, MIXTURE.tolist(), [0.4, 0.6])
    axis = np.linspace(-5, 5, 51)
    grid = torch.from_numpy(np.array(list(itertools.product(axis, axis))))
    total = log_likelihood(model, DDPM(scheduler), grid).exp().sum().item() * (axis[1] - axis[0]) ** 2
    assert total == pytest.approx(1, abs=0.03)


@every_prediction
@rows("dimension", [1, 2, 4])
def test_the_divergence_is_that_of_finite_differences(dimension, prediction_type):
    predict = _NoisePrediction(Network(dimension), DDPM(make_scheduler(prediction_type=prediction_type)))
    points, width = torch.from_numpy(2 * normal(0, 6, dimension)), 1e-5
    for log_sigma in (-2.0, 0.0, 1.7):
        value, divergence = predict.with_divergence(points, log_sigma)
        torch.testing.assert_close(value, predict(points, log_sigma).detach(), rtol=0, atol=0)
        assert not value.requires_grad
        expected = torch.zeros(6, dtype=torch.float64)
        for axis in range(dimension):
            step = width * torch.eye(dimension, dtype=torch.float64)[axis]
            change = predict(points + step, log_sigma) - predict(points - step, log_sigma)
            expected += change.detach()[:, axis] / (2 * width)
        torch.testing.assert_close(divergence, expected, rtol=1e-6, atol=1e-7)


@every_prediction
@every_schedule
def test_timesteps_are_those_of_the_noise(prediction_type, beta_schedule):
    scheduler = make_scheduler(beta_schedule, prediction_type)
    seen = []

    class Model:
        dtype = torch.float64

        def __call__(self, noisy, timesteps):
            seen.append((noisy, timesteps))
            return SimpleNamespace(sample=noisy)

    predict = _NoisePrediction(Model(), DDPM(scheduler))
    points = torch.from_numpy(normal(0, 5))
    for timestep in (0, 1, 500, 998, 999):
        alpha = scheduler.alphas_cumprod[timestep].double()
        predict(points, float(log_noise_levels(scheduler)[timestep]))
        torch.testing.assert_close(seen[-1][1], torch.full((5,), float(timestep)), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(seen[-1][0], alpha.sqrt() * points, rtol=1e-9, atol=0)


@rows("batch_size", [1, 2, 6, 7, 100])
def test_the_batch_size_does_not_matter(batch_size):
    scheduler = make_scheduler()
    points = torch.from_numpy(normal(0, 7))
    expected = log_likelihood(Network(2), DDPM(scheduler), points, 10)
    model = OptimalModel(scheduler, [[0.0, 0.0]], [1.0, 1.0])
    torch.testing.assert_close(
        log_likelihood(Network(2), DDPM(scheduler), points, 10, batch_size), expected, rtol=1e-10, atol=1e-10
    )
    log_likelihood(model, DDPM(scheduler), points, 3, batch_size)
    assert max(size for size, _ in model.calls) == min(batch_size, 7)


def test_likelihoods_in_float32_are_near_and_leave_no_trace():
    scheduler = make_scheduler()
    points = torch.from_numpy(normal(0, 20)).float()
    double, single = Network(2), Network(2).to(torch.float32)
    with torch.no_grad():
        logs = log_likelihood(single, DDPM(scheduler), points, 50)
    assert not logs.requires_grad
    assert logs.dtype == torch.float64
    assert not points.requires_grad
    assert all(weight.grad is None for weight in single.weights)
    torch.testing.assert_close(logs, log_likelihood(double, DDPM(scheduler), points.double(), 50), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_steps", [0, -1])
def test_a_number_of_steps_that_is_none_is_told(num_steps):
    with pytest.raises(ValueError, match=f"num_steps={num_steps}"):
        log_likelihood(Network(2), DDPM(make_scheduler()), torch.zeros(3, 2), num_steps)


def test_a_schedule_of_a_single_noise_level_is_refused():
    with pytest.raises(ValueError, match="noise level of all timesteps .1. is the same"):
        log_likelihood(Network(2), DDPM(DDPMScheduler(1)), torch.zeros(3, 2))


def test_a_prediction_that_is_not_known_is_told():
    with pytest.raises(ValueError, match="flow_prediction"):
        log_likelihood(Network(2), DDPM(make_scheduler(prediction_type="flow_prediction")), torch.zeros(3, 2), 5)


def test_the_exact_divergence_is_a_mean_with_its_error():
    of_data, of_model = np.random.default_rng(0).normal(size=(2, 50))
    mean, error = exact_kl(of_data, of_model)
    differences = [(x - y) / math.log(2) for x, y in zip(of_data, of_model, strict=True)]
    expected = sum(differences) / 50
    assert mean == pytest.approx(expected, rel=1e-12)
    assert error == pytest.approx(math.sqrt(sum((d - expected) ** 2 for d in differences) / 49 / 50), rel=1e-12)
    assert exact_kl(of_data, of_data) == (0, 0)
    assert exact_kl(of_model, of_data)[0] == -mean


def test_the_exact_divergence_of_gaussians_is_within_its_error():
    """The mean is near the closed form, and the spread over draws is what is told."""
    expected = gaussian_kl([0, 1], [1, 0.5], [0.5, 1], [1.5, 1])
    values = []
    for seed in range(200):
        points = normal(seed, 300) * [1, 0.5] + [0, 1]
        of_data = mixture_log_prob(points, np.array([[0, 1]]), np.array([1, 0.5]))
        of_model = mixture_log_prob(points, np.array([[0.5, 1]]), np.array([1.5, 1]))
        values.append(exact_kl(of_data, of_model))
    means, errors = np.array(values).T
    assert means.mean() == pytest.approx(expected, abs=4 * means.std() / math.sqrt(200))
    assert errors.mean() == pytest.approx(means.std(), rel=0.2)


def test_the_exact_divergence_of_a_model_is_that_of_what_it_makes():
    scheduler = make_scheduler()
    model = OptimalModel(scheduler, [[0.5, -1.0]], [1.5, 0.7])
    points = normal(0, 2000) * 0.8
    of_model = log_likelihood(model, DDPM(scheduler), torch.from_numpy(points), 100).numpy()
    mean, error = exact_kl(mixture_log_prob(points, np.zeros((1, 2)), np.array([0.8, 0.8])), of_model)
    assert error < 0.1
    expected = gaussian_kl([0, 0], [0.8, 0.8], *pushed_gaussian(model.levels, [0.5, -1.0], [1.5, 0.7]))
    assert mean == pytest.approx(expected, abs=4 * error + 0.01)


@rows(
    ("first", "second"),
    [((5,), (6,)), ((1,), (1,)), ((0,), (0,)), ((5, 1), (5, 1)), ((5,), (5, 1)), ((), ())],
)
def test_densities_that_do_not_match_are_told(first, second):
    with pytest.raises(ValueError) as told:  # noqa: PT011
        exact_kl(np.zeros(first), np.zeros(second))
    assert f"{first} and {second}" in str(told.value)
