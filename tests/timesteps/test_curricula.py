"""CLTS against the published form, its controls, and the samplers that follow the losses."""

from collections import deque

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from hypothesis import given
from hypothesis import strategies as st
from tables import cases

from diffusers_lrlab import LabError, get_loss_weighting, get_timestep_sampler
from diffusers_lrlab.timesteps.adaptive import LearnedLogVariance, LossSecondMoment
from diffusers_lrlab.timesteps.noise_levels import noise_levels

N = 200
T = np.arange(1000)


def clts(update, name="clts", **kwargs):
    return get_timestep_sampler(name, num_train_timesteps=1000, num_training_steps=N, **kwargs).probabilities(update).numpy()


def gaussian(mu, sigma):
    weights = np.exp(-0.5 * ((T / 1000 - mu) / sigma) ** 2)
    return weights / weights.sum()


@given(st.floats(0, 1), st.floats(0.05, 3), st.floats(0, 1), st.integers(0, 3 * N))
def test_it_is_the_mixture_that_it_says(mu, sigma, lambda_max, update):
    share = lambda_max * min(update / N, 1)
    expected = (1 - share) / 1000 + share * gaussian(mu, sigma)
    assert clts(update, mu=mu, sigma=sigma, lambda_max=lambda_max) == pytest.approx(expected, abs=1e-14)


@cases("update", [0, 1, 50, N, N + 5])
def test_the_controls(update):
    now, end = clts(update), clts(N)
    assert np.array_equal(clts(update, "clts_static"), end)
    assert clts(update, "clts_reversed") == pytest.approx(clts(max(N - update, 0)), abs=1e-15)
    assert update in (N, N + 5) or not np.array_equal(now, end)
    assert np.array_equal(clts(update, "clts_speed_intended"), clts(update, sigma=1.0))


@pytest.mark.parametrize("name", ["clts", "clts_reversed"])
def test_lambda_moves_in_its_share_of_the_run_and_in_its_shape(name):
    def share(update, **kwargs):
        """Lambda, as it shows at the noisy end."""
        start, end = 1 / 1000, gaussian(0.3, 0.3)[-1]
        return (clts(update, name, **kwargs)[-1] - start) / (end - start)

    for update, height in {0: 0, 25: 0.25, 100: 1, 150: 1}.items():
        for ramp, done in (("linear", height), ("cosine", 0.5 * (1 - np.cos(np.pi * height)))):
            expected = done if name == "clts" else 1 - done
            assert share(update, ramp_share=0.5, ramp=ramp) == pytest.approx(expected, abs=1e-12)


def test_afterwards_it_can_be_uniform_again():
    assert clts(100, ramp_share=0.5, after="uniform") == pytest.approx(gaussian(0.3, 0.3), abs=1e-15)
    assert (clts(101, ramp_share=0.5, after="uniform") == 1 / 1000).all()


def test_curriculum_sampling_switches_once():
    """At 60,000 of 150,000 updates, as published; its control the other way round."""
    sampler, reverse = (
        get_timestep_sampler(name, 1000, 150_000) for name in ("logit_normal_then_uniform", "uniform_then_logit_normal")
    )
    middle = get_timestep_sampler("logit_normal:mean=0.8,std=1.0", 1000).probabilities(0)
    flat = torch.full((1000,), 1e-3, dtype=torch.float64)
    for update, first, second in ((0, middle, flat), (59_999, middle, flat), (60_000, flat, flat), (90_000, flat, middle)):
        torch.testing.assert_close(sampler.probabilities(update), first, rtol=1e-12, atol=0)
        torch.testing.assert_close(reverse.probabilities(update), second, rtol=1e-12, atol=0)
    assert reverse.probabilities(89_999).equal(flat)
    assert sampler.loss_weights(torch.arange(9), 70_000) is None


