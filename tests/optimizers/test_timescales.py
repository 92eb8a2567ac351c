"""Settings of optimizers for other batches, against formulas written here in float64: timescales and learning rates."""

import math
import typing
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from tables import cases

from diffusers_lrlab import LabError, TrainingConfig, get_optimizer
from diffusers_lrlab.optimizers.entries import OPTIMIZERS
from diffusers_lrlab.optimizers.timescales import (
    DecayTimescale,
    beta_of,
    half_life_of,
    scaled_learning_rate,
    scaling_warning,
    weight_decay_of,
)
from diffusers_lrlab.training.plan_text import describe_plan
from diffusers_lrlab.training.prepare import prepare


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
        ("adam:tau=1000", 8, r"'adam' does not take 'tau'"),
    ],
)
def test_wrong_requests(spec, images, message):
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
