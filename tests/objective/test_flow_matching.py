"""Flow matching against its formulas: noise, time, target, loss, whole runs and their pipelines; and what contradicts it."""

import json
import math

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from helpers import make_trainer
from runs import TINY_UNET, read_record
from tables import cases

from diffusers_lrlab import MLPDenoiser, PointDDPMPipeline, TrainingConfig
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.objective.process import make_process
from diffusers_lrlab.objective.processes import DDPM, FlowMatching
from diffusers_lrlab.run.train import train
from diffusers_lrlab.study.context import StudyContext
from diffusers_lrlab.study.results import StudyFolder
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import load_spec
from diffusers_lrlab.study.stacked.stacks import split_into_stacks
from diffusers_lrlab.timesteps.noise_levels import flow_levels
from diffusers_lrlab.training.arguments import parse_arguments
from diffusers_lrlab.training.resolve import resolve_config

SHIFTS = [1.0, 3.0, 0.5]
SMALL = {
    **{"dataset_name": "line", "max_train_steps": 20, "train_batch_size": 16, "num_validation_images": 500},
    **{"distance_samples": 500, "eval_batch_size": 8, "num_inference_steps": 5, "checkpointing_steps": 10},
    "denoiser": "mlp:hidden_size=16,num_layers=1,embedding_size=8",
}


def test_a_run_is_a_plain_loop_over_the_same_data_noise_and_timesteps(tmp_path, monkeypatch):
    options = {"max_train_steps": 50, "learning_rate": 1e-3, "num_validation_images": 0, "use_ema": False}
    options |= {"objective": "flow_matching:shift=2", "checkpointing_steps": 1000}
    trainer, drawn = make_trainer(tmp_path / "run", SMALL | options), []
    model = MLPDenoiser.from_config(trainer.run.model.config)
    model.load_state_dict(trainer.run.model.state_dict())
    losses = FlowMatching.losses

    def recording(self, model, batch, noise, timesteps, *rest):
        found = losses(self, model, batch, noise, timesteps, *rest)
        if torch.is_grad_enabled():
            drawn.append((batch.data, noise, timesteps, found.detach(), trainer.run.current_lr))
        return found

    monkeypatch.setattr(FlowMatching, "losses", recording)
    for _ in trainer.updates(show_progress=False):
        pass
    assert len(drawn) == 50
    config = trainer.run.config
    betas, weight_decay = (config.adam_beta1, config.adam_beta2), config.adam_weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=weight_decay, eps=config.adam_epsilon)
    for data, noise, timesteps, found, lr in drawn:
        optimizer.param_groups[0]["lr"] = lr
        # The formulas, without the package; sigma in float32, as diffusers has it.
        tau = (timesteps + 1).float()[:, None] / 100
        sigma = 2 * tau / (1 + tau)
        error = model((1 - sigma) * data + sigma * noise, sigma.flatten() * 100).sample - (noise - data)
        expected = error.square().mean(1)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        expected.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    for own, other in zip(trainer.run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)


@cases("shift", SHIFTS)
@cases("num_steps", [1, 2, 1000])
def test_noise_and_time_are_those_of_the_scheduler_turned_over(num_steps, shift):
    process = make_process("flow_matching", num_steps=num_steps, shift=shift, is_bounded=False)
    scheduler = FlowMatchEulerDiscreteScheduler(num_steps, shift=shift)
    timesteps = torch.arange(num_steps)
    times = process.model_time(timesteps)
    assert times.tolist() == scheduler.timesteps.tolist()[::-1]
    assert times[-1] == num_steps
    assert (times.diff() > 0).all()
    data, noise = torch.randn(2, num_steps, 3)
    noisy = process.add_noise(data, noise, timesteps)
    torch.testing.assert_close(noisy, scheduler.scale_noise(data, times, noise), rtol=1e-6, atol=1e-6)
    assert noisy[-1].equal(noise[-1])


