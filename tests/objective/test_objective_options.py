"""The options of the objective."""

import pytest
from registrations import restored
from tables import cases

from diffusers_lrlab import LabError, TrainingConfig
from diffusers_lrlab.core.registry import Parameter
from diffusers_lrlab.objective.process import OBJECTIVES
from diffusers_lrlab.training.arguments import parse_arguments
from diffusers_lrlab.training.resolve import resolve_config

DEFAULTS = {"beta_schedule": "linear", "prediction_type": "epsilon", "num_steps": 1000}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {}),
        (["--objective=ddpm:num_steps=50", "--ddpm_num_steps=50"], {"num_steps": 50}),
        (["--objective_kwargs", '{"beta_schedule": "sigmoid"}'], {"beta_schedule": "sigmoid"}),
        (["--ddpm_beta_schedule=sigmoid"], {"beta_schedule": "sigmoid"}),
        (["--prediction_type=sample"], {"prediction_type": "sample"}),
        (["--dataset_name=moons", "--objective=ddpm:num_steps=7"], {"num_steps": 7}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_flags_and_spec_strings_are_parameters_of_one_objective(arguments, expected):
    config = resolve_config(parse_arguments(arguments, ""))
    assert config.objective == "ddpm"
    assert config.objective_kwargs == DEFAULTS | expected
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
