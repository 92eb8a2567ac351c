"""The options of the objective, and who knows which one it is."""

import re
from pathlib import Path

import pytest

import diffusers_lrlab
from diffusers_lrlab import LabError, TrainingConfig
from diffusers_lrlab.core.registry import Parameter
from diffusers_lrlab.objective.process import OBJECTIVES
from diffusers_lrlab.training.arguments import parse_arguments
from diffusers_lrlab.training.resolve import resolve_config

PACKAGE = Path(diffusers_lrlab.__file__).parent
DEFAULTS = {"beta_schedule": "linear", "prediction_type": "epsilon", "num_steps": 1000}


@pytest.fixture
def other():
    parameters = (Parameter("shift", float, 1.0, "shift", "(0, inf)"),)
    with OBJECTIVES.temporarily():
        OBJECTIVES.register("other", description="", source="", parameters=parameters)("nowhere:Nothing")
        yield


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {}),
        (["--objective=ddpm:num_steps=50", "--ddpm_num_steps=50"], {"num_steps": 50}),
        (["--objective_kwargs", '{"beta_schedule": "sigmoid"}'], {"beta_schedule": "sigmoid"}),
        (
            ["--ddpm_beta_schedule=sigmoid", "--prediction_type=sample"],
            {"beta_schedule": "sigmoid", "prediction_type": "sample"},
        ),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"objective": "ddpm:num_steps=50", "ddpm_num_steps": 60},
            "'num_steps' .* is given twice: as --ddpm_num_steps 60 and as num_steps=50",
        ),
        (
            {"objective": "other", "ddpm_num_steps": 60},
            "--ddpm_num_steps 60 has no effect on --objective other",
        ),
        (
            {"num_inference_steps": 60, "objective": "other:num_steps=50"},
            r"60: must be at most 50, the timesteps, got 60. Hint: num_steps of --objective",
        ),
    ],
)
def test_contradictions_are_refused(other, options, message):
    with pytest.raises(LabError, match=message):
        resolve_config(TrainingConfig(**options))


def test_another_objective_has_the_timesteps_of_the_kind_of_data_and_a_folder_of_its_own(other):
    config = resolve_config(TrainingConfig(objective="other:shift=2", dataset_name="moons"))
    assert (config.objective, config.objective_kwargs) == ("other", {"shift": 2.0, "num_steps": 100})
    assert config.output_dir == "other-moons"


def test_the_steps_of_sampling_have_an_alias():
    assert parse_arguments(["--ddpm-num-inference-steps=7"], "").num_inference_steps == 7


# Classes and flags of diffusers and their namesakes here, folders of runs in examples, and the paper.
MEANT = (
    r"DDPM(Scheduler|Pipeline)|PointDDPM|point_ddpm|--ddpm_num_steps|train_ddpm|ddpm-(dino|digits-8|model-64)|"
    r"DDPM family|DDPM's|DDPM, arXiv"
)


def test_only_one_room_and_one_file_of_options_know_ddpm():
    known = {PACKAGE / "training" / "learning_options.py", *(PACKAGE / "objective").glob("*.py")}
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted({*PACKAGE.rglob("*.py")} - known)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "ddpm" in re.sub(MEANT, "", line).lower()
    ]
    assert not found, "\n".join(found)
