"""The learning-rate finder: rules on made-up curves, state that comes back, the script, `--learning_rate auto`."""

import dataclasses
import itertools
import json
import math
import random
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import datasets
import helpers
import numpy as np
import pytest
import runs
import started
import torch
from accelerate.state import AcceleratorState
from hypothesis import given
from hypothesis import strategies as st
from tables import cases
from trainer_states import QUICK, assert_same, state_of

from diffusers_lrlab import FinderConfig, TrainingConfig, find_lr
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.finder import on_trainer
from diffusers_lrlab.finder.find import find_lr_for_folder, find_lr_of, resolve_settings
from diffusers_lrlab.finder.on_trainer import range_test_of
from diffusers_lrlab.finder.range_test import OF_BATCHES, NoFiniteGradient, RangeTest, range_test
from diffusers_lrlab.finder.result import Suggestion, combine, minimum_tenth, read_saved_result
from diffusers_lrlab.optimizers.entries import OPTIMIZERS

FIND_LR = runs.SCRIPT.with_name("find_lr.py")
DRIVER = Path(__file__).parents[1] / "scripts" / "finder_driver.py"
# Optional optimizers' own.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

# --- rules -----------------------------------------------------------------------------------------------------------

X = np.linspace(-7, -2, 101)
LRS = 10**X


def fall(middle, width=0.4):
    """From 1 to 0, around a place on the logarithmic scale."""
    return 1 / (1 + np.exp((X - middle) / (width / 4)))


VALLEY = 0.2 + fall(-4.5) + np.maximum(X + 2.8, 0) ** 2 * 5  # falls at 10^-4.5, is least at up to 10^-2.8, rises
MIDDLE = 10 ** np.mean(X[(LRS > 10**-4.2) & (LRS < 10**-2.7)])  # of its flat bottom


def with_noise(seed):
    return VALLEY + 0.01 * np.random.default_rng(seed).standard_normal(len(X))


def with_spike(curve, place, width=1):
    return np.where((np.arange(len(X)) >= place) & (np.arange(len(X)) < place + width), 10 * curve, curve)


@cases("losses", [
    VALLEY, *map(with_noise, range(3)), with_spike(VALLEY, 20), with_spike(VALLEY, 20, 8),
    with_spike(with_noise(0), 4),  # where the noise is measured at the start
    with_spike(with_noise(0), 62),  # and before the minimum
    np.where(np.arange(len(X)) < 96, VALLEY, [*np.zeros(96), 3, 10, math.inf, math.nan, 1]),
])  # fmt: skip
def test_a_tenth_of_the_bottom_is_suggested_and_disturbances_move_it_little(losses):
    suggestion, undisturbed = minimum_tenth(LRS, losses), minimum_tenth(LRS, VALLEY).lr
    assert undisturbed == pytest.approx(MIDDLE / 10, rel=0.25)
    assert 0.5 < suggestion.lr / undisturbed < 2
    assert suggestion.interval[0] < suggestion.lr < suggestion.interval[1]


@cases("noise", [
    lambda rng: rng.standard_normal(200),
    lambda rng: rng.lognormal(0, 1, 200),  # a batch of 1: many small losses, a few large ones
    lambda rng: rng.standard_normal(200) * np.geomspace(0.1, 1, 200),
])  # fmt: skip
def test_curves_that_do_not_fall_seldom_pass_for_falling(noise):
    """At most 5 % of those that a script's test makes: 3.5 standard errors were found by such simulations."""
    rng, lrs = np.random.default_rng(0), np.geomspace(1e-7, 1e-2, 200)
    found = [minimum_tenth(lrs, 3 + noise(rng)) for _ in range(200)]
    assert sum("does not fall" not in suggestion.reason for suggestion in found) <= 10


