"""Runs with flow matching: trained, resumed, sampled by plain diffusers, carded, studied beside ddpm."""

import json
import math

import diffusers
import numpy as np
import pytest
from diffusers import DDPMPipeline, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from runs import TINY_UNET, read_metrics, read_record

from diffusers_lrlab import MLPDenoiser, PointDDPMPipeline, TrainingConfig
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.run.train import train
from diffusers_lrlab.study.context import StudyContext
from diffusers_lrlab.study.results import StudyFolder
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import load_spec
from diffusers_lrlab.study.stacked.stacks import split_into_stacks
from diffusers_lrlab.timesteps.noise_levels import flow_levels

SMALL = {
    **{"dataset_name": "line", "max_train_steps": 20, "train_batch_size": 16, "num_validation_images": 500},
    **{"distance_samples": 500, "eval_batch_size": 8, "num_inference_steps": 5, "checkpointing_steps": 10},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    MLPDenoiser(hidden_size=16, embedding_size=8, num_layers=1).save_config(folder)
    return SMALL | {"model_config_name_or_path": str(folder)}


@pytest.mark.slow
def test_it_is_trained_evaluated_carded_loaded_and_resumes_only_itself(tiny, tmp_path):
    options = {**tiny, "logging_steps": 1, "output_dir": str(tmp_path / "flow")}
    finished = train(TrainingConfig(**options, objective="flow_matching:shift=3"))
    rows, validations = read_metrics(finished)
    assert rows[-1]["update"] == 19
    assert validations[-1]["validation_loss"] > 0
    record = read_record(finished)
    assert record["config"]["objective"] == "flow_matching"
    assert record["config"]["objective_kwargs"] == {"shift": 3.0, "num_steps": 100}
    assert math.isfinite(record["train"]["results"]["exact_kl"])
    card = (finished / "README.md").read_text()
    assert "| Objective | `flow_matching` |\n| Noise schedule | 100 timesteps, shift 3 |" in card

    pipeline = DiffusionPipeline.from_pretrained(finished)
    assert isinstance(pipeline.scheduler, FlowMatchEulerDiscreteScheduler)
    pipeline.set_progress_bar_config(disable=True)
    assert np.isfinite(pipeline(num_points=4, num_inference_steps=5).points).all()

    for other in ({}, {"objective": "flow_matching"}):
        with pytest.raises(LabError, match="  --objective"):
            train(TrainingConfig(**options, **other, resume_from_checkpoint="checkpoint-10"))


def test_a_stack_has_one_objective(tiny, tmp_path):
    arms = {"flow": {"objective": "flow_matching"}, "shifted": {"objective": "flow_matching:shift=3"}}
    arms = {"ddpm": {}, **arms, "other": {"lr_scheduler": "rex"}}
    base = {name: value for name, value in tiny.items() if name not in ("dataset_name", "eval_batch_size")}
    study = {"title": "Objectives", "base": base, "arms": arms, "datasets": ["line"], "seeds": 1, "evaluation_points": 2}
    runs = expand(load_spec(study | {"metrics": ["energy_distance"]}))
    stacks = split_into_stacks(runs, StudyContext(StudyFolder(tmp_path / "study"), 8))
    assert [[run.arm for run in stack] for stack in stacks] == [["ddpm", "other"], ["flow"], ["shifted"]]


@pytest.mark.slow
def test_images_are_a_pipeline_of_diffusers_alone(tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(TINY_UNET))
    options = {"max_train_steps": 2, "train_batch_size": 4, "num_validation_images": 4, "distance_samples": 0}
    options |= {"eval_batch_size": 2, "num_inference_steps": 2, "preflight": False}
    options |= {"model_config_name_or_path": str(tmp_path / "model.json"), "output_dir": str(tmp_path / "run")}
    train(TrainingConfig(**options, objective="flow_matching:base_resolution=4"))
    index = json.loads((tmp_path / "run" / "model_index.json").read_text())
    assert {library for library, _ in (index[name] for name in ("unet", "scheduler"))} == {"diffusers"}
    pipeline = DDPMPipeline.from_pretrained(tmp_path / "run")
    assert type(pipeline) is getattr(diffusers, index["_class_name"]) is DDPMPipeline
    assert pipeline.scheduler.config.shift == 2.0
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline(batch_size=2, num_inference_steps=3, output_type="np").images.shape == (2, 8, 8, 1)


def test_previews_are_of_an_objective_and_refuse_what_it_decides(capsys):
    assert main(["preview", "--objective=flow_matching", "--loss_weighting=sigma_sqrt"]) == 0
    assert "1e+06" in capsys.readouterr().out
    assert main(["preview", "--objective=flow_matching", "--loss_weighting=p2", "--prediction_type=epsilon"]) == 2
    assert "must be left out beside --objective flow_matching" in capsys.readouterr().err


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_frames_of_points_say_how_many_timesteps_are_left(shift):
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=100, shift=shift)
    pipeline = PointDDPMPipeline(MLPDenoiser(hidden_size=8), scheduler)
    output = pipeline(num_points=4, num_inference_steps=5, num_frames=6)
    assert list(output.frame_timesteps) == [100, 80, 60, 40, 20, 0]


@pytest.mark.parametrize("shift", [0.1, 0.4, 1 / 3, 3.0])
def test_the_noisiest_timestep_is_noise_alone_also_after_sampling(shift):
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=shift)
    levels = flow_levels(scheduler)
    assert levels.alphas_cumprod[-1] == 0
    scheduler.set_timesteps(10)
    np.testing.assert_array_equal(flow_levels(scheduler).alphas_cumprod, levels.alphas_cumprod)
