"""The noise process: conversions between predictions, and another objective beside DDPM."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler

from diffusers_lrlab import LabError
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.evaluation.validation_loss import ValidationLoss
from diffusers_lrlab.objective.ddpm import DDPM
from diffusers_lrlab.objective.process import OBJECTIVES, NoiseProcess, make_process
from diffusers_lrlab.timesteps.noise_levels import noise_levels

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


class Answer(torch.nn.Module):
    """A model that gives the same answer to everything."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, noisy, timesteps):
        return self.answer


@pytest.mark.parametrize("shape", [(4, 1), (1, 3), (3,), (4, 3, 1)])
def test_a_prediction_of_another_shape_is_not_broadcast(shape):
    process, data = DDPM(DDPMScheduler(10)), torch.zeros(4, 3)
    model = Answer(SimpleNamespace(sample=torch.ones(shape)))
    told = rf"The model Answer must return .sample as a tensor of real numbers of shape \(4, 3\), .* {re.escape(str(shape))}"
    with pytest.raises(LabError, match=told):
        process.losses(model, Batch(data), data, torch.arange(4))
    with pytest.raises(LabError, match=told):
        ValidationLoss(Batch(data), process, 4, torch.device("cpu"))(model)


@pytest.mark.parametrize("answer", [torch.ones(4, 3), (torch.ones(4, 3),), None])
def test_a_model_that_returns_no_output_object_is_named(answer):
    data = torch.zeros(4, 3)
    with pytest.raises(LabError, match=r"The model Answer must return an object with \.sample, such as"):
        DDPM(DDPMScheduler(10)).losses(Answer(answer), Batch(data), data, torch.arange(4))


def test_only_the_first_prediction_is_read_off_the_device():
    process, data = DDPM(DDPMScheduler(10)), torch.zeros(4, 3)
    model = Answer(SimpleNamespace(sample=torch.full((4, 3), torch.nan, requires_grad=True)))
    with pytest.raises(LabError, match="returns predictions that are not finite .* before the first update"):
        process.losses(model, Batch(data), data, torch.arange(4), is_first=True)
    assert process.losses(model, Batch(data), data, torch.arange(4)).isnan().all()
    assert (
        process.losses(model, Batch(data * torch.nan), data, torch.arange(4), is_first=True).isnan().all()
    )  # not its fault


@pytest.fixture
def objectives():
    with OBJECTIVES.temporarily():
        yield OBJECTIVES


@pytest.mark.usefixtures("objectives")
def test_another_objective_is_a_class_and_a_row(monkeypatch):
    """Straight lines from data to noise; the model predicts the direction."""

    class Straight(NoiseProcess):
        prediction_type, scheduler, levels = "direction", None, noise_levels(None, 4)
        built_in_weights = np.ones(4)

        def add_noise(self, data, noise, timesteps):
            share = ((timesteps + 1) / 4)[:, None]
            return (1 - share) * data + share * noise

        def prediction_losses(self, prediction, data, noise, timesteps):
            return (prediction - (noise - data)).square().mean(1)

        def model_input(self, scaled, sigma):
            return scaled / (1 + sigma)

        def predicted_noise(self, prediction, scaled, sigma):
            return self.model_input(scaled, sigma) + prediction / (1 + sigma)

    monkeypatch.setattr("diffusers_lrlab.objective.process.Straight", Straight, raising=False)
    OBJECTIVES.register("straight", description="", source="")("diffusers_lrlab.objective.process:Straight")
    process = make_process("straight")

    class Model(torch.nn.Module):
        def forward(self, noisy, timesteps):
            return type("Output", (), {"sample": torch.zeros_like(noisy)})

    validation = ValidationLoss(Batch(torch.ones(8, 2)), process, 4, "cpu")
    expected = (validation.noise - 1).square().mean(1).double().numpy()
    np.testing.assert_allclose(validation(Model()), expected)
    with pytest.raises(LabError, match="Unknown objective 'strait'. Did you mean 'straight'"):
        make_process("strait")


def test_a_noise_schedule_that_diffusers_lacks_is_an_error_with_a_remedy():
    with pytest.raises(LabError, match=r"'linaer' is not in diffusers \d.*pip install -U diffusers"):
        make_process("ddpm", num_train_timesteps=10, beta_schedule="linaer", prediction_type="epsilon", clip_sample=False)