class ReadableSecondMoment:
    """The same as the paper tells it."""

    def __init__(self, num, history, uniform_share):
        self.losses, self.uniform_share = [deque(maxlen=history) for _ in range(num)], uniform_share

    def observe(self, timesteps, losses):
        for t, loss in zip(timesteps.tolist(), losses.tolist(), strict=True):
            self.losses[t].append(loss)

    def probabilities(self):
        num = len(self.losses)
        if any(len(losses) < losses.maxlen for losses in self.losses):
            return np.full(num, 1 / num)
        root = np.array([np.sqrt(np.mean(np.square(losses))) for losses in self.losses])
        return (1 - self.uniform_share) * root / root.sum() + self.uniform_share / num


@pytest.mark.parametrize("history", [1, 3, 10])
def test_second_moments_against_the_readable_twin(history):
    generator = torch.Generator().manual_seed(0)
    fast, slow = LossSecondMoment(noise_levels(None, 8), history, 0.01), ReadableSecondMoment(8, history, 0.01)
    warm = 0
    for _ in range(60):
        # Few timesteps and many images: most come several times, some more often than is kept.
        timesteps = torch.randint(0, 8, (25,), generator=generator)
        losses = torch.rand(25, generator=generator) * (1 + timesteps)
        fast.observe(timesteps, losses)
        slow.observe(timesteps, losses)
        expected = slow.probabilities()
        assert fast.probabilities().numpy() == pytest.approx(expected, rel=1e-6)
        assert fast.probabilities().sum().item() == pytest.approx(1, abs=1e-12)
        warm += expected.std() > 0
    assert 20 < warm <= 60


FOLLOWERS = [
    lambda: LossSecondMoment(noise_levels(None, 8), 3, 0.01),
    lambda: LearnedLogVariance(noise_levels(None, 8), 16, 0.01),
]


@cases("new", FOLLOWERS, ids=["second moment", "log variance"])
@cases("bad", [float("nan"), float("inf")])
def test_losses_that_are_not_finite_are_as_if_they_had_not_been(new, bad):
    state = new()
    for _ in range(3):
        state.observe(torch.arange(8), torch.linspace(1, 2, 8).requires_grad_())
    state.observe(torch.tensor([3, 4]), torch.tensor([bad, 1.5]))
    assert all(value.isfinite().all() and not value.requires_grad for value in state.state_dict().values())
    if isinstance(state, LossSecondMoment):
        assert state.counts.tolist() == [3, 3, 3, 3, 4, 3, 3, 3]


def test_there_is_a_loss_for_each_timestep():
    sampler = get_timestep_sampler("loss_second_moment", num_train_timesteps=4)
    with pytest.raises(LabError, match="Got 1 loss for 2 timesteps"):
        sampler.observe(torch.arange(2), torch.ones(1))


@cases(
    ("num", "first"),
    [(3, [1.1554571, 1.3766880, 0.8263585, -0.5466508]), (1, [-1.1566651, 1.1643283, 1.4131813, -1.2394094])],
)
def test_the_features_of_the_log_variance_stay_those_of_earlier_checkpoints(num, first):
    """They are not in a checkpoint, only the coefficients are. One timestep alone has no borders, and is at 0."""
    features = LearnedLogVariance(noise_levels(None, num), 4, 0.01).features
    assert features[0].tolist() == pytest.approx(first, rel=1e-6)


def test_the_log_variance_becomes_the_log_of_the_expected_loss():
    weighting = get_loss_weighting("learned_log_variance", DDPMScheduler())
    t, generator = torch.arange(1000), torch.Generator().manual_seed(0)
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
        learned = LearnedLogVariance(noise_levels(None, 8), 16, 0.01)
        learned.observe(torch.arange(8), torch.full((8,), loss))
        return learned.coefficients.grad

    assert gradient(1e6).equal(gradient(11.0))
    torch.testing.assert_close(gradient(10.0), gradient(11.0) * 0.9)
    assert gradient(1.0).equal(torch.zeros(16))
