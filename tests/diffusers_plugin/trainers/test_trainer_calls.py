"""What takes the place of trainers' functions for timesteps and weights, and what is refused.

The shapes of call are those of small functions here; the trainers' own, from the checkouts that environment variables name,
are called the same way.
"""

import argparse
import ast
import random
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from own_code import VARIABLES, checkout, names_of

from diffusers_lrlab import get_timestep_sampler
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.streams import stream_generator
from diffusers_lrlab.diffusers_plugin.explain import explain
from diffusers_lrlab.diffusers_plugin.host.patches import Patches
from diffusers_lrlab.diffusers_plugin.host.run import HostRun
from diffusers_lrlab.diffusers_plugin.installed_hooks import InstalledHooks
from diffusers_lrlab.diffusers_plugin.script.source import HostScript
from diffusers_lrlab.diffusers_plugin.trainer_table import OPTIONS, ROWS, TRAINERS, rows_of
from diffusers_lrlab.diffusers_plugin.trainers import find
from diffusers_lrlab.diffusers_plugin.trainers.shapes import timesteps, weights
from diffusers_lrlab.diffusers_plugin.trainers.updates import RealUpdates
from diffusers_lrlab.launch import make_parser

SPEC, BATCH = "logit_normal:mean=1.5,std=0.3", 256
SAMPLER = get_timestep_sampler(SPEC, 1000)


class Hook:
    """Gives the timesteps of a sampler after the trainer's own."""

    def __init__(self, **arguments):
        self.arguments, self.seed, self.levels, self.layout = arguments, None, None, None
        self.own = self.timesteps = None

    def is_training(self):
        return True

    def argument(self, name):
        return self.arguments.get(name)

    def begin(self, levels, prediction_type, converts_to_data=False):
        self.levels, self.prediction_type = levels, prediction_type

    def set_layout(self, accumulation):
        self.layout = accumulation

    def replaced(self, own):
        self.own, self.timesteps = own, SAMPLER.sample(len(own), 0, stream_generator(0, "timesteps", 0))
        return self.timesteps

    def density(self):
        return SAMPLER.probabilities(0).numpy()

    def has_batch(self):
        return True

    def batch_weights(self):
        return torch.tensor([1.0, 3.0])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    random.seed(0)


def unchanged_random_numbers(bare, ours):
    """The trainer's next random number is the same after its own function and after ours."""
    torch.manual_seed(5)
    bare()
    expected = torch.rand(3)
    torch.manual_seed(5)
    result = ours()
    assert torch.equal(torch.rand(3), expected)
    return result


def follows(fractions):
    """Numbers in [0, 1] have the quantiles of the sampler's density."""
    cumulative = np.cumsum(SAMPLER.probabilities(0).numpy())
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(fractions, share) == pytest.approx(np.searchsorted(cumulative, share) / 1000, abs=0.03)


# --- DDPM: sd-scripts --------------------------------------------------------------------------------------------------


def get_timesteps(min_timestep, max_timestep, b_size, device):
    return torch.randint(min_timestep, max(max_timestep, min_timestep + 1), (b_size,))


def sd_scripts_functions(name, own):
    """A function of this file, and sd-scripts' own."""
    path = {"get_timesteps": "train_util"}.get(name, "flux_train_utils")
    return names_of(checkout("sd-scripts") / "library" / f"{path}.py")[name] if own else globals()[name]


both = pytest.mark.parametrize("own", [False, True], ids=["shape", "checkout"])


@both
def test_indices_of_sd_scripts(own):
    call = sd_scripts_functions("get_timesteps", own)
    scheduler, hook = DDPMScheduler(), Hook(v_parameterization=True)

    def draw(noise_scheduler, low, high):  # a local variable, as in sd-scripts
        return timesteps.indices_in_range(hook, call, low, high, BATCH, "cpu")

    drawn = unchanged_random_numbers(lambda: call(0, 1000, BATCH, "cpu"), lambda: draw(scheduler, 0, 1000))
    assert drawn is hook.timesteps
    assert hook.prediction_type == "v_prediction"
    np.testing.assert_allclose(hook.levels.alphas_cumprod, scheduler.alphas_cumprod)
    held = timesteps.indices_in_range(hook, call, 200, 200, 2, "cpu")  # where it validates
    assert held.tolist() == [200, 200]
    with pytest.raises(LabError, match=r"range of timesteps must be the whole, got \[0, 500\). Hint"):
        draw(scheduler, 0, 500)


