"""Learning rates for other batches: the rules, the calculator, and what a run makes of them."""

import contextlib
import math

import pytest
import runs
from tables import cases

from diffusers_lrlab import LabError, TrainingConfig
from diffusers_lrlab.cli.main import main
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
    """1e-4 for 8 images are 8e-4 for 64."""
    config = TrainingConfig(
        dataset_name="digits",
        **{"learning_rate": 1e-4, "scale_lr": "linear", "base_batch_size": 8, "train_batch_size": 64, "max_train_steps": 10},
        **{"lr_scheduler": "cosine", "lr_scheduler_kwargs": {"min_lr": min_lr}},
    )
    with pytest.raises(LabError, match="0.002 of 'cosine' is above .* 0.0008") if is_told else contextlib.nullcontext():
        plan, *_ = prepare(config)
        assert plan.lrs.max() == pytest.approx(8e-4)


def test_who_is_warned():
    assert "the derived rule is sqrt" in scaling_warning("linear", "adamw")
    assert scaling_warning("linear", "sgd") is scaling_warning("sqrt", "adamw") is scaling_warning("none", "adam") is None


def test_the_calculator(capsys):
    assert main("scale --learning_rate 1e-4 --train_batch_size 96 --num_processes 2".split()) == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if "this batch" in line).split()
    assert row[:4] == ["192", "0.0003", "0.000173", "0.0003"]
    assert row[4] == "0.997003"
    assert "64      0.0001      0.0001      0.0001       0.999  base" in shown


def numbers(shown, batch):
    """The row of a batch, as numbers."""
    row = next(line for line in shown.splitlines() if line.split()[:1] == [str(batch)])
    return [float(word) for word in row.split() if word[0].isdigit()]


def test_the_calculator_knows_beta2_and_weight_decay(capsys):
    """By their timescales in images, in float64 here."""
    given = "--learning_rate 2e-4 --base_batch_size 32 --adam_beta2 0.99 --adam_weight_decay 0.05 --max_train_steps 3000"
    assert main(["scale", *given.split(), "--train_batch_size", "4"]) == 0
    shown = capsys.readouterr().out
    half_life, tau = 32 * math.log(0.5) / math.log(0.99), 32 / (2e-4 * 0.05)
    for batch in (1, 4, 256):
        rate = 2e-4 * math.sqrt(batch / 32)
        *_, beta2, decay = numbers(shown, batch)
        assert beta2 == pytest.approx(0.5 ** (batch / half_life), abs=1e-6)
        assert decay == pytest.approx(batch / (rate * tau), rel=5e-3)
    assert f"beta2_half_life={half_life:.4g}" in shown
    assert "adamw:tau=3.2e+06" in shown
    assert (
        "weights are forgotten over 100,000 updates, in a run of 3,000: the decay removes 3 % of the first weights." in shown
    )
    assert "accumulation" not in shown


@cases(("arguments", "is_told"), [("", True), ("--num_processes 2", False)])
def test_the_calculator_says_what_accumulation_costs(capsys, arguments, is_told):
    """On one device. The settings that it names are those of the small batch."""
    given = f"--learning_rate 1e-4 --train_batch_size 4 --gradient_accumulation_steps 16 {arguments}"
    assert main(["scale", *given.split()]) == 0
    shown = capsys.readouterr().out
    assert ("1 update of 64 images in about the time of 16 updates of 4" in shown) == is_told
    told = (
        f"--train_batch_size 4 --gradient_accumulation_steps 1 --learning_rate 2.5e-05 --adam_beta2 {0.999 ** (4 / 64):.6g}"
    )
    assert (told in shown) == is_told


def test_the_calculator_of_widths(capsys):
    assert main("scale --learning_rate 1e-3 --width_base 64 --width 384".split()) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert rows["64"] == ["64", "0.001", "0.001", "x", "1", "base"]
    assert rows["384"][:5] == ["384", "0.001", "0.000167", "x", "6"]
    assert rows["32"][2] == "0.002"


@cases(
    ("arguments", "part"),
    [
        ("--learning_rate 1e-4 --width 64", "--width 64 has no effect without --width_base"),
        ("--learning_rate 1e-4 --width_base 0", "--width_base 0: must be a whole number"),
        (
            "--learning_rate 1e-4 --width_base 64 --train_batch_size 8",
            "--train_batch_size 8 has no effect with --width_base",
        ),
        ("--learning_rate 1e-4 --adam_beta2 1", "--adam_beta2 1.0: must be a number in (0, 1)"),
        ("--learning_rate 1e-4 --adam_weight_decay 0", "--adam_weight_decay 0.0: must be a number in (0, inf)"),
        ("--learning_rate 1e-4 --max_train_steps 9", "--max_train_steps 9 has no effect without --adam_weight_decay"),
        ("--learning_rate 1e-4 --adam_weight_decay 1 --width_base 64", "has no effect with --width_base"),
        ("--learning_rate 1e-4 --num_processes 2", "no effect without --train_batch_size"),
        (
            "--learning_rate 1e-4 --train_batch_size 0 --num_processes 0",
            "--train_batch_size 0: must be a whole number",
        ),
        ("--learning_rate -1", "--learning_rate -1.0: must be a number in (0, inf)"),
        ("", "--learning_rate"),
    ],
)
def test_the_calculator_refuses(arguments, part, capsys):
    assert main(["scale", *arguments.split()]) == 2
    assert part in capsys.readouterr().err


@cases(
    ("options", "part"),
    [
        ({"base_batch_size": 128}, "--base_batch_size 128 has no effect without --scale_lr"),
        ({"scale_lr": "sqrt", "base_batch_size": 0}, "--base_batch_size 0: must be"),
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
