"""Learning rates for other batches: the rules, the calculator, and what a run makes of them."""

import contextlib

import pytest
import runs
from tables import cases

from diffusers_lrlab import LabError, TrainingConfig
from diffusers_lrlab.optimizers.scaling import SCALING_RULES, scaled_learning_rate, scaling_warning
from diffusers_lrlab.training.prepare import prepare
from diffusers_lrlab.training.resolve import resolve_config


@cases(
    ("rule", "batch", "base", "factor"),
    [
        ("none", 4096, 64, 1),
        ("linear", 256, 64, 4),
        ("linear", 32, 64, 0.5),
        ("sqrt", 256, 64, 2),
        ("sqrt", 16, 64, 0.5),
        ("guide", 32, 64, 0.5),
        ("guide", 64, 64, 1),
        ("guide", 512, 64, 8),
        ("guide", 2048, 64, 16),
        ("guide", 4096, 1024, 2),
        ("guide", 512, 1024, 0.5**0.5),
    ],
)
def test_factors(rule, batch, base, factor):
    assert scaled_learning_rate(1e-4, rule, batch, base) == pytest.approx(1e-4 * factor)


@cases("rule", SCALING_RULES)
@cases("batches", [(64, 1024), (512, 513), (1024, 8192), (1, 64), (96, 100)])
def test_there_and_back_is_where_it_was(rule, batches):
    one, other = batches
    there = scaled_learning_rate(1e-4, rule, other, one)
    assert scaled_learning_rate(there, rule, one, other) == pytest.approx(1e-4)


@cases("rule", SCALING_RULES)
def test_rules_rise_without_a_jump(rule):
    rates = [scaled_learning_rate(1.0, rule, batch, 64) for batch in range(1, 3000)]
    assert all(low <= high <= 2 * low for low, high in zip(rates, rates[1:], strict=False))
    assert rates[63] == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((1e-4, "root", 64, 64), "Unknown rule 'root'"),
        ((0.0, "sqrt", 64, 64), "learning_rate=0.0: must be a number in"),
        ((1, "sqrt", 0, 64), "batch=0: must be"),
    ],
)
def test_wrong_numbers(arguments, part):
    with pytest.raises(LabError, match=part):
        scaled_learning_rate(*arguments)


@pytest.mark.parametrize(("min_lr", "is_told"), [(2e-4, False), (2e-3, True)])
def test_the_floor_is_compared_with_the_scaled_rate(min_lr, is_told):
    """1e-4 for 64 images are 8e-4 for 512."""
    config = TrainingConfig(
        dataset_name="digits",
        **{"learning_rate": 1e-4, "scale_lr": "linear", "train_batch_size": 512, "max_train_steps": 10},
        **{"lr_scheduler": "cosine", "lr_scheduler_kwargs": {"min_lr": min_lr}},
    )
    with pytest.raises(LabError, match="0.002 of 'cosine' is above .* 0.0008") if is_told else contextlib.nullcontext():
        plan, *_ = prepare(config)
        assert plan.lrs.max() == pytest.approx(8e-4)


def test_who_is_warned():
    assert "the derived rule is sqrt" in scaling_warning("linear", "adamw")
    assert scaling_warning("linear", "sgd") is scaling_warning("sqrt", "adamw") is scaling_warning("none", "adam") is None


@cases(
    ("options", "part"),
    [
        (
            {"scale_lr": "root"},
            r"scale_lr='root' of TrainingConfig\(\): must be 'none' or 'linear' or 'sqrt' or 'guide', got 'root'",
        ),
        ({"scale_lr": "sqrt", "learning_rate": "auto"}, "--scale_lr sqrt has no effect with --learning_rate auto"),
    ],
)
def test_options_that_cannot_be(options, part):
    with pytest.raises(LabError, match=part):
        resolve_config(TrainingConfig(**options))


@pytest.mark.slow
def test_a_run_has_the_scaled_rate(tmp_path):
    """Over micro-batches; it is told, recorded, audited and on the card."""
    options = [*runs.tiny_arguments(tmp_path), "--max_train_steps=4", "--train_batch_size=8", "--lr_scheduler=constant"]
    options += ["--gradient_accumulation_steps=2", "--scale_lr=sqrt", "--learning_rate=1e-3", f"--output_dir={tmp_path}/run"]
    runs.run(*options, "--lr_warmup_steps=0")
    rows, _ = runs.read_metrics(tmp_path / "run")
    assert {row["lr"] for row in rows} == {5e-4}
    record = runs.read_record(tmp_path / "run")
    assert record["train"]["peak_learning_rate"] == 5e-4
    assert record["train"]["schedule_audit"]["largest_lr_deviation"] == 0
    assert "with a peak of 0.0005 after" in (tmp_path / "run/README.md").read_text()