# --- flow matching -----------------------------------------------------------------------------------------------------


def get_noisy_model_input_and_timesteps(args, noise_scheduler, latents, noise, device, dtype):
    sigmas = torch.rand(len(latents))
    wide = sigmas.view(-1, 1, 1, 1)
    return ((1.0 - wide) * latents + wide * noise).to(dtype), (sigmas * 1000).to(dtype), wide


@both
def test_noisy_input_of_sd_scripts(own):
    call, hook = sd_scripts_functions("get_noisy_model_input_and_timesteps", own), Hook()
    args = SimpleNamespace(timestep_sampling="uniform", ip_noise_gamma=None)
    scheduler = SimpleNamespace(config=SimpleNamespace(num_train_timesteps=1000))
    given = (args, scheduler, torch.randn(BATCH, 2, 4, 4), torch.randn(BATCH, 2, 4, 4), "cpu", torch.float32)
    noisy, steps, sigmas = unchanged_random_numbers(
        lambda: call(*given), lambda: timesteps.noisy_input_and_sigmas(hook, call, *given)
    )
    assert torch.equal(sigmas.flatten(), (hook.timesteps + 0.5) / 1000)
    assert torch.allclose(steps, sigmas.flatten() * 1000)
    assert torch.equal(noisy, (1.0 - sigmas) * given[2] + sigmas * given[3])
    follows(sigmas.flatten())


def test_another_mixture_is_refused():
    def call(latents, noise):
        return latents + 8 * noise, torch.full((2,), 500.0), torch.full((2, 1), 0.5)

    with pytest.raises(LabError, match=r"model's input must be \(1 - sigma\) \* latents \+ sigma \* noise"):
        timesteps.noisy_input_and_sigmas(Hook(), call, torch.ones(2, 3), noise=torch.ones(2, 3))


class NetworkTrainer:
    num_timestep_buckets = None

    def get_noisy_model_input_and_timesteps(self, args, noise, latents, timesteps, noise_scheduler, device, dtype):
        t = torch.rand(len(latents))
        wide = t.view(-1, 1, 1, 1, 1)
        return (1 - wide) * latents + wide * noise, t * 1000.0 + 1


@both
def test_noisy_input_of_musubi_tuner(own):
    path = ("src", "musubi_tuner", "training", "trainer_base.py")
    kind = names_of(checkout("musubi-tuner").joinpath(*path))["NetworkTrainer"] if own else NetworkTrainer
    call, hook = kind.get_noisy_model_input_and_timesteps, Hook()
    args = SimpleNamespace(
        timestep_sampling="uniform", min_timestep=None, max_timestep=None, preserve_distribution_shape=False
    )
    noise, latents = torch.randn(2, BATCH, 2, 1, 4, 4)
    given = (kind(), args, noise, latents, None, None, "cpu", torch.float32)
    noisy, steps = unchanged_random_numbers(lambda: call(*given), lambda: timesteps.noisy_input(hook, call, *given))
    sigmas = (hook.timesteps + 0.5) / 1000
    assert torch.allclose(steps, sigmas * 1000 + 1)
    wide = sigmas.view(-1, 1, 1, 1, 1)
    assert torch.allclose(noisy, (1 - wide) * latents + wide * noise)
    follows(sigmas)


class ModelFoundation:
    def sample_flow_sigmas(self, batch, state):
        sigmas = torch.sigmoid(torch.randn(len(batch["latents"])))
        return sigmas, sigmas * 1000.0


@both
def test_sigmas_of_simpletuner(own):
    model = mock.MagicMock()
    if own:
        path = checkout("SimpleTuner") / "simpletuner" / "helpers" / "models" / "common.py"
        call = method_of(path, "ModelFoundation", "sample_flow_sigmas")
        config = {"flux_fast_schedule": False, "flow_use_beta_schedule": False, "flow_use_uniform_schedule": False}
        model.config = SimpleNamespace(**config, flow_sigmoid_scale=1.0, flow_schedule_shift=None)
        model.accelerator.device = "cpu"
        model._normalize_flow_custom_timesteps.return_value = model._flow_cubic_schedule_weights.return_value = None
        model._get_dataset_timestep_sampling_offset.return_value = 0.0
        call.__globals__["apply_flow_schedule_shift"] = lambda config, schedule, sigmas, noise: sigmas
    else:
        call = ModelFoundation.sample_flow_sigmas
    hook, batch = Hook(), {"latents": torch.zeros(BATCH, 1), "noise": None}
    sigmas, steps = unchanged_random_numbers(
        lambda: call(model, batch, {}), lambda: timesteps.sigmas_and_timesteps(hook, call, model, batch, {})
    )
    assert torch.allclose(steps, sigmas * 1000)
    follows(sigmas)


