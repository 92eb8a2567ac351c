"""The lowest possible loss, against brute force, densities with a closed form, and a model that memorises."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from diffusers_lrlab.data.toy2d import toy_log_prob, toy_points
from diffusers_lrlab.evaluation.loss_floor import (
    density_errors,
    in_loss_units,
    linear_errors,
    posterior_mean,
    set_errors,
    sigmas_of,
)
from diffusers_lrlab.objective.process import PredictionType, make_process

SIGMAS = np.array([0.05, 0.2, 1.0, 5.0, math.inf])


@pytest.fixture(scope="module")
def digits():
    """All digits as rows of 64 numbers in [-1, 1], float64."""
    return torch.from_numpy(load_digits().data / 8 - 1)


@pytest.mark.parametrize("sigma", [0.01, 0.3, 2.0, 50.0])
def test_the_posterior_mean_is_that_of_a_loop(digits, sigma):
    data = digits[:40]
    noisy = data[:5] + sigma * torch.randn(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for row, found in zip(noisy.tolist(), posterior_mean(noisy, data, sigma), strict=True):
        logs = [-(math.dist(row, one) ** 2) / (2 * sigma**2) for one in data.tolist()]
        weights = [math.exp(log - max(logs)) for log in logs]
        wanted = [math.fsum(w * x for w, x in zip(weights, column, strict=True)) for column in data.T.tolist()]
        np.testing.assert_allclose(found, np.array(wanted) / math.fsum(weights), rtol=1e-9, atol=1e-12)


def test_two_images_have_the_error_of_a_quadrature():
    """At +1 and -1, the posterior mean is tanh(y / sigma^2)."""
    data = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).repeat(2000, 1)
    noise, step = np.linspace(-12, 12, 200_001, retstep=True)
    for sigma in (0.3, 1.0, 3.0):
        normal = np.exp(-(noise**2) / 2) / math.sqrt(2 * math.pi)
        wanted = ((np.tanh((1 + sigma * noise) / sigma**2) - 1) ** 2 * normal).sum() * step
        means, errors = set_errors(data, data, np.array([sigma]), num_drawn=4000)
        assert abs(means[0] - wanted) < 4 * errors[0]
        assert errors[0] < 0.05


def test_a_gaussian_has_the_error_of_the_formula():
    scale, sigmas = 0.7, np.array([0.1, 0.5, 3.0, math.inf])
    found = density_errors(
        lambda x: -(x**2).sum(axis=1) / (2 * scale**2) - math.log(2 * math.pi * scale**2),
        np.full(2, -5.0),
        np.full(2, 5.0),
        sigmas,
    )
    np.testing.assert_allclose(found[:3], scale**2 * sigmas[:3] ** 2 / (scale**2 + sigmas[:3] ** 2), rtol=1e-6)
    np.testing.assert_allclose(found[3], scale**2, rtol=1e-6)
    data = scale * torch.randn(4000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    np.testing.assert_allclose(linear_errors(data, data, sigmas), found, rtol=0.05)


def test_few_queries_have_the_mean_of_many():
    """As of a class with one held-out image."""
    data, queries = torch.randn(2, 60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sigmas = np.array([0.5, 2.0])
    alone = np.array([set_errors(data, query[None], sigmas) for query in queries])
    together, errors = set_errors(data, queries.repeat(50, 1), sigmas, num_drawn=3000)
    assert (alone > 0).all()
    assert (np.abs(alone[:, 0].mean(axis=0) - together) < 4 * (errors + alone[:, 1].mean(axis=0) / 60**0.5)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eight_gaussians", "rings"])
def test_a_density_is_inside_its_bounds_and_agrees_with_a_large_sample(name):
    points = torch.from_numpy(toy_points(name, 12_000)).double()
    low, high = points.min(dim=0).values.numpy(), points.max(dim=0).values.numpy()
    exact = density_errors(toy_log_prob(name), low - 0.1 * (high - low), high + 0.1 * (high - low), SIGMAS)
    data, others = points[:10_000], points[10_000:]
    of_set, error = set_errors(data[::10], data[::10], SIGMAS)
    above, error_above = set_errors(data, others, SIGMAS)
    spread = 0.03 * exact  # of the points themselves, at high noise
    assert (of_set < exact + 4 * error + spread).all()
    assert (above > exact - 4 * error_above - spread).all()
    assert (above < 1.25 * exact).all()  # ten thousand points are few at the lowest noise
    assert of_set[0] < 0.95 * exact[0]  # a thousand points are memorised at low noise


def test_a_density_that_does_not_fit_into_the_rectangle_is_refused():
    log_prob = toy_log_prob("rings")
    assert density_errors(log_prob, np.zeros(2), np.ones(2), SIGMAS) is None


def test_noise_finer_than_the_grid_has_no_error():
    assert np.isnan(density_errors(toy_log_prob("rings"), np.full(2, -6.0), np.full(2, 6.0), np.array([1e-4]))).all()


DDPM = {"objective": "ddpm", "beta_schedule": "linear"}


@pytest.mark.parametrize(
    "objective",
    [{"objective": "flow_matching", "shift": 2.0}, *(DDPM | {"prediction_type": one} for one in get_args(PredictionType))],
    ids=lambda objective: objective.get("prediction_type", "flow"),
)
def test_errors_in_units_of_the_loss(digits, objective):
    """The loss of a prediction with a known error of the data, through `prediction_losses` itself."""
    process = make_process(num_steps=20, is_bounded=True, **objective)
    timesteps = torch.arange(19)
    data = digits[:19]
    noise = torch.randn(data.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sigma = torch.from_numpy(sigmas_of(process, timesteps.numpy()))[:, None]
    off = 0.1  # of each value of the data
    wrong_data, wrong_noise = data + off, noise - off / sigma
    alpha, rate = 1 / (1 + sigma**2).sqrt(), sigma / (1 + sigma**2).sqrt()
    prediction = {
        "epsilon": wrong_noise,
        "sample": wrong_data,
        "v_prediction": alpha * wrong_noise - rate * wrong_data,
        "flow_velocity": wrong_noise - wrong_data,
    }[process.prediction_type]
    losses = process.prediction_losses(prediction, data, noise, timesteps)
    np.testing.assert_allclose(in_loss_units(np.full(19, off**2), process, timesteps.numpy()), losses, rtol=1e-5)


@pytest.mark.slow
def test_a_model_that_memorises_comes_down_to_the_floor_and_not_below(digits):
    torch.manual_seed(0)
    data, sigma = digits[:64], 2.0
    (floor,), (error,) = set_errors(data.repeat(200, 1), data.repeat(200, 1), np.array([sigma]), num_drawn=12_800)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.SiLU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    small = data.float()
    for update in range(1500):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - update / 1500)
        batch = small.repeat(4, 1)
        loss = (model(batch + sigma * torch.randn_like(batch)) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        batch = small.repeat(500, 1)
        reached = (model(batch + sigma * torch.randn_like(batch)) - batch).square().mean().item()
    assert floor - 4 * error < reached < 1.15 * floor
