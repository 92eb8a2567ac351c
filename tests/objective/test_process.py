"""The noise process: conversions between predictions, and a second objective beside DDPM, whole, in this one file."""

import json
import math
import re
from functools import cached_property
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from runs import read_metrics, read_record
from safetensors.torch import load_file

from diffusers_lrlab import LabError, MLPDenoiser, TrainingConfig
from diffusers_lrlab.core.registry import Parameter
from diffusers_lrlab.core.streams import stream_generator
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.evaluation.likelihood import log_likelihood
from diffusers_lrlab.evaluation.validation_loss import ValidationLoss
from diffusers_lrlab.objective.ddpm import DDPM
from diffusers_lrlab.objective.process import OBJECTIVES, NoiseProcess, make_process
from diffusers_lrlab.run.train import train
from diffusers_lrlab.study.run import run_study
from diffusers_lrlab.study.runs.context import StudyContext
from diffusers_lrlab.study.runs.results import StudyFolder
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import load_spec
from diffusers_lrlab.study.stacked.stacks import split_into_stacks
from diffusers_lrlab.timesteps.noise_levels import flow_levels
from diffusers_lrlab.training.resume import OtherSettings

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


def test_a_noise_schedule_that_diffusers_lacks_is_an_error_with_a_remedy():
    with pytest.raises(LabError, match=r"'linaer' is not in diffusers \d.*pip install -U diffusers"):
        make_process("ddpm", num_steps=10, beta_schedule="linaer", prediction_type="epsilon", is_bounded=False)


def test_the_model_time_of_ddpm_is_the_index():
    process = DDPM(DDPMScheduler(10))
    for timesteps in (torch.arange(10), torch.tensor([0.25, 8.5])):
        assert process.model_time(timesteps) is timesteps


def test_the_deterministic_sampler_of_ddpm_is_ddim():
    process = DDPM(DDPMScheduler(10, beta_schedule="sigmoid", prediction_type="sample", clip_sample=False))
    scheduler = process.deterministic_scheduler()
    assert isinstance(scheduler, DDIMScheduler)
    assert scheduler.alphas_cumprod.equal(process.scheduler.alphas_cumprod)
    assert (scheduler.config.prediction_type, scheduler.config.clip_sample) == ("sample", False)


# --- a second objective ----------------------------------------------------------------------------------------------


class Flow(NoiseProcess):
    """Flow matching: straight lines from data to noise, and a model that predicts their direction."""

    prediction_type = "flow_velocity"
    scheduler_options = {"num_train_timesteps": "num_steps of --objective", "shift": "shift of --objective"}

    def __init__(self, num_steps, shift, is_bounded):
        self.scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=num_steps, shift=shift)
        self.levels = flow_levels(self.scheduler)

    @property
    def built_in_weights(self):
        return np.ones(self.num_train_timesteps)

    @cached_property
    def log_sigmas(self):
        alphas = torch.from_numpy(self.levels.inner_alphas_cumprod)
        return ((1 - alphas) / alphas).log() / 2

    def add_noise(self, data, noise, timesteps):
        sigma = self.scheduler.sigmas[: self.num_train_timesteps].flip(0)[timesteps]
        sigma = sigma.view(-1, *[1] * (data.ndim - 1))
        return (1 - sigma) * data + sigma * noise

    def model_time(self, timesteps):
        if not timesteps.is_floating_point():
            return self.scheduler.timesteps.flip(0)[timesteps]
        below = timesteps.floor().long().clamp(max=self.num_train_timesteps - 2)
        log_sigmas = torch.lerp(self.log_sigmas[below], self.log_sigmas[below + 1], timesteps.double() - below)
        return log_sigmas.sigmoid() * self.num_train_timesteps

    def deterministic_scheduler(self):
        return self.sampling_scheduler()

    def describe(self):
        return [("Noise schedule", f"{self.num_train_timesteps} timesteps, shift {self.scheduler.config.shift:g}")]

    def prediction_losses(self, prediction, data, noise, timesteps):
        return (prediction - (noise - data)).square().flatten(1).mean(1)

    def model_input(self, scaled, sigma):
        return scaled / (1 + sigma)

    def predicted_noise(self, prediction, scaled, sigma):
        return self.model_input(scaled, sigma) + prediction / (1 + sigma)


@pytest.fixture(scope="module")
def flow():
    with OBJECTIVES.temporarily():
        OBJECTIVES.register(
            "flow",
            description="the direction of straight lines from data to noise",
            source="this test",
            parameters=(Parameter("shift", float, 1.0, "shift towards noise", "(0, inf)"),),
        )(Flow)
        yield


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
def finished(flow, tiny, tmp_path_factory, blank_pictures):
    folder = tmp_path_factory.mktemp("run") / "flow"
    config = TrainingConfig(**tiny, objective="flow:shift=3", logging_steps=1, cpu_threads=1, output_dir=str(folder))
    assert train(config) == folder
    return folder