def method_of(path, owner, name):
    """A method alone, where its class has bases that are not installed here."""
    (kind,) = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == owner]
    (method,) = [node for node in kind.body if getattr(node, "name", "") == name]
    module = {"torch": torch}
    exec(compile(ast.Module([method], []), str(path), "exec"), module)
    return module[name]


class NoiseMixin:
    def _get_timestep_discrete(self, num_train_timesteps, deterministic, generator, batch_size, config, shift=None):
        if deterministic:
            return torch.tensor([num_train_timesteps // 2 - 1])
        return (num_train_timesteps * torch.rand(batch_size, generator=generator)).int()


@both
def test_indices_of_onetrainer(own):
    config = mock.MagicMock(min_noising_strength=0.0, max_noising_strength=1.0, gradient_accumulation_steps=4, seed=7)
    config.timestep_shift = 1.0
    kind = NoiseMixin
    if own:
        path = checkout("OneTrainer") / "modules" / "modelSetup" / "mixin" / "ModelSetupNoiseMixin.py"
        code = names_of(path)
        kind, config.timestep_distribution = code["ModelSetupNoiseMixin"], code["TimestepDistribution"].UNIFORM
    call, hook, generator = kind._get_timestep_discrete, Hook(), torch.Generator()
    model = SimpleNamespace(noise_scheduler=SimpleNamespace(config={"num_train_timesteps": 1000}))  # as in its setups
    assert model
    given = (kind(), 1000, False, generator, BATCH, config)
    drawn = timesteps.indices_by_config(hook, call, *given, shift=3.0)
    assert drawn.tolist() == hook.timesteps.tolist()
    assert drawn.dtype == torch.int32
    assert (hook.seed, hook.layout) == (7, 4)
    np.testing.assert_allclose(hook.levels.flow_sigma[:-1], np.arange(1, 1000) / 1000, rtol=1e-6)
    assert timesteps.indices_by_config(hook, call, kind(), 1000, True, generator, BATCH, config).tolist() == [499]
    config.min_noising_strength = 0.2
    with pytest.raises(LabError, match=r"noising strength must be in \[0.0, 1.0\]"):
        timesteps.indices_by_config(hook, call, *given)


# --- tables ------------------------------------------------------------------------------------------------------------


class TableScheduler:
    def set_train_timesteps(self, num_timesteps, device, timestep_type="linear", latents=None, patch_size=1):
        self.timesteps = torch.linspace(1000, 1, num_timesteps)
        return self.timesteps


class Process:
    """The trainer's object that has its configuration, and draws."""

    def __init__(self, **config):
        self.train_config = SimpleNamespace(**{"content_or_style": "balanced", "timestep_type": "sigmoid"} | config)

    def table(self, hook, call, scheduler):
        return timesteps.table_of_timesteps(hook, call, scheduler, 1000, device="cpu", timestep_type="sigmoid")


@both
def test_table_of_ai_toolkit(own):
    kind = TableScheduler
    if own:
        path = checkout("ai-toolkit") / "toolkit" / "samplers" / "custom_flowmatch_sampler.py"
        kind = names_of(path)["CustomFlowMatchEulerDiscreteScheduler"]
    scheduler, call = kind(), kind.set_train_timesteps
    table = unchanged_random_numbers(
        lambda: call(scheduler, 1000, "cpu", "sigmoid"), lambda: Process().table(Hook(), call, scheduler)
    )
    assert table is scheduler.timesteps
    assert (table.diff() < 0).all()
    follows(table.numpy() / 1000)
    for wrong in ({"content_or_style": "style"}, {"timestep_type": "weighted"}, {"linear_timesteps": True}):
        with pytest.raises(LabError, match=f"train.{next(iter(wrong))} must be"):
            Process(**wrong).table(Hook(), call, scheduler)


def get_t_distribution(model_config):
    return torch.linspace(1e-4, 1 - 1e-4, 10_000)


@both
def test_quantiles_of_diffusion_pipe(own):
    call = names_of(checkout("diffusion-pipe") / "utils" / "common.py")["get_t_distribution"] if own else get_t_distribution
    table = timesteps.table_of_quantiles(Hook(), call, {"dtype": "bfloat16"})
    assert table.shape == (10_000,)
    assert (table.diff() >= 0).all()
    follows(table.numpy())
    with pytest.raises(LabError, match=r"shift of \[model\] must be left out, got 3"):
        timesteps.table_of_quantiles(Hook(), call, {"shift": 3})


# --- weights -----------------------------------------------------------------------------------------------------------


def conditional_loss(model_pred, target, loss_type, reduction, huber_c=None):
    return torch.nn.functional.mse_loss(model_pred, target, reduction=reduction)


@both
def test_losses_of_sd_scripts(own):
    call = names_of(checkout("sd-scripts") / "library" / "train_util.py")["conditional_loss"] if own else conditional_loss
    given = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4), "l2"
    losses = weights.losses_of_images(Hook(), call, *given, "none", None)
    expected = call(*given, "none", None) * torch.tensor([1.0, 3.0]).view(2, 1, 1, 1)
    assert torch.equal(losses, expected)
    assert torch.equal(weights.losses_of_images(Hook(), call, *given, "mean", None), expected.mean())
    with pytest.raises(LabError, match="losses must be of 2 images, as its timesteps are, got 3"):
        weights.losses_of_images(Hook(), call, torch.ones(3, 1), torch.ones(3, 1), "l2", "none")


@both
def test_factor_of_musubi_tuner(own):
    def own_weight(weighting_scheme, noise_scheduler, timesteps, device, dtype):
        return None

    path = ("src", "musubi_tuner", "training", "timesteps.py")
    name = "compute_loss_weighting_for_sd3"
    call = names_of(checkout("musubi-tuner").joinpath(*path))[name] if own else own_weight
    output = SimpleNamespace(target=torch.zeros(2, 4, 1, 8, 8))  # as in its `compute_loss`
    assert output
    factor = weights.factor_of_losses(Hook(), call, "none", None, torch.ones(2), "cpu", torch.float32)
    assert factor.shape == (2, 1, 1, 1, 1)
    assert factor.flatten().tolist() == [1.0, 3.0]


# --- which trainer, and what is refused ----------------------------------------------------------------------------------


def made_up(folder, trainer="sd-scripts", change=lambda text: text):
    """A checkout with the files and functions of a trainer's rows, and a program that imports its package."""
    for name in TRAINERS[trainer].files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    for row in (row for row in ROWS if row.trainer == trainer):
        path = folder.joinpath(*row.module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        *classes, name = row.attribute.split(".")
        indent = "    " * len(classes)
        lines = [*(f"class {each}:" for each in classes), f"{indent}def {name}({', '.join(row.parameters)}): pass", ""]
        path.write_text(change((path.read_text() if path.exists() else "") + "\n".join(lines)))
    (folder / "program.py").write_text(f"import {TRAINERS[trainer].package}\nprint('it ran')\n")
    find._find.cache_clear()
    return folder / "program.py"


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_option_has_a_row_or_something_in_its_place(trainer, tmp_path):
    for option in OPTIONS:
        assert bool(rows_of(trainer, option)) != (option in TRAINERS[trainer].instead)
    text = explain(HostScript(str(made_up(tmp_path, trainer))))
    assert f"of {trainer} at an unknown commit; tested at {TRAINERS[trainer].commit}" in text
    for row in rows_of(trainer, "timestep_sampler"):
        assert f"{row.module}.{row.attribute}" in text


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_checkout_has_what_the_rows_name(trainer):
    folder = checkout(trainer)
    folder = folder / "src" if trainer == "musubi-tuner" else folder
    found = find.FoundTrainer(trainer, folder)
    for option in OPTIONS:
        if rows := rows_of(trainer, option):
            assert found.rows(option) == rows


def options(*given, script):
    return make_parser().parse_args([*given, str(script)])


def refused(*given, script):
    with Patches() as patches, pytest.raises(LabError) as error:
        InstalledHooks(options(*given, script=script), None, patches)
    return str(error.value)


def test_a_trainer_that_changed_is_refused_by_name(tmp_path):
    script = made_up(tmp_path, change=lambda text: text.replace("b_size", "batch").replace("conditional_loss", "loss"))
    subprocess.run("git init -q && git add . && git -c user.name=x -c user.email=x@y commit -qm x", cwd=tmp_path, shell=True)
    text = refused("--timestep_sampler=clts", script=script)
    assert text.startswith(
        "--timestep_sampler clts: must be used with a version of sd-scripts that has library.train_util.get_timesteps("
    )
    assert "with library.train_util.get_timesteps(min_timestep, max_timestep, batch, device). Hint: commit 48d368f" in text
    commit = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], cwd=tmp_path, capture_output=True, text=True).stdout
    assert f"got sd-scripts at {commit.strip()} with" in text