@cases("shift", SHIFTS)
def test_times_between_timesteps_have_the_sigma_that_is_there(shift):
    process = make_process("flow_matching", num_steps=20, shift=shift, is_bounded=False)
    everything = torch.arange(20)
    whole = process.model_time(everything.double())
    torch.testing.assert_close(whole, process.model_time(everything).double(), rtol=1e-5, atol=1e-3)
    between = process.model_time(torch.tensor([4.25])) / 20
    sigmas = process.model_time(everything).double() / 20
    expected = torch.lerp(sigmas[4].logit(), sigmas[5].logit(), 0.25).sigmoid()
    torch.testing.assert_close(between[0], expected)
    single = make_process("flow_matching", num_steps=1, shift=shift, is_bounded=False)
    assert single.model_time(torch.zeros(1)).item() == pytest.approx(1, rel=1e-5)


def test_half_precision_predictions_are_compared_in_float32():
    process = make_process("flow_matching", num_steps=20, shift=1.0, is_bounded=False)
    data, noise, timesteps = torch.randn(4, 3), torch.randn(4, 3), torch.arange(4)
    losses = process.prediction_losses((noise - data).bfloat16(), data, noise, timesteps)
    assert losses.dtype == torch.float32
    assert 0 < losses.max() < 1e-3


@cases("shift", SHIFTS)
def test_sampling_asks_for_no_time_that_was_not_trained(shift):
    """diffusers shifts the ends of its steps twice: with a shift below 1 the last steps go below the first timestep."""
    process = make_process("flow_matching", num_steps=1000, shift=shift, is_bounded=False)
    trained = process.model_time(torch.arange(1000))
    for num in (2, 50, 1000):
        scheduler = process.sampling_scheduler()
        scheduler.set_timesteps(num)
        assert scheduler.timesteps.max() == trained.max()
        assert scheduler.timesteps.min() >= trained.min() * min(1, shift) * (1 - 1e-4)


@cases(
    ("arguments", "shift"),
    [
        (["--objective=flow_matching"], 1.0),
        (["--objective=flow_matching:shift=3"], 3.0),
        (["--objective=flow_matching:base_resolution=4"], 2.0),
        (["--objective=flow_matching:base_resolution=64", "--resolution=32", "--train_data_dir=FOLDER"], 0.5),
    ],
)
def test_the_shift_is_given_or_follows_from_the_resolution(tmp_path, arguments, shift):
    (tmp_path / "image.png").touch()
    config = resolve_config(parse_arguments([each.replace("FOLDER", str(tmp_path)) for each in arguments], ""))
    assert config.objective_kwargs == {"shift": shift, "num_steps": 1000}
    assert resolve_config(config) == config
    assert config.num_inference_steps == 100


@cases(
    ("saved", "message"),
    [
        ({"shift": 1.0}, "has shift=1.0, this run has shift of --objective 3.0. "),
        ({"num_train_timesteps": 1000}, "has num_train_timesteps=1000, this run has num_steps of --objective 20"),
        ({"shift": 3.0, "use_dynamic_shifting": True}, "has use_dynamic_shifting=True, but a run has a single shift."),
        ({"_class_name": "DDPMScheduler"}, "is a DDPMScheduler, which is not for flow matching"),
    ],
)
def test_another_scheduler_beside_the_model_contradicts(saved, message):
    process = make_process("flow_matching", num_steps=20, shift=3.0, is_bounded=False)
    assert process.contradictions(dict(process.scheduler.config)) == []
    (found,) = process.contradictions(saved)
    assert found.startswith(message)
    (found,) = DDPM(DDPMScheduler(20)).contradictions({"_class_name": "FlowMatchEulerDiscreteScheduler"})
    assert found.startswith("is a FlowMatchEulerDiscreteScheduler, which is for flow matching. Choose --objective flow_mat")


@pytest.mark.slow
def test_it_is_trained_evaluated_carded_loaded_and_resumes_only_itself(tmp_path):
    options = {**SMALL, "output_dir": str(tmp_path / "flow")}
    finished = train(TrainingConfig(**options, objective="flow_matching:shift=3"))
    record = read_record(finished)
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


def test_a_stack_has_one_objective(tmp_path):
    arms = {"flow": {"objective": "flow_matching"}, "shifted": {"objective": "flow_matching:shift=3"}}
    arms = {"ddpm": {}, **arms, "other": {"lr_scheduler": "rex"}}
    base = {name: value for name, value in SMALL.items() if name not in ("dataset_name", "eval_batch_size")}
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