@pytest.mark.parametrize(("noise", "least"), [(0.1, 40), (0.3, 34)])
def test_falls_are_seen_through_the_noise_of_single_batches(noise, least):
    """Falls of 40 % of the loss."""
    x = np.linspace(-7, -0.8, 250)
    curve = 1 - 0.4 / (1 + np.exp(-3 * (x + 3))) + 0.4 * 10 ** (2 * (x + 1.2))
    rng = np.random.default_rng(0)
    expected = minimum_tenth(10**x, curve).lr
    found = [minimum_tenth(10**x, curve * (1 + noise * rng.standard_normal(250))).lr for _ in range(40)]
    apart_by = [abs(math.log10(lr / expected)) for lr in found if lr is not None]
    assert len(apart_by) >= least
    assert np.median(apart_by) < 0.5


@pytest.mark.parametrize(
    ("memory", "last", "goes_on"), [(OF_BATCHES, 1.3, True), (OF_BATCHES, 5.0, False), (0.0, 1.3, False)]
)
def test_noise_of_batches_is_not_a_rise(memory, last, goes_on):
    """The loss falls little, and a batch of high losses follows at the highest rate; a probe's losses have no noise."""
    test = RangeTest(FinderConfig(start_lr=1e-7, end_lr=1e-2, num_updates=100), memory)
    rng = np.random.default_rng(1)
    for done in range(1, 100):
        assert test.add(1 - 0.001 * done + 0.3 * memory * rng.standard_normal())
    assert test.add(last) is goes_on


def test_a_range_test_of_a_function_of_the_rate():
    settings = FinderConfig(start_lr=1e-6, end_lr=1e-4, num_updates=20)
    rates = settings.lrs().tolist()
    sweep = range_test(lambda lr: 1 - 50 * lr, settings, 1.0)
    assert sweep.lrs.tolist() == [pytest.approx(rates[0] ** 2 / rates[1]), *rates]
    assert sweep.losses.tolist() == [1, *(1 - 50 * rate for rate in rates)]
    assert (sweep.num_updates, sweep.ended) == (len(rates), None)
    sweep = range_test(lambda lr: (1.0 if lr < 5e-5 else 11.0) if lr > 1e-5 else None, settings)
    assert sweep.lrs[0] == pytest.approx(rates[10])
    assert "the loss was 11 times its minimum" in sweep.ended
    assert "not finite" in range_test(lambda lr: math.inf, settings).ended

    sweep = range_test(Mock(side_effect=NoFiniteGradient), settings)
    assert (sweep.num_updates, len(sweep.losses)) == (0, 0)
    assert "no fp16 gradient was finite at a rate of 1e-06" in sweep.ended


@cases(("losses", "reason"), [
    (np.full(101, np.nan), "not finite from the start"),
    (np.where(np.arange(101) < 3, 1.0, np.nan), "known at 3 rates only"),
    (np.ones(101), "does not fall between"), (1 + fall(-4)[::-1], "does not fall and rises"),
    (1 + 0.001 * fall(-4), "does not fall between"),
    (1 + 0.05 * np.random.default_rng(0).standard_normal(101), "by more than the noise of independent losses"),
    (0.2 + fall(-2, width=4), "still falls at the highest rate, 0.01"),
])  # fmt: skip
def test_refusals(losses, reason):
    suggestion = minimum_tenth(LRS, losses)
    assert suggestion.lr is None is suggestion.interval
    assert reason in suggestion.reason


def test_input_that_is_no_curve():
    for lrs in (LRS[::-1], np.zeros(101), LRS[:50], np.ones((101, 1))):
        with pytest.raises(ValueError, match="lrs"):
            minimum_tenth(lrs, VALLEY)


def test_a_curve_that_ends_before_its_minimum():
    suggestion = minimum_tenth(LRS, np.where(LRS < 1e-3, 0.2 + fall(-3.5, width=1), np.nan))
    assert suggestion.lr == pytest.approx(1e-4, rel=0.15)
    assert "the last rate with a finite loss" in suggestion.reason