def test_an_option_without_a_row_is_refused_with_what_is_possible(tmp_path):
    script = made_up(tmp_path, "SimpleTuner")
    assert "Hint: remove it; its own --use_ema averages" in refused("--ema=constant", script=script)
    assert "has nothing to act on in SimpleTuner" in refused("--loss_weighting=min_snr", script=script)


@pytest.mark.parametrize("spec", ["clts", "logit_normal:unbiased=true", "stratified"])
def test_a_table_takes_only_a_density(spec, tmp_path):
    script = made_up(tmp_path, "diffusion-pipe")
    assert f"--timestep_sampler {spec}: must be a density" in refused(f"--timestep_sampler={spec}", script=script)


def test_a_program_that_draws_otherwise_is_stopped_before_its_first_update(tmp_path):
    with Patches() as patches:
        hooks = InstalledHooks(options("--timestep_sampler=clts", script=made_up(tmp_path)), None, patches)
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        weight.grad = torch.ones(1)
        with pytest.raises(LabError, match="must be used with a program that draws timesteps by library.train_util"):
            optimizer.step()
        assert weight.item() == 1
        own = argparse.ArgumentParser()
        own.add_argument("--min_timestep", type=int)
        with pytest.raises(LabError, match="must be used without --min_timestep of sd-scripts, got --min_timestep 100"):
            own.parse_args(["--min_timestep=100"])
        assert hooks.host.run.arguments["min_timestep"] == 100
    assert not [each for each in sys.meta_path if getattr(each, "host", "").startswith("library.") and each.actions]
    optimizer.step()


