"""The noise process: conversions between predictions, what models must return, and the options of the objective."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from registrations import restored
from tables import cases

from diffusers_lrlab import LabError, TrainingConfig
from diffusers_lrlab.core.registry import Parameter
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.evaluation.held_out import ValidationLoss
from diffusers_lrlab.objective.process import OBJECTIVES, make_process
from diffusers_lrlab.objective.processes import DDPM
from diffusers_lrlab.training.arguments import parse_arguments
from diffusers_lrlab.training.resolve import resolve_config

PROCESSES = {
    prediction: DDPM(DDPMScheduler(1000, prediction_type=prediction)) for prediction in ("epsilon", "sample", "v_prediction")
}
PROCESSES["flow"] = make_process("flow_matching", num_steps=20, shift=3.0, is_bounded=False)


@cases("prediction_type", PROCESSES)
@cases("shape", [(3,), (1, 4, 4)])
def test_a_perfect_prediction_has_no_loss_and_implies_the_noise(prediction_type, shape):
    process = PROCESSES[prediction_type]
    data, noise = torch.randn(2, 4, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for timestep in (0, process.num_train_timesteps // 2, process.num_train_timesteps - 1):
        timesteps = torch.full((4,), timestep)
        target = {"epsilon": noise, "sample": data, "flow": noise - data}
        if prediction_type == "v_prediction":
            target["v_prediction"] = process.scheduler.get_velocity(data, noise, timesteps)
        prediction = target[prediction_type]
        is_exact = prediction_type == "flow"  # DDPM's table is float32
        assert process.prediction_losses(prediction, data, noise, timesteps).abs().max() <= (0 if is_exact else 1e-6)
        sigma = max(process.levels.snr[timestep], 1e-12) ** -0.5
        scaled, noisy = data + sigma * noise, process.add_noise(data, noise, timesteps)
        found = process.predicted_noise(prediction, scaled, sigma)
        torch.testing.assert_close(process.model_input(scaled, sigma), noisy, rtol=0, atol=1e-5 if is_exact else 1e-4)
        torch.testing.assert_close(found, noise, rtol=0, atol=1e-9 if is_exact else 1e-4)


@cases("prediction_type", PROCESSES)
def test_the_built_in_weights_are_those_of_the_loss(prediction_type):
    process = PROCESSES[prediction_type]
    num = process.num_train_timesteps
    losses = process.prediction_losses(torch.ones(num, 2), torch.zeros(num, 2), torch.zeros(num, 2), torch.arange(num))
    np.testing.assert_allclose(losses.numpy(), process.built_in_weights, rtol=1e-5)
    for times in (torch.arange(num), torch.tensor([0.25, 8.5])):
        assert (process.model_time(times) is times) == (prediction_type != "flow")


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


@cases(
    ("arguments", "expected"),
    [
        ([], {}),
        (["--objective=ddpm:num_steps=50", "--ddpm_num_steps=50"], {"num_steps": 50}),
        (["--objective_kwargs", '{"beta_schedule": "sigmoid"}'], {"beta_schedule": "sigmoid"}),
        (["--ddpm_beta_schedule=sigmoid"], {"beta_schedule": "sigmoid"}),
        (["--prediction_type=sample"], {"prediction_type": "sample"}),
        (["--dataset_name=moons", "--objective=ddpm:num_steps=7"], {"num_steps": 7}),
    ],
)
def test_flags_and_spec_strings_are_parameters_of_one_objective(arguments, expected):
    config = resolve_config(parse_arguments(arguments, ""))
    assert config.objective == "ddpm"
    assert config.objective_kwargs == {"beta_schedule": "linear", "prediction_type": "epsilon", "num_steps": 1000} | expected
    assert config.num_train_timesteps == config.objective_kwargs["num_steps"]
    assert (config.ddpm_num_steps, config.ddpm_beta_schedule, config.prediction_type) == (None, None, None)
    assert resolve_config(config) == config


@cases(
    ("options", "message"),
    [
        ({"objective": "ddpm:num_steps=50", "ddpm_num_steps": 60}, "twice: as --ddpm_num_steps 60 and as num_steps=50"),
        ({"objective": "flow_matching", "ddpm_num_steps": 60}, "--ddpm_num_steps 60 has no effect on --objective flow_mat"),
        ({"num_inference_steps": 60, "objective": "ddpm:num_steps=50"}, "must be at most 50, the timesteps, got 60"),
        ({"objective": "flow_matching:shift=0"}, r"shift=0 of 'flow_matching': must be a number in \(0, 1000\]"),
        ({"objective": "flow_matching:shift=3,base_resolution=4"}, "base_resolution=4 .* left out beside shift=3"),
        ({"objective": "flow_matching:base_resolution=4", "dataset_name": "moons"}, "beside data without a resolution"),
    ],
)
def test_contradictions_are_refused(options, message):
    with pytest.raises(LabError, match=message):
        resolve_config(TrainingConfig(**options))


def test_another_objective_has_the_timesteps_of_the_kind_of_data_and_a_folder_of_its_own():
    parameters = (Parameter("shift", float, 1.0, "shift", "(0, inf)"),)
    with restored(OBJECTIVES):
        OBJECTIVES.register("other", description="", source="", parameters=parameters)("nowhere:Nothing")
        config = resolve_config(TrainingConfig(objective="other:shift=2", dataset_name="moons"))
    assert (config.objective, config.objective_kwargs) == ("other", {"shift": 2.0, "num_steps": 100})
    assert config.output_dir == "other-moons"
    assert parse_arguments(["--ddpm-num-inference-steps=7"], "").num_inference_steps == 7
