"""The noise process: conversions between predictions, and what models must return."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from registrations import restored

from diffusers_lrlab import LabError
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.evaluation.held_out import ValidationLoss
from diffusers_lrlab.objective.process import OBJECTIVES, make_process
from diffusers_lrlab.objective.processes import DDPM

PREDICTION_TYPES = ["epsilon", "sample", "v_prediction"]


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_a_perfect_prediction_has_no_loss_and_implies_the_noise(prediction_type):
    process = DDPM(DDPMScheduler(1000, prediction_type=prediction_type))
    data, noise = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for timestep in (0, 500, 999):
        timesteps = torch.full((4,), timestep)
        target = {"epsilon": noise, "sample": data, "v_prediction": process.scheduler.get_velocity(data, noise, timesteps)}
        prediction = target[prediction_type]
        assert process.prediction_losses(prediction, data, noise, timesteps).abs().max() < 1e-6
        sigma = process.levels.snr[timestep] ** -0.5
        scaled = data + sigma * noise
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(process.model_input(scaled, sigma), process.add_noise(data, noise, timesteps), **close)
        torch.testing.assert_close(process.predicted_noise(prediction, scaled, sigma), noise, **close)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_the_built_in_weights_are_those_of_the_loss(prediction_type):
    process = DDPM(DDPMScheduler(10, prediction_type=prediction_type))
    data, noise, timesteps = torch.zeros(10, 2), torch.zeros(10, 2), torch.arange(10)
    losses = process.prediction_losses(torch.ones(10, 2), data, noise, timesteps)
    np.testing.assert_allclose(losses.numpy(), process.built_in_weights, rtol=1e-5)
    for times in (timesteps, torch.tensor([0.25, 8.5])):
        assert process.model_time(times) is times


class Answer(torch.nn.Module):
    """A model that gives the same answer to everything."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, noisy, timesteps):
        return self.answer


PROCESS, DATA = DDPM(DDPMScheduler(10)), torch.zeros(4, 3)


def losses_of(output, data=DATA, **options):
    return PROCESS.losses(Answer(output), Batch(data), DATA, torch.arange(4), **options)


@pytest.mark.parametrize("shape", [(4, 1), (4, 3, 1)])
def test_a_prediction_of_another_shape_is_not_broadcast(shape):
    output = SimpleNamespace(sample=torch.ones(shape))
    told = rf"The model Answer must return .sample as a tensor of real numbers of shape \(4, 3\), .* {re.escape(str(shape))}"
    with pytest.raises(LabError, match=told):
        losses_of(output)
    with pytest.raises(LabError, match=told):
        ValidationLoss(Batch(DATA), PROCESS, 4, torch.device("cpu"))(Answer(output))
    with pytest.raises(LabError, match=r"The model Answer must return an object with \.sample, such as"):
        losses_of((torch.ones(4, 3),))


def test_only_the_first_prediction_is_read_off_the_device():
    output = SimpleNamespace(sample=torch.full((4, 3), torch.nan, requires_grad=True))
    with pytest.raises(LabError, match="returns predictions that are not finite .* before the first update"):
        losses_of(output, is_first=True)
    assert losses_of(output).isnan().all()
    assert losses_of(output, DATA * torch.nan, is_first=True).isnan().all()  # not its fault


def test_a_prediction_that_has_no_gradient_is_refused_at_the_first_update():
    output = SimpleNamespace(sample=torch.ones(4, 3))
    with pytest.raises(LabError, match="The model Answer returns a prediction without a gradient"):
        losses_of(output, is_first=True)
    with torch.no_grad():
        assert losses_of(output, is_first=True).isfinite().all()


def test_a_noise_schedule_that_diffusers_lacks_is_an_error_with_a_remedy():
    with pytest.raises(LabError, match=r"'linaer' is not in diffusers \d.*pip install -U diffusers"):
        make_process("ddpm", num_steps=10, beta_schedule="linaer", prediction_type="epsilon", is_bounded=False)


def test_what_is_no_process_is_refused():
    with restored(OBJECTIVES):
        OBJECTIVES.register("none_at_all", description="", source="")(lambda num_steps, is_bounded: num_steps)
        with pytest.raises(LabError, match="'none_at_all' must return an object of a subclass of NoiseProcess"):
            make_process("none_at_all", num_steps=4, is_bounded=True)
    with pytest.raises(LabError, match="Unknown objective 'dpm'. Did you mean 'ddpm'"):
        make_process("dpm", is_bounded=False)
