"""Flow matching against its formulas: noise, time, target, loss, gradients, whole runs; and what contradicts it."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from helpers import load_data_once
from tables import cases

from diffusers_lrlab import MLPDenoiser, TrainingConfig
from diffusers_lrlab.objective.process import make_process
from diffusers_lrlab.objective.processes import DDPM, FlowMatching
from diffusers_lrlab.training.arguments import parse_arguments
from diffusers_lrlab.training.model import given_model_config
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.run_folder import RunFolder
from diffusers_lrlab.training.trainer import Trainer

SHIFTS = [1.0, 3.0, 0.5]


def plain_losses(model, data, noise, timesteps, num_steps, shift):
    """The formulas, without the package; sigma in float32, as diffusers has it."""
    tau = (timesteps + 1).float() / num_steps
    sigma = shift * tau / (1 + (shift - 1) * tau)
    noisy = (1 - sigma[:, None]) * data + sigma[:, None] * noise
    error = model(noisy, sigma * num_steps).sample - (noise - data)
    return error.square().mean(1)


def make_trainer(folder, **options):
    MLPDenoiser(hidden_size=16, embedding_size=8, num_layers=1).save_config(folder)
    small = {"dataset_name": "moons", "max_train_steps": 50, "train_batch_size": 32, "num_validation_images": 0}
    small |= {"model_config_name_or_path": str(folder), "num_inference_steps": 3, "use_ema": False}
    config = resolve_config(TrainingConfig(**small, output_dir=str(folder / "run"), **options))
    data = load_data_once(config)
    plan = make_plan(config, data, given_model_config(config))
    AcceleratorState._reset_state(reset_partial_state=True)
    return Trainer(plan, data, Accelerator(cpu=True), RunFolder(folder / "run"))


def test_a_run_is_a_plain_loop_over_the_same_data_noise_and_timesteps(tmp_path, monkeypatch):
    trainer, drawn = make_trainer(tmp_path, objective="flow_matching:shift=2", learning_rate=1e-3), []
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
        expected = plain_losses(model, data, noise, timesteps, 100, 2.0)
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
