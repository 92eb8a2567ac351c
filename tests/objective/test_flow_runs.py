"""Runs with flow matching: trained, resumed, sampled by plain diffusers, carded, studied beside ddpm."""

import json
import math

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from runs import read_metrics, read_record
from safetensors.torch import load_file

from diffusers_lrlab import MLPDenoiser, TrainingConfig
from diffusers_lrlab.core.streams import stream_generator
from diffusers_lrlab.run.train import train
from diffusers_lrlab.study.run import run_study
from diffusers_lrlab.study.runs.context import StudyContext
from diffusers_lrlab.study.runs.results import StudyFolder
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import load_spec
from diffusers_lrlab.study.stacked.stacks import split_into_stacks
from diffusers_lrlab.training.resume import OtherSettings

SMALL = {
    **{"dataset_name": "line", "max_train_steps": 20, "train_batch_size": 16, "num_validation_images": 40},
    **{"distance_samples": 40, "eval_batch_size": 8, "num_inference_steps": 5, "checkpointing_steps": 10},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    MLPDenoiser(hidden_size=16, embedding_size=8, num_layers=1).save_config(folder)
    return SMALL | {"model_config_name_or_path": str(folder)}


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory, blank_pictures):
    folder = tmp_path_factory.mktemp("run") / "flow"
    config = TrainingConfig(
        **tiny, objective="flow_matching:shift=3", logging_steps=1, cpu_threads=1, output_dir=str(folder)
    )
    assert train(config) == folder
    return folder


def test_it_trains_samples_and_is_evaluated(finished):
    rows, validations = read_metrics(finished)
    assert rows[-1]["update"] == 19
    assert validations[-1]["validation_loss"] > 0
    record = read_record(finished)
    assert record["config"]["objective"] == "flow_matching"
    assert record["config"]["objective_kwargs"] == {"shift": 3.0, "num_steps": 100}
    assert math.isfinite(record["train"]["results"]["exact_kl"])


def test_its_pipeline_is_loaded_and_samples(finished):
    pipeline = DiffusionPipeline.from_pretrained(finished)
    assert isinstance(pipeline.scheduler, FlowMatchEulerDiscreteScheduler)
    pipeline.set_progress_bar_config(disable=True)
    output = pipeline(num_points=4, num_inference_steps=5, num_frames=3)
    assert np.isfinite(output.points).all()
    assert output.frame_timesteps[0] == 100
    assert output.frame_timesteps == sorted(output.frame_timesteps, reverse=True)


def test_it_has_a_card(finished):
    card = (finished / "README.md").read_text()
    assert "| Objective | `flow_matching` |\n| Noise schedule | 100 timesteps, shift 3 |" in card


def test_it_resumes_and_only_itself(finished, tiny, tmp_path):
    options = {**tiny, "logging_steps": 1, "cpu_threads": 1, "output_dir": str(tmp_path / "again")}
    train(TrainingConfig(**options, objective="flow_matching:shift=3"))
    (tmp_path / "again" / "checkpoint-20" / "trainer.json").unlink()  # as if it had been killed after update 10
    for other in ({}, {"objective": "flow_matching"}):
        with pytest.raises(OtherSettings, match="  objective"):
            train(TrainingConfig(**options, **other, resume_from_checkpoint="checkpoint-10"))
    train(TrainingConfig(**options, objective="flow_matching:shift=3", resume_from_checkpoint="latest"))
    weights = "denoiser/diffusion_pytorch_model.safetensors"
    straight, resumed = (load_file(folder / weights) for folder in (finished, tmp_path / "again"))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert read_metrics(finished) == read_metrics(tmp_path / "again")


def study_of(tiny):
    arms = {
        "ddpm": {},
        "flow": {"objective": "flow_matching"},
        "shifted": {"objective": "flow_matching:shift=3"},
        "other": {"lr_scheduler": "rex"},
    }
    base = {name: value for name, value in tiny.items() if name not in ("dataset_name", "eval_batch_size")}
    base |= {"learning_rate": 1e-3}
    keys = {"base": base, "arms": arms, "datasets": ["line"], "seeds": 1, "metrics": ["energy_distance", "exact_kl"]}
    return load_spec({"title": "Objectives", **keys, "evaluation_points": 2})


def test_a_stack_has_one_objective(tiny, tmp_path):
    stacks = split_into_stacks(expand(study_of(tiny)), StudyContext(StudyFolder(tmp_path / "study"), 8))
    assert [[run.arm for run in stack] for stack in stacks] == [["ddpm", "other"], ["flow"], ["shifted"]]


def test_it_is_studied_beside_ddpm_and_stacked_is_solo(tiny, tmp_path, blank_pictures):
    records = {}
    for executor in ("stacked", "local"):
        run_study(study_of(tiny), tmp_path / executor, executor=executor, quiet=True)
        for path in (tmp_path / executor / "runs").glob("*.json"):
            record = json.loads(path.read_text())
            assert record["run"]["status"] == "finished", record["run"]["error"]
            records[executor, record["run"]["arm"]] = record
    for arm in ("ddpm", "flow", "shifted"):
        stacked, local = records["stacked", arm], records["local", arm]
        for name, value in local["train"]["results"].items():
            assert stacked["train"]["results"][name] == pytest.approx(value, rel=1e-3, abs=1e-4), (arm, name)
        for part in ("samples", "fixed_start"):
            np.testing.assert_allclose(stacked[part]["points"], local[part]["points"], atol=2e-3)
    # From common noise, by the sampler of its own objective.
    record = records["local", "shifted"]
    model = MLPDenoiser.from_config(MLPDenoiser.load_config(tiny["model_config_name_or_path"]))
    model.load_state_dict(load_file(tmp_path / "local" / "weights" / f"{record['run']['id']}.safetensors"))
    scheduler = FlowMatchEulerDiscreteScheduler(100, shift=3.0)
    scheduler.set_timesteps(50)
    points = torch.randn(500, 2, generator=stream_generator(0, "fixed-start"))
    with torch.no_grad():
        for time in scheduler.timesteps:
            points = scheduler.step(model(points, time).sample, time, points).prev_sample
    np.testing.assert_allclose(record["fixed_start"]["points"], points.numpy(), atol=1e-3)
