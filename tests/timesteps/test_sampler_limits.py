"""Samplers between updates, at the limits of their parameters, and what the parts that follow the losses learn.

Densities and draws are in test_samplers.py, curricula in test_curricula.py.
"""

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from tables import cases

from diffusers_lrlab import LabError, get_timestep_sampler
from diffusers_lrlab.timesteps.adaptive import LearnedLogVariance, LossSecondMoment
from diffusers_lrlab.timesteps.noise_levels import noise_levels
from diffusers_lrlab.timesteps.registries import DRAWS, TIMESTEP_SAMPLERS
from diffusers_lrlab.timesteps.weighting import get_loss_weighting

UPDATES = 20
each_name = cases("name", TIMESTEP_SAMPLERS)


def make(name, num=60, **kwargs):
    return get_timestep_sampler(name, num_train_timesteps=num, num_training_steps=UPDATES, **kwargs)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def is_distribution(probabilities):
    return bool((probabilities >= 0).all()) and abs(probabilities.sum().item() - 1) < 1e-12


# --- from one update to the next -------------------------------------------------------------------------------------


@cases("draw", DRAWS)
@each_name
def test_draws_depend_on_the_update_and_not_on_those_before(name, draw):
    sampler = make(name, draw=draw)
    for update in (0, 7, 7, 3, UPDATES, 0, 10 * UPDATES, 3):
        assert sampler.sample(40, update, seeded()).equal(make(name, draw=draw).sample(40, update, seeded()))


@each_name
def test_probabilities_are_the_callers_own_and_updates_may_be_an_array(name):
    sampler = make(name)
    found = sampler.probabilities(np.array([[0, 3, 5], [3, UPDATES, 0]]))
    assert found.shape == (2, 3, 60)
    assert found[0, 1].equal(found[1, 0])
    assert found[1, 1].equal(sampler.probabilities(UPDATES))
    before = sampler.sample(40, 3, seeded())
    sampler.probabilities(3).zero_()
    assert sampler.sample(40, np.int64(3), seeded()).equal(before)


# --- limits of parameters --------------------------------------------------------------------------------------------

EXTREMES = (1e-300, 0.5, 1e300, -1e300)


def extremes(parameter):
    yield from (value for value in (*map(float, parameter.interval.bounds), *EXTREMES) if value in parameter.interval)


LIMITS = [
    pytest.param(name, parameter.name, value, id=f"{name} {parameter.name}={value:g}")
    for name, entry in TIMESTEP_SAMPLERS.items()
    for parameter in entry.parameters
    if parameter.kind is float
    for value in extremes(parameter)
]


@cases(("name", "parameter", "value"), LIMITS)
def test_what_is_allowed_gives_a_distribution_or_says_why_not(name, parameter, value):
    try:
        sampler = make(name, **{parameter: value})
    except LabError as error:
        assert f"{value:g}" in str(error) or repr(value) in str(error)  # noqa: PT017
        return
    for update in (0, 5, UPDATES):
        probabilities = sampler.probabilities(update)
        assert is_distribution(probabilities)
        assert (probabilities[sampler.sample(100, update, seeded())] > 0).all()


def test_unbiased_weights_of_a_narrow_density_are_numbers_or_refused():
    """A timestep that is never drawn in truth is one that no weight makes up for, as in a restricted range."""
    with pytest.raises(LabError, match="unbiased=True cannot hold"):
        make("clts_static:sigma=0.02", 1000, unbiased=True)
    sampler = make("clts_static:sigma=0.06", 1000, unbiased=True)
    weights = sampler.loss_weights(torch.arange(1000), UPDATES).double()
    assert torch.isfinite(weights).all()
    assert (sampler.probabilities(UPDATES) * weights).sum().item() == pytest.approx(1, rel=1e-6)


@cases("num", [5, 7, 38, 60])
def test_easy_to_hard_is_never_an_update_late(num):
    """Part k joins at the first update at or after (k - 1) / (K - 1) of the ramp, in whole numbers."""
    for updates in (*range(1, 60), 1000):
        sampler = get_timestep_sampler("easy_to_hard", num, updates, num_clusters=5, ramp_share=0.5)
        table = sampler.probabilities(np.arange(updates + 1)) > 0
        stages = [min(1 + 2 * update * 4 // updates, 5) for update in range(updates + 1)]
        assert table.sum(dim=1).tolist() == [-(-stage * num // 5) for stage in stages]
        assert table[:, -1].all()


# --- what follows the losses -----------------------------------------------------------------------------------------

FOLLOWERS = {
    "second moment": lambda: LossSecondMoment(noise_levels(None, 12), 3, 0.01),
    "log variance": lambda: LearnedLogVariance(noise_levels(None, 12), 16, 0.01),
}
each_follower = cases("new", FOLLOWERS.values(), ids=FOLLOWERS)


@each_follower
def test_losses_that_require_a_gradient_are_only_looked_at(new):
    first, second = new(), new()
    timesteps, losses = torch.arange(12), torch.linspace(0.1, 2, 12)
    tracked = losses.clone().requires_grad_()
    first.observe(timesteps, tracked)
    second.observe(timesteps, losses)
    expected = second.state_dict()
    for key, value in first.state_dict().items():
        assert value.equal(expected[key])
        assert not value.requires_grad
    assert tracked.grad is None


def test_the_log_variance_becomes_the_log_of_the_expected_loss():
    weighting = get_loss_weighting("learned_log_variance", DDPMScheduler())
    t, generator = torch.arange(1000), seeded()
    expected = 0.02 + 0.5 * torch.exp(-t / 300)
    assert weighting.weights(t).tolist() == [1.0] * 1000
    for _ in range(600):
        timesteps = torch.randint(0, 1000, (256,), generator=generator)
        # The mean of this factor is 1, that of its logarithm -0.14: which of the two is learned makes a difference.
        factor = 0.5 + torch.randint(0, 2, (256,), generator=generator)
        weighting.observe(timesteps, expected[timesteps] * factor)
    error = (weighting.weights(t) * expected).log()
    assert error.mean().abs() < 0.05
    assert error.square().mean().sqrt() < 0.1


def test_a_loss_far_above_pulls_no_harder_than_eleven_times_what_is_expected():
    def gradient(loss):
        learned = LearnedLogVariance(noise_levels(None, 12), 16, 0.01)
        learned.observe(torch.arange(12), torch.full((12,), loss))
        return learned.coefficients.grad

    assert gradient(1e6).equal(gradient(11.0))
    torch.testing.assert_close(gradient(10.0), gradient(11.0) * 0.9)
    assert gradient(1.0).equal(torch.zeros(16))