@given(st.lists(st.floats(0.01, 100) | st.just(math.nan), min_size=1, max_size=40), st.floats(0.1, 10))
def test_a_suggestion_is_of_the_range_or_none_and_has_no_unit(losses, unit):
    suggestion = minimum_tenth(np.geomspace(1e-6, 1e-1, len(losses)), losses)
    assert suggestion.reason
    if suggestion.lr is not None:
        assert 1e-7 * 0.99 <= suggestion.interval[0] <= suggestion.lr * 1.0001
        assert suggestion.lr <= suggestion.interval[1] * 1.0001 <= 1e-1 * 1.001
    expected = unit * minimum_tenth(LRS, VALLEY).lr
    assert minimum_tenth(LRS * unit, VALLEY * 100 * unit).lr == pytest.approx(expected, rel=1e-6)


def test_several_tests_are_combined():
    some = [Suggestion(lr, "here", (lr / 2, lr * 2)) for lr in (1e-4, 1e-3, 1e-2)]
    both = combine([*some, Suggestion(None, "none")])
    assert both.lr == pytest.approx(1e-3)
    assert both.interval == pytest.approx((5e-5, 2e-2))
    assert combine(some[:1]) == some[0]
    assert combine([some[0], Suggestion(None, "why not")]) == Suggestion(None, "why not")
    assert combine([]).lr is None


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_follow_the_optimizer_and_are_checked():
    config = TrainingConfig(**POINTS, output_dir="run")
    with pytest.raises(LabError, match=r"settings=.* of find_lr\(\): must be a FinderConfig or None, got "):
        find_lr(config, {"num_updates": 20})
    with pytest.raises(LabError, match=r"--scale_lr is for training and has no effect on the finder. Leave it out\."):
        find_lr_for_folder(dataclasses.replace(config, scale_lr="sqrt"))
    assert resolve_settings(FinderConfig(), "adamw").start_lr == 1e-7
    assert resolve_settings(FinderConfig(), "sgd:momentum=0.8").end_lr == pytest.approx(1.0)
    with pytest.raises(LabError, match="'prodigy' finds its learning rate by itself"):
        resolve_settings(FinderConfig(), "prodigy")
    with pytest.raises(LabError, match=r"--end_lr 0.01: must be at least 2 times --start_lr, got --start_lr 0.006. Hint: "):
        resolve_settings(FinderConfig(start_lr=6e-3), "adamw")


def test_rates_are_spaced_evenly_and_go_on_by_two_decades_or_for_as_long_again():
    lrs = FinderConfig(start_lr=1e-7, end_lr=1e-2, num_updates=11).lrs()
    np.testing.assert_allclose(lrs, 10 ** np.linspace(-7, 0, 15)[: len(lrs)])
    assert lrs[-1] == pytest.approx(1.0)
    assert len(FinderConfig(start_lr=1e-3, end_lr=2e-3, num_updates=50).lrs()) == 100


# --- trainers --------------------------------------------------------------------------------------------------------

POINTS = {
    "dataset_name": "moons", "max_train_steps": 18, "train_batch_size": 32, "num_validation_images": 64,
    "ddpm_num_steps": 20, "num_inference_steps": 2, "validation_steps": 8,
}  # fmt: skip
MLP = {"dimension": 2, "hidden_size": 64, "num_layers": 1, "embedding_size": 16}


def make_trainer(folder, model=MLP, **options):
    return helpers.make_trainer(folder, POINTS | options, model)


