"""Every registered optimizer, alone and in real runs."""

import importlib.util
import io

import pytest
import runs
import torch
from diffusers import UNet2DModel
from tables import cases

from diffusers_lrlab import get_optimizer, list_optimizers
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.optimizers.build import optimizer_state_bytes
from diffusers_lrlab.optimizers.entries import OPTIMIZERS
from diffusers_lrlab.schedules.expected import schedule_curves
from diffusers_lrlab.schedules.schedule import resolve_schedule
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.resolve import check_schedule, resolve_config


def make_model():
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 6 * 6, 64), torch.nn.Linear(64, 64)
    return torch.nn.Sequential(*layers)


def do_steps(model, optimizer, num_steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(4, 1, 8, 8, generator=generator)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", list_optimizers())
class TestEveryOptimizer:
    @pytest.fixture(autouse=True)
    def installed(self, name):
        if package := OPTIMIZERS[name].facts.get("package"):
            pytest.importorskip(package.replace("-", "_"), reason=f"{package} is not installed")

    def test_it_lowers_a_loss(self, name):
        model = make_model()
        lr = OPTIMIZERS[name].facts.get("learning_rate", 1e-3 * OPTIMIZERS[name].facts.get("learning_rate_factor", 1))
        optimizer = get_optimizer(name, model.parameters(), lr)
        data = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        before = model(data).square().mean()
        do_steps(model, optimizer, 60)
        if hasattr(optimizer, "eval"):
            optimizer.eval()
        assert model(data).square().mean() < 0.9 * before

    def test_its_state_is_as_large_as_said(self, name):
        weight = torch.nn.Parameter(torch.randn(512, 512))
        optimizer = get_optimizer(name, [weight], 1e-3)
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        measured = optimizer_state_bytes(optimizer) / weight.numel()
        assert measured == pytest.approx(OPTIMIZERS[name].facts["state_bytes"], abs=0.05)

    def test_going_on_from_a_saved_state_is_exact(self, name):
        model = make_model()
        optimizer = get_optimizer(name, model.parameters(), 1e-3)
        do_steps(model, optimizer, 3)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        do_steps(model, optimizer, 3, seed=1)
        resumed = make_model()
        resumed.load_state_dict(saved["model"])
        other = get_optimizer(name, resumed.parameters(), 1e-3)
        other.load_state_dict(saved["optimizer"])
        do_steps(resumed, other, 3, seed=1)
        for first, second in zip(model.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(first, second)

    def test_its_parameters_reach_it(self, name):
        others = ("eps", "d_coef", "clip_threshold", "decay_rate", "beta2_half_life", "tau")
        for parameter in OPTIMIZERS[name].parameters:
            if parameter.kind is float and parameter.name not in others:
                optimizer = get_optimizer(f"{name}:{parameter.name}=0.5", make_model().parameters(), 1e-3)
                held = [value for group in optimizer.param_groups for value in group.values()]
                assert any(value == 0.5 or (isinstance(value, tuple) and 0.5 in value) for value in held), parameter.name


@cases("name", [name for name in OPTIMIZERS if "package" in OPTIMIZERS[name].facts])
def test_a_missing_package_is_an_error_with_the_pip_line(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(LabError, match=f"pip install {OPTIMIZERS[name].facts['package']}"):
        resolve_config(TrainingConfig(optimizer=name))


@cases(
    ("options", "message"),
    [
        ({"optimizer": "sgd:momentum=0.5", "optimizer_kwargs": '{"momentum": 0.5}'}, "given twice"),
        ({"optimizer": "sgd", "adam_beta1": 0.9}, "has no effect on --optimizer sgd. .* it takes momentum, weight_decay"),
        ({"optimizer": "adamw:beta1=0.8", "adam_beta1": 0.9}, "'beta1' of --optimizer adamw is given twice"),
        ({"optimizer": "adamw:beta2_half_life=1e4", "adam_beta2": 0.9}, "no effect on --optimizer adamw with beta2_half"),
        ({"scale_lr": "sqrt", "learning_rate": "auto"}, "--scale_lr sqrt has no effect with --learning_rate auto"),
        ({"optimizer": "schedulefree_adamw"}, "--lr_scheduler constant_with_warmup and no .* and with --no_use_ema"),
        ({"momentum_scheduler_kwargs": '{"min_momentum": 0.5}'}, "without --momentum_scheduler"),
        ({"lr_scheduler": "mdlrc", "momentum_scheduler": "demon"}, "sets the momentum, and so does"),
        ({"lr_scheduler": "adaptive", "momentum_scheduler": "mdlrc"}, "--momentum_scheduler demon beside it"),
        ({"optimizer": "sgd:momentum=0", "lr_scheduler": "demon"}, "needs an optimizer with momentum"),
        ({"optimizer": "lion", "lr_scheduler": "mdlrc"}, "cannot drive Lion: its beta1 weighs the gradient against"),
        ({"lr_scheduler": "cosine:warmup_type=cosine", "lr_warmup_steps": 0}, "has no effect without warm-up"),
        ({"lr_scheduler": "cosine:min_lr=1"}, "min_lr=1 of 'cosine' is above --learning_rate"),
    ],
)
def test_wrong_requests(options, message):
    with pytest.raises(LabError, match=message):
        check_schedule(resolve_config(TrainingConfig(max_train_steps=50, **options)))


def test_learning_rates_have_the_optimizers_scale():
    rates = {name: resolve_config(TrainingConfig(optimizer=name)).learning_rate for name in ("adamw", "sgd", "prodigy")}
    assert rates == {"adamw": 1e-3, "sgd": pytest.approx(0.1), "prodigy": 1.0}
    assert resolve_config(TrainingConfig(optimizer="prodigy", learning_rate=0.5)).learning_rate == 0.5


def test_adams_options_are_its_parameters():
    config = resolve_config(TrainingConfig(adam_beta1=0.8))
    assert config.optimizer_kwargs["beta1"] == 0.8
    config = resolve_config(TrainingConfig(optimizer="adam", optimizer_kwargs={"beta1": 0.7}))
    assert (config.adam_beta1, config.optimizer_kwargs["beta1"], config.start_momentum) == (0.7, 0.7, 0.7)


def weights(folder):
    return UNet2DModel.from_pretrained(folder, subfolder="unet").state_dict()


@pytest.mark.slow
def test_schedule_free_trains_validates_and_resumes(tmp_path):
    options = [*runs.tiny_arguments(tmp_path), "--optimizer=schedulefree_adamw", "--lr_scheduler=constant_with_warmup"]
    options += ["--no_use_ema", "--max_train_steps=12", "--train_batch_size=16"]
    runs.run(*options, f"--output_dir={tmp_path}/often", "--validation_steps=1", "--checkpointing_steps=5")
    runs.run(*options, f"--output_dir={tmp_path}/rarely", "--validation_steps=12", "--save_images_epochs=1000")
    runs.run(*options, f"--output_dir={tmp_path}/often", "--validation_steps=1", "--resume_from_checkpoint=checkpoint-5")
    often, rarely = weights(tmp_path / "often"), weights(tmp_path / "rarely")
    assert all(torch.equal(often[key], rarely[key]) for key in often)
    # The pipeline has the averaged weights, the checkpoint those where gradients are taken.
    raw = weights(tmp_path / "often" / "checkpoint-12")
    assert not all(torch.equal(often[key], raw[key]) for key in often)
    rows, validations = runs.read_metrics(tmp_path / "often")
    assert len(validations) == 12
    assert validations[-1]["validation_loss"] == runs.read_metrics(tmp_path / "rarely")[1][-1]["validation_loss"]
    assert [row["beta1"] for row in rows] == [0.9] * 12


@pytest.mark.slow
def test_momentum_and_rate_of_a_run_are_the_promised_ones(tmp_path):
    options = [*runs.tiny_arguments(tmp_path), "--max_train_steps=10", "--train_batch_size=16", "--strict_lr_audit"]
    options += ["--lr_scheduler=linear", "--momentum_scheduler=mdlrc:min_momentum=0.3", "--lr_warmup_steps=2"]
    runs.run(*options, f"--output_dir={tmp_path}/run")
    schedule = resolve_schedule("linear", None, "mdlrc:min_momentum=0.3")
    lrs, momenta = schedule_curves(schedule, 1e-3, 0.95, 2, 10)
    rows, _ = runs.read_metrics(tmp_path / "run")
    assert [row["lr"] for row in rows] == pytest.approx(list(lrs), rel=1e-12)
    assert [row["beta1"] for row in rows] == pytest.approx(list(momenta), rel=1e-12)
    audit = runs.read_record(tmp_path / "run")["train"]["schedule_audit"]
    assert (audit["num_updates"], audit["largest_lr_deviation"], audit["largest_momentum_deviation"]) == (10, 0, 0)
