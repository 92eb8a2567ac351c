"""Every registered optimizer, alone and in real runs; settings for other batches, against formulas in float64."""

import importlib.util
import math
import typing
from importlib.util import find_spec

import numpy as np
import pytest
import runs
import torch
from diffusers import UNet2DModel
from registrations import restored
from tables import cases

from diffusers_lrlab import LabError, TrainingConfig, get_optimizer, list_optimizers
from diffusers_lrlab.core.registry import Parameter
from diffusers_lrlab.optimizers.build import optimizer_state_bytes
from diffusers_lrlab.optimizers.entries import OPTIMIZERS
from diffusers_lrlab.optimizers.timescales import (
    DecayTimescale,
    beta_of,
    half_life_of,
    scaled_learning_rate,
    scaling_warning,
    weight_decay_of,
)
from diffusers_lrlab.schedules.expected import schedule_curves
from diffusers_lrlab.schedules.schedule import resolve_schedule
from diffusers_lrlab.training.plan_text import describe_plan
from diffusers_lrlab.training.prepare import prepare
from diffusers_lrlab.training.resolve import check_schedule, resolve_config


def make_model():
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 6 * 6, 64), torch.nn.Linear(64, 64)
    return torch.nn.Sequential(*layers)


def do_steps(model, optimizer, num_steps):
    generator = torch.Generator().manual_seed(0)
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
        ({"optimizer": "sgd", "adam_beta1": 0.9}, "has no effect on --optimizer sgd. .* it takes momentum, weight_decay"),
        ({"optimizer": "adamw:beta1=0.8", "adam_beta1": 0.9}, "'beta1' of --optimizer adamw is given twice"),
        ({"optimizer": "adamw:beta2_half_life=1e4", "adam_beta2": 0.9}, "no effect on --optimizer adamw with beta2_half"),
        ({"scale_lr": "sqrt", "learning_rate": "auto"}, "--scale_lr sqrt has no effect with --learning_rate auto"),
        ({"optimizer": "schedulefree_adamw"}, "--lr_scheduler constant_with_warmup and no .* and with --no_use_ema"),
        ({"momentum_scheduler_kwargs": '{"min_momentum": 0.5}'}, "without --momentum_scheduler"),
        ({"lr_scheduler": "adaptive", "momentum_scheduler": "mdlrc"}, "Use the momentum schedule 'demon' with 'adaptive'"),
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


def with_a_replacement_of(parameter):
    packages = {
        name: entry.facts.get("package", "torch") for name, entry in OPTIMIZERS.items() if entry.replacing(parameter)
    }
    return [name for name, package in packages.items() if find_spec(package.replace("-", "_"))]


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((8, 8), (8,))]


def made(spec, lr=1e-3, **kwargs):
    return get_optimizer(spec, parameters(), lr, **kwargs)


def settings(optimizer, name):
    held = [{"beta2": group.get("betas", (0, 0))[1]} | group for group in optimizer.param_groups]
    (value,) = {group[name] for group in held if group[name]}
    return value


@cases("batches, beta2", [((64, 1), 0.9), ((64, 512), 0.99999), ((1, 64), 0.999), ((96, 100), 0.99)])
def test_half_lives_hold_across_batches(batches, beta2):
    """beta2' = beta2^(B' / B), which is how arXiv 2507.07101 scales it."""
    base, other = batches
    half_life = half_life_of(beta2, base)
    assert half_life == pytest.approx(base * math.log(0.5) / math.log(beta2), rel=1e-12)
    assert beta_of(half_life, base) == pytest.approx(beta2, rel=1e-12)
    assert beta_of(half_life, other) == pytest.approx(math.exp(other / base * math.log(beta2)), rel=1e-12)
    assert half_life_of(0.0, 64) == 0
    assert beta_of(1e15, 1) < 1  # the largest that is allowed