CASES = {
    name: {"optimizer": name} | ({"use_ema": False, "lr_scheduler": "constant"} if "schedulefree" in name else {})
    for name, entry in OPTIMIZERS.items()
    if helpers.is_installed(name) and "learning_rate" not in entry.facts
} | {
    "accumulation": {"gradient_accumulation_steps": 2, "train_batch_size": 16},
    "follows losses": {"timestep_sampler": "loss_second_moment:history=1", "loss_weighting": "learned_log_variance"},
    "bands and momentum": {"timestep_lr": "banded:factors=[1|2]", "lr_scheduler": "mdlrc"},
    "feedback": {"lr_scheduler": "reduce_lr_on_plateau:patience=0"},
    "images with dropout": {"noise": "offset", "dataset_name": "digits", "distance_samples": 0},
}
DIGITS = {key: value for key, value in runs.TINY_UNET.items() if key != "_class_name"} | {"dropout": 0.2}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_everything_is_as_it_was(tmp_path, name):
    """In the middle of a run, which goes on as if nothing had been."""
    model = DIGITS if "dataset_name" in CASES[name] else MLP
    trainers = [make_trainer(tmp_path / str(number), model, **CASES[name]) for number in range(2)]
    for trainer in trainers:
        torch.manual_seed(0)  # of dropout, which draws from the one generator of this process
        updates = trainer.updates(show_progress=False)
        for _ in range(10):
            next(updates)
        trainer.rest = updates
    before = state_of(trainers[0])
    result = find_lr_of(trainers[0], FinderConfig(**QUICK))
    one, other = (sweep.losses for sweep in result.sweeps)
    assert one[0] == other[0]  # the probe is fixed, and the weights are those of the trainer
    assert np.isfinite(one[0])
    assert not np.array_equal(one[1:], other[1:])
    assert_same(state_of(trainers[0]), before)
    for trainer in trainers:
        torch.manual_seed(1)
        for _ in trainer.rest:
            pass
    for part in ("model", "optimizer"):
        assert_same(state_of(trainers[0])[part], state_of(trainers[1])[part])
    rows, others = (runs.read_metrics(trainer.folder.path) for trainer in trainers)
    assert rows == others


def test_an_exception_changes_nothing_either(tmp_path, monkeypatch):
    """Also not the count of micro-batches."""
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=2, train_batch_size=16)
    before, batches = state_of(trainer), trainer.batches

    def cut_short(*order):
        yield from itertools.islice(batches(*order), 5)
        yield Batch(torch.randn(16, 2))  # half of an update

    monkeypatch.setattr(trainer, "batches", cut_short)
    with pytest.raises(RuntimeError):
        find_lr_of(trainer, FinderConfig(**QUICK))
    assert_same(state_of(trainer), before)
    monkeypatch.undo()
    other = make_trainer(tmp_path / "other", gradient_accumulation_steps=2, train_batch_size=16)
    for one in (trainer, other):
        for _ in itertools.islice(one.updates(show_progress=False), 3):
            pass
    assert_same(state_of(trainer)["model"], state_of(other)["model"])


def test_a_test_ends_where_the_loss_explodes_and_goes_on_while_it_falls(tmp_path):
    trainer = make_trainer(tmp_path / "sgd", optimizer="sgd", max_grad_norm=0.0)
    sweep = range_test_of(trainer, FinderConfig(start_lr=1e-3, end_lr=1e6, num_updates=60))
    assert sweep.num_updates < 60
    assert "times its minimum" in sweep.ended or "not finite" in sweep.ended
    assert len(sweep.lrs) == len(sweep.losses)
    sweep = range_test_of(make_trainer(tmp_path), FinderConfig(start_lr=1e-6, end_lr=1e-4, num_updates=40))
    assert 1e-4 < sweep.lrs[-1] <= 1.01e-2
    assert len(range_test_of(make_trainer(tmp_path), FinderConfig(start_lr=1e-6, end_lr=1e-2, num_updates=10)).losses) >= 8


