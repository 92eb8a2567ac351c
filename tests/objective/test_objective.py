"""What an update learns from, put together: every sampler with every weighting and every noise."""

import itertools

import pytest
import torch
from tables import cases
from torch.utils._python_dispatch import TorchDispatchMode

from diffusers_lrlab.data.layout import BatchLayout
from diffusers_lrlab.diagnostics.timestep_log import TimestepLosses, bin_starts
from diffusers_lrlab.objective.noise import NOISES
from diffusers_lrlab.objective.objective import Objective
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_LRS, TIMESTEP_SAMPLERS
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.resolve_timesteps import objective_spec

IMAGES = torch.linspace(-1, 1, 8 * 16).view(8, 1, 4, 4)


def make_objective(layout=None, **options):
    config = resolve_config(TrainingConfig(ddpm_num_steps=20, max_train_steps=10, **options))
    device = torch.device("cpu")
    spec = objective_spec(config)
    return Objective.of(spec, spec.make_process(), layout or BatchLayout(8), 10, device, gather=None)


@pytest.mark.slow
@cases(
    ("sampler", "weighting", "prediction_type"),
    [
        *itertools.product(TIMESTEP_SAMPLERS, LOSS_WEIGHTINGS, ["epsilon"]),
        *itertools.product(["uniform", "loss_second_moment"], LOSS_WEIGHTINGS, ["sample", "v_prediction"]),
    ],
)
def test_every_sampler_goes_with_every_weighting_and_every_noise(sampler, weighting, prediction_type):
    options = {"timestep_sampler": sampler, "loss_weighting": weighting, "prediction_type": prediction_type}
    for noise in NOISES:
        objective = make_objective(noise=noise, **options)
        for update in (0, 9):
            timesteps = objective.draw(update)
            weights = objective.weights(timesteps, update)
            assert objective.is_weighted or weights is None
            if weights is not None:
                assert weights.isfinite().all()
                assert (weights >= 0).all()
            (part,) = objective.noise(update, IMAGES)
            assert part.shape == IMAGES.shape
            assert part.isfinite().all()
            objective.observe(timesteps, torch.rand(8))


@cases("form", TIMESTEP_LRS)
@cases("weighting", LOSS_WEIGHTINGS)
def test_rates_per_timestep_multiply_what_is_there(form, weighting):
    plain = make_objective(loss_weighting=weighting)
    objective = make_objective(loss_weighting=weighting, timestep_lr=f"{form}:factors=[1|3]")
    everything = torch.arange(20)
    before = plain.weights(everything, 0)
    before = torch.ones(20) if before is None else before
    after = objective.weights(everything, 0)
    after = torch.ones(20) if after is None else after
    factors = torch.tensor([1.0] * 10 + [3.0] * 10) if form == "weight" else torch.ones(20)
    assert after.equal(before * factors)


class NoReading(TorchDispatchMode):
    """Fails where a value is read off a tensor, which on a GPU would wait for it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function), function
        assert "nonzero" not in str(function), function
        return function(*args, **(kwargs or {}))


def test_reading_is_noticed():
    with NoReading(), pytest.raises(AssertionError):
        torch.ones(()).item()


@cases("sampler", TIMESTEP_SAMPLERS)
@cases("weighting", ["none", "min_snr", "learned_log_variance"])
def test_nothing_is_read_off_the_device_inside_an_update(sampler, weighting):
    objective = make_objective(timestep_sampler=sampler, loss_weighting=weighting)
    sums = TimestepLosses(bin_starts(10, 20), torch.device("cpu"))
    for update in range(3):
        with NoReading():
            timesteps = objective.draw(update)
            objective.weights(timesteps, update)
            losses = torch.rand(8)
            sums.add(timesteps, losses)
            # Adam keeps its count on the CPU and reads it there, so it is left out.
            objective.sampler.observe(timesteps, losses)
        objective.observe(timesteps, losses)