@cases("lr, batch", [(1e-4, 1), (3e-3, 64)])
def test_weights_shrink_to_a_share_of_1_over_e_in_tau(batch, lr):
    tau = 1_000_000
    decay, weight = weight_decay_of(tau, lr, batch), 1.0
    for _ in range(tau // batch):
        weight *= 1 - lr * decay
    assert weight == pytest.approx(math.exp(-1), rel=1e-3 * batch / 64 + 1e-5)


def test_what_decay_does_in_a_run():
    lrs = 1e-3 * np.linspace(1, 0, 5000)
    timescale = DecayTimescale.of(1e-3, 0.5, lrs)
    left = 1.0
    for lr in lrs.tolist():
        left *= 1 - lr * 0.5
    assert timescale.removed == pytest.approx(1 - left, rel=1e-12)
    assert timescale.updates == 2000
    told = timescale.in_words(5000)
    assert told.startswith("weights are forgotten over 2,000 updates, in a run of 5,000: the decay removes 71 %")
    little, much = (DecayTimescale.of(lr, decay, np.full(3000, lr)) for lr, decay in ((1e-4, 0.01), (1e-2, 100)))
    assert little.in_words(3000) == "weights are forgotten over 1,000,000 updates, in a run of 3,000: the decay does nothing"
    assert "they remember only its last updates" in much.in_words(3000)


@cases("rule, batch, factor", [("none", 4096, 1), ("linear", 256, 4), ("linear", 32, 0.5), ("sqrt", 16, 0.5)])
def test_learning_rates_for_other_batches(rule, batch, factor):
    assert scaled_learning_rate(1e-4, rule, batch, 64) == pytest.approx(1e-4 * factor)


def test_every_rule_that_can_be_asked_for_is_known():
    for rule in typing.get_args(typing.get_type_hints(TrainingConfig)["scale_lr"]):
        assert scaled_learning_rate(1e-4, rule, 64) == 1e-4
        assert (scaling_warning(rule, OPTIMIZERS["adamw"]) is not None) == (rule == "linear")
        assert scaling_warning(rule, OPTIMIZERS["sgd"]) is None


@cases("name", with_a_replacement_of("beta2"))
def test_a_half_life_reaches_the_optimizer(name):
    optimizer = made(f"{name}:beta2_half_life=5000", images_per_update=16)
    assert settings(optimizer, "beta2") == pytest.approx(0.5 ** (16 / 5000), rel=1e-12)
    assert settings(made(f"{name}:beta2_half_life=5000,images_per_update=8"), "beta2") == 0.5 ** (8 / 5000)


@cases("name", with_a_replacement_of("weight_decay"))
def test_a_timescale_reaches_the_optimizer(name):
    assert "decoupled" in OPTIMIZERS[name].traits
    optimizer = made(f"{name}:tau=1e6", lr=2e-4, images_per_update=32)
    assert settings(optimizer, "weight_decay") == pytest.approx(32 / (2e-4 * 1e6), rel=1e-12)


def test_without_them_records_stay_as_they_were():
    assert OPTIMIZERS["adamw"].resolve({}) == {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    given = OPTIMIZERS["adamw"].resolve({"tau": 1e6, "beta2_half_life": 5000})
    assert given == {"beta1": 0.9, "eps": 1e-8, "tau": 1e6, "beta2_half_life": 5000.0}
    assert OPTIMIZERS["adamw"].resolve(given) == given


@cases(
    ("spec", "images", "message"),
    [
        ("adamw:beta2_half_life=1000", None, r"beta2_half_life=1000 without images_per_update. Add images_per_update=N"),
        ("adamw:beta2_half_life=1000,beta2=0.9", 8, "1000.0 and beta2=0.9, of which one replaces the other"),
        ("adamw:tau=7", 8, r"tau=7.0 of 'adamw': must be at least the 8 images of an update"),
        ("adamw:beta2_half_life=1000", 0, r"images_per_update=0: must be a whole number"),
        ("adamw:images_per_update=8", None, r"images_per_update=8, which has no effect without beta2_half_life or tau"),
    ],
)
def test_wrong_settings_in_images(spec, images, message):
    with pytest.raises(LabError, match=message):
        get_optimizer(spec, parameters(), 1e-3, images_per_update=images)


@cases("layout", [(16, 4), (4, 1)])
def test_a_run_knows_the_images_of_its_updates(layout):
    batch, accumulation = layout
    optimizer = "adamw:beta2_half_life=20000,tau=100000"
    options = {"train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    options |= {"ema": "half_life:images=5000,rampup=1e9"}
    config = TrainingConfig(dataset_name="moons", optimizer=optimizer, max_train_steps=50, learning_rate=1e-3, **options)
    plan, *_ = prepare(config)
    images = batch * accumulation
    expected = {"beta1": 0.95, "eps": 1e-8, "beta2": 0.5 ** (images / 20000), "weight_decay": images / (1e-3 * 100_000)}
    assert plan.optimizer_kwargs == pytest.approx(expected, rel=1e-12)
    assert plan.ema_form.decay(40) == pytest.approx(0.5 ** (images / 5000), rel=1e-12)
    assert plan.decay_timescale.updates * images == pytest.approx(100_000)
    # What was asked stays in the configuration, so that the run can be repeated with another batch.
    assert plan.config.optimizer_kwargs == {"beta1": 0.95, "eps": 1e-8, "beta2_half_life": 20000.0, "tau": 100_000.0}
    assert "images_per_update" not in plan.config.ema
    told = describe_plan(plan)
    assert f": beta2 {expected['beta2']:.6g} and weight decay {expected['weight_decay']:.6g} for " in told
    assert f"weights are forgotten over {round(100_000 / images):,} updates, in a run of 50: the decay " in told


def test_the_floor_is_compared_with_the_scaled_rate():
    """1e-4 for 64 images are 8e-4 for 512."""
    options = {"dataset_name": "digits", "learning_rate": 1e-4, "scale_lr": "linear"}
    options |= {"train_batch_size": 512, "max_train_steps": 10, "lr_scheduler": "cosine"}
    plan, *_ = prepare(TrainingConfig(**options, lr_scheduler_kwargs={"min_lr": 2e-4}))
    assert plan.lrs.max() == pytest.approx(8e-4)
    with pytest.raises(LabError, match=r"0.002 of 'cosine' is above .* 0.0008"):
        prepare(TrainingConfig(**options, lr_scheduler_kwargs={"min_lr": 2e-3}))


def test_optimizers_of_others_may_have_such_names():
    taken = {}

    def make(params, lr, tau, beta2_half_life):
        taken.update(tau=tau, beta2_half_life=beta2_half_life)
        return torch.optim.SGD(params, lr)

    own = (Parameter("tau", float, 0.5, "a time"), Parameter("beta2_half_life", float, None, "another one"))
    with restored(OPTIMIZERS):
        OPTIMIZERS.register("own", description="a test's", source="a test", parameters=own)(make)
        get_optimizer("own:beta2_half_life=3", parameters(), 1e-3)
    assert taken == {"tau": 0.5, "beta2_half_life": 3.0}