def test_updates_are_real_steps_and_go_on_after_a_resume():
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer, other = torch.optim.AdamW([parameter]), torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    with Patches() as patches:
        updates = RealUpdates()
        updates.install(patches)
        for _ in range(3):
            optimizer.step()
            other.step()
        assert updates.num_updates == 3
    with Patches() as patches:
        updates = RealUpdates()
        updates.install(patches)
        torch.optim.AdamW([parameter]).load_state_dict(optimizer.state_dict())
        assert (updates.num_updates, updates.is_known) == (3, True)
        torch.optim.SGD([parameter], lr=1.0, momentum=0.9).load_state_dict(other.state_dict())
        assert not updates.is_known
    with Patches() as patches:
        updates = RealUpdates()
        updates.install(patches)
        resumed = torch.optim.AdamW([parameter])
        resumed.load_state_dict(optimizer.state_dict())
        other.load_state_dict(other.state_dict())
        resumed.step()
        assert (updates.num_updates, updates.is_known) == (4, True)
        other.load_state_dict(other.state_dict())
        assert (updates.num_updates, updates.is_known) == (4, True)
    with Patches() as patches:
        updates = RealUpdates()
        updates.install(patches)
        plain = torch.optim.SGD([parameter], lr=1.0)
        plain.load_state_dict(plain.state_dict())
        assert not updates.is_known  # its state is empty after any number of steps
    assert VARIABLES.keys() == TRAINERS.keys()


def test_a_step_that_calls_another_is_one_update_and_one_that_overflows_is_none():
    class Derived(torch.optim.AdamW):
        def step(self, closure=None):
            return None if hasattr(self, "found_inf") else super().step(closure)

    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.AdamW([parameter])  # from here on, its step has torch's hooks, too
    optimizer = Derived([parameter])
    with Patches() as patches:
        updates = RealUpdates()
        updates.install(patches)
        for _ in range(3):
            optimizer.step()
        assert updates.num_updates == 3
        optimizer.found_inf = torch.ones(())  # by a gradient scaler
        optimizer.step()
        with mock.patch.object(torch.Tensor, "__bool__", side_effect=AssertionError("it waits for the device")):
            optimizer.step()
        assert updates.num_updates == 3
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
        assert updates.num_updates == 4


def test_epochs_of_sd_scripts_come_before_its_steps():
    run = HostRun()
    run.arguments, run.training_loader = {"max_train_steps": 1600, "max_train_epochs": None}, [None] * 9
    run.accelerator = SimpleNamespace(gradient_accumulation_steps=4)
    assert run.count_updates() == 1600
    run.arguments["max_train_epochs"] = 2
    assert run.count_updates() == 6