def test_its_times_in_training_are_those_of_its_scheduler_in_sampling(flow):
    process = make_process("flow", num_steps=20, shift=3.0, is_bounded=False)
    everything = torch.arange(20)
    times = process.model_time(everything)
    assert times.tolist() == process.scheduler.timesteps.tolist()[::-1]
    assert times[-1] == 20
    assert not times.equal(everything.float())
    torch.testing.assert_close(process.model_time(everything.double()), times.double(), rtol=1e-5, atol=1e-3)
    seen = []

    def model(noisy, times):
        seen.append(times)
        return SimpleNamespace(sample=torch.zeros_like(noisy))

    process.losses(model, Batch(torch.zeros(20, 2)), torch.zeros(20, 2), everything)
    assert seen[0].equal(times)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_its_likelihood_is_that_of_a_gaussian_though_it_ends_in_pure_noise(flow, shift):
    """Of a perfect model, which knows the noise level by the time alone."""
    mean, variance = 0.5, 0.7**2
    process = make_process("flow", num_steps=100, shift=shift, is_bounded=False)
    assert process.levels.snr[-1] == 0

    def model(noisy, times):
        sigma = (times / 100)[:, None].double()
        spread = (1 - sigma) ** 2 * variance + sigma**2
        share = (sigma - (1 - sigma) * variance) / spread
        return SimpleNamespace(sample=share * (noisy - (1 - sigma) * mean) - mean)

    model.dtype = torch.float64
    points = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    found = log_likelihood(model, process, points, 200)
    first = process.levels.snr[0] ** -0.5
    expected = torch.distributions.Normal(mean, math.hypot(math.sqrt(variance), first)).log_prob(points[:, 0])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)


def test_it_trains_samples_and_is_evaluated(finished):
    rows, validations = read_metrics(finished)
    assert rows[-1]["update"] == 19
    assert validations[-1]["validation_loss"] > 0
    record = read_record(finished)
    assert record["config"]["objective"] == "flow"
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
    assert "| Objective | `flow` |\n| Noise schedule | 100 timesteps, shift 3 |" in card


def test_it_resumes_and_only_itself(finished, tiny, tmp_path):
    options = {**tiny, "logging_steps": 1, "cpu_threads": 1, "output_dir": str(tmp_path / "again")}
    train(TrainingConfig(**options, objective="flow:shift=3"))
    (tmp_path / "again" / "checkpoint-20" / "trainer.json").unlink()  # as if it had been killed after update 10
    for other in ({}, {"objective": "flow"}):
        with pytest.raises(OtherSettings, match="  objective"):
            train(TrainingConfig(**options, **other, resume_from_checkpoint="checkpoint-10"))
    train(TrainingConfig(**options, objective="flow:shift=3", resume_from_checkpoint="latest"))
    weights = "denoiser/diffusion_pytorch_model.safetensors"
    straight, resumed = (load_file(folder / weights) for folder in (finished, tmp_path / "again"))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert read_metrics(finished) == read_metrics(tmp_path / "again")


def study_of(tiny):
    arms = {
        "ddpm": {},
        "flow": {"objective": "flow"},
        "shifted": {"objective": "flow:shift=3"},
        "other": {"lr_scheduler": "rex"},
    }
    base = {name: value for name, value in tiny.items() if name not in ("dataset_name", "eval_batch_size")}
    base |= {"learning_rate": 1e-3}
    keys = {"base": base, "arms": arms, "datasets": ["line"], "seeds": 1, "metrics": ["energy_distance", "exact_kl"]}
    return load_spec({"title": "Objectives", **keys, "evaluation_points": 2})


def test_a_stack_has_one_objective(flow, tiny, tmp_path):
    stacks = split_into_stacks(expand(study_of(tiny)), StudyContext(StudyFolder(tmp_path / "study"), 8))
    assert [[run.arm for run in stack] for stack in stacks] == [["ddpm", "other"], ["flow"], ["shifted"]]


def test_it_is_studied_beside_ddpm_and_stacked_is_solo(flow, tiny, tmp_path, blank_pictures):
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


def test_its_contradictions_are_named(flow):
    process = make_process("flow", num_steps=20, shift=3.0, is_bounded=False)
    assert process.contradictions({"shift": 3.0, "num_train_timesteps": 20, "_class_name": "of no matter"}) == []
    (found,) = process.contradictions({"shift": 1.0})
    assert found.startswith("has shift=1.0, this run has shift of --objective 3.0. ")


def test_what_is_no_process_is_refused(flow, monkeypatch):
    with OBJECTIVES.temporarily():
        OBJECTIVES.register("none_at_all", description="", source="")(lambda num_steps, is_bounded: num_steps)
        with pytest.raises(LabError, match="'none_at_all' must return an object of a subclass of NoiseProcess"):
            make_process("none_at_all", num_steps=4, is_bounded=True)
    with pytest.raises(LabError, match="Unknown objective 'fow'. Did you mean 'flow'"):
        make_process("fow", is_bounded=False)