def test_timesteps_are_spread_and_noise_comes_in_pairs(tmp_path, monkeypatch):
    trainer, seen = make_trainer(tmp_path), []
    scheduler, add_noise = trainer.run.process.scheduler, trainer.run.process.scheduler.add_noise
    monkeypatch.setattr(scheduler, "add_noise", lambda *given: seen.append(given[1:]) or add_noise(*given))
    range_test_of(trainer, resolve_settings(FinderConfig(**QUICK), "adamw"))
    updates = [(noise, timesteps) for noise, timesteps in seen if torch.equal(noise[:16], -noise[16:])]
    assert len(updates) == 24
    strata = np.arange(33) * 20 / 32
    for noise, timesteps in updates:
        ordered = np.sort(timesteps.numpy())
        assert (np.floor(strata[:-1]) <= ordered).all()
        assert (ordered < np.ceil(strata[1:])).all()
        assert not torch.equal(noise[0], noise[1])


def test_bands_take_turns_at_their_own_rates(tmp_path, monkeypatch):
    trainer, seen = make_trainer(tmp_path, timestep_lr="banded:factors=[1|3]"), []
    run = trainer.run
    monkeypatch.setattr(
        trainer, "do_update", lambda _: seen.append((run.objective.draw(run.update), run.current_lr)) or True
    )
    range_test_of(trainer, FinderConfig(start_lr=1e-4, end_lr=2e-4, num_updates=10))
    (one, one_lr), (other, other_lr) = sorted(seen[:2], key=lambda pair: pair[1])
    assert (one < 10).all() != (other < 10).all()
    assert other_lr == pytest.approx(3 * one_lr, rel=0.1)


def test_skipped_fp16_updates_are_done_again(tmp_path, monkeypatch):
    trainer, calls = make_trainer(tmp_path), []
    do_update = trainer.do_update
    monkeypatch.setattr(trainer, "do_update", lambda images: calls.append(1) or (len(calls) % 3 == 0 and do_update(images)))
    sweep = range_test_of(trainer, resolve_settings(FinderConfig(num_updates=10), "adamw"))
    assert len(calls) == 3 * sweep.num_updates >= 30
    assert (sweep.losses > 0).all()


@pytest.mark.parametrize("streaming", [False, True])
def test_each_test_has_other_batches(tmp_path, monkeypatch, streaming):
    datasets.Dataset.from_dict({"x": [[float(n), 0.0] for n in range(200)]}).to_parquet(str(tmp_path / "data.parquet"))
    trainer = make_trainer(
        tmp_path / "run",
        **{"dataset_name": None, "train_data_dir": str(tmp_path), "data_kind": "points", "streaming": streaming},
        **{"train_batch_size": 4, "num_validation_images": 20},
    )
    seen = []
    monkeypatch.setattr(on_trainer, "do_one_update", lambda _, batch: seen[-1].append(batch.data[:, 0].tolist()) or True)
    for repeat in range(3):
        seen.append([])
        range_test_of(trainer, FinderConfig(start_lr=1e-6, end_lr=1e-4, num_updates=10), repeat)
    assert len({str(sorted(batch)) for batches in seen for batch in batches[:10]}) == 30


def test_models_that_cannot_be_tested(tmp_path):
    trainer = make_trainer(tmp_path)
    with torch.no_grad():
        trainer.run.model.output.weight.fill_(math.nan)
    before = state_of(trainer)
    with pytest.raises(LabError, match="returns predictions that are not finite .* before the first update"):
        find_lr_of(trainer, FinderConfig(**QUICK))
    assert_same(state_of(trainer), before)
    trainer.run.model.requires_grad_(False)
    with pytest.raises(LabError, match="no parameter that is trained"):
        find_lr_of(trainer)


@pytest.mark.slow
@pytest.mark.pictures
def test_from_python(tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)
    config, settings = TrainingConfig(**POINTS, output_dir="run"), FinderConfig(**QUICK)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    result = find_lr(config, settings)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    names = {"find_lr": lambda *given: given, "TrainingConfig": TrainingConfig, "FinderConfig": FinderConfig}
    assert eval(result.about["command"], names) == (config, settings)
    result.save(str(tmp_path))
    found = json.loads((tmp_path / "lr_finder.json").read_text())
    assert len(found["sweeps"]) == 2
    assert (tmp_path / "lr_finder.png").stat().st_size > 10_000
    assert repr(result) == f"FinderResult({result.suggestion})"
    assert found["suggestion"]["reason"] == result.suggestion.reason


# --- commands --------------------------------------------------------------------------------------------------------


OF_POINTS = ("--dataset_name=moons", "--denoiser=mlp:hidden_size=64,num_layers=1,embedding_size=16")


def test_a_result_is_of_its_run_alone(tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)
    find_lr_for_folder(TrainingConfig(**POINTS, output_dir=str(tmp_path)), FinderConfig(**{**QUICK, "repeats": 1}))
    for other in ({}, {"dataset_name": "circle"}, {"train_batch_size": 8}, {"optimizer": "adamw:beta2=0.9"}):
        plan = make_trainer(tmp_path, {"dimension": 2}, **other).run.plan
        assert (read_saved_result(tmp_path, plan) is not None) == (not other), other


@pytest.mark.slow
def test_auto_takes_what_the_script_finds_and_trains_as_with_a_given_rate(tmp_path):
    """Also resumed, and in a folder with the finder's result, which the card shows."""
    options = [*OF_POINTS, "--train_batch_size=64", "--num_validation_images=200", "--distance_samples=200"]
    options += ["--eval_batch_size=50", "--ddpm_num_steps=20", "--num_inference_steps=20", "--lr_scheduler=rex"]
    status, shown, warned = started.run(FIND_LR, *options, f"--output_dir={tmp_path}/found", env=runs.environment())
    assert status == 0, warned
    assert "and not the finder: --eval_batch_size, --distance_samples, --lr_scheduler, " in warned
    train = [*options, "--max_train_steps=20", "--logging_steps=1", "--checkpointing_steps=10"]
    auto = [*train, "--learning_rate=auto", f"--output_dir={tmp_path}/auto"]
    status, told, error = started.run(runs.SCRIPT, *auto, env=runs.environment())
    assert status == 0, error
    lr = runs.read_record(tmp_path / "auto")["config"]["learning_rate"]
    assert json.loads((tmp_path / "found/lrlab/lr_finder.json").read_text())["learning_rate"] == lr
    assert f"Suggested learning rate: {lr:.2g} (" in shown
    assert f"Learning rate {lr:g}, as the finder suggests." in told
    runs.run(*auto, "--resume_from_checkpoint=checkpoint-10")
    for name in ("given", "found"):
        runs.run(*train, f"--learning_rate={lr!r}", f"--output_dir={tmp_path / name}")
    folders = [tmp_path / name for name in ("auto", "given", "found")]
    assert len({(path / "denoiser/diffusion_pytorch_model.safetensors").read_bytes() for path in folders}) == 1
    losses = [[row["loss"] for row in runs.read_metrics(path)[0]] for path in folders]
    assert losses[0] == losses[1] == losses[2]
    cards = [(path / "README.md").read_text() for path in folders]
    assert ["The finder's test before the run (3 times" in card for card in cards] == [True, False, True]
    assert [(path / "lrlab/lr_finder.png").exists() for path in folders] == [True, False, True]


@pytest.mark.slow
def test_two_processes_find_what_one_finds_and_are_as_they_were(tmp_path):
    """With accumulation, in the middle of a run."""
    options = [*OF_POINTS, "--gradient_accumulation_steps=2"]
    options += ["--num_validation_images=100", "--validation_steps=1", "--max_train_steps=10"]
    found = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        arguments = [folder, *options, f"--train_batch_size={32 // processes}", f"--output_dir={folder}"]
        start = started.run if processes == 1 else partial(started.run_ranks, processes=2)
        status, _, told = start(DRIVER, *arguments, env=runs.environment())
        assert status == 0, told
        found.append(np.array(json.loads((folder / "losses.json").read_text())))
    np.testing.assert_allclose(*found, rtol=1e-3)
