"""The learning-rate finder: rules on made-up curves, state that comes back, the script, `--learning_rate auto`."""

import base64
import dataclasses
import html
import itertools
import json
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import runs
import started
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from helpers import is_installed
from hypothesis import given
from hypothesis import strategies as st
from trainer_states import QUICK, assert_same, state_of

from diffusers_lrlab import FinderConfig, TrainingConfig, find_lr
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.finder import range_test as range_tests
from diffusers_lrlab.finder.find import find_lr_for_folder, find_lr_of, resolve_settings
from diffusers_lrlab.finder.range_test import range_test
from diffusers_lrlab.finder.readings import MEMORY, Readings
from diffusers_lrlab.finder.saved_result import read_saved_result
from diffusers_lrlab.finder.suggestions import RULES, Suggestion, combine, disagreement, minimum_tenth, steepest, valley
from diffusers_lrlab.optimizers.entries import OPTIMIZERS
from diffusers_lrlab.training.kinds.select import kind_of
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.run_folder import RunFolder
from diffusers_lrlab.training.stepping import do_one_update
from diffusers_lrlab.training.trainer import Trainer

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


def test_expected_rates():
    assert steepest(LRS, VALLEY).lr == pytest.approx(10**-4.5, rel=0.1)
    flat = (LRS > 10**-4.2) & (LRS < 10**-2.7)
    middle = 10 ** np.mean(X[flat])
    assert minimum_tenth(LRS, VALLEY).lr == pytest.approx(middle / 10, rel=0.25)
    assert valley(LRS, VALLEY).lr == pytest.approx(10**-4.5, rel=0.4)
    for rule in RULES.values():
        suggestion = rule(LRS, VALLEY)
        assert suggestion.interval[0] < suggestion.lr < suggestion.interval[1]


def test_an_update_whose_gradients_always_overflow_is_not_done():
    tries = []
    assert not do_one_update(SimpleNamespace(do_update=lambda images: tries.append(1)), None)
    assert len(tries) == 30
    assert do_one_update(SimpleNamespace(do_update=lambda images: True), None)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_them_little(rule, seed):
    noisy = VALLEY + 0.01 * np.random.default_rng(seed).standard_normal(len(X))
    assert 0.5 < RULES[rule](LRS, noisy).lr / RULES[rule](LRS, VALLEY).lr < 2


@pytest.mark.parametrize("rule", RULES)
def test_a_spike_before_the_valley_is_passed_over(rule):
    for width in (1, 2, 8):
        spiked = VALLEY.copy()
        spiked[20 : 20 + width] += 2
        assert 0.5 < RULES[rule](LRS, spiked).lr / RULES[rule](LRS, VALLEY).lr < 2


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("place", [4, 62])
def test_a_spike_is_passed_over_where_the_noise_is_measured(rule, place):
    """At the start, and before the least point."""
    spiked = VALLEY + 0.01 * np.random.default_rng(0).standard_normal(len(X))
    spiked[place] *= 10
    assert 0.5 < RULES[rule](LRS, spiked).lr / RULES[rule](LRS, VALLEY).lr < 2


@pytest.mark.parametrize("rule", RULES)
def test_an_explosion_after_the_valley_changes_nothing(rule):
    exploded = VALLEY.copy()
    exploded[-5:] = [3, 10, math.inf, math.nan, 1]
    assert RULES[rule](LRS, exploded).lr == pytest.approx(RULES[rule](LRS, VALLEY).lr, rel=0.3)


NOISES = {
    "normal": lambda rng, size: rng.standard_normal(size),
    "of timesteps": lambda rng, size: rng.lognormal(0, 1, size),  # a batch of 1: many small losses, a few large ones
    "rising": lambda rng, size: rng.standard_normal(size) * np.geomspace(0.1, 1, size),
}


@pytest.mark.parametrize("kind", NOISES)
def test_curves_that_do_not_fall_seldom_pass_for_falling(kind):
    """At most 5 % of those that a script's test makes: 3.5 standard errors were found by such simulations."""
    rng, lrs = np.random.default_rng(0), np.geomspace(1e-7, 1e-2, 200)
    found = [minimum_tenth(lrs, 3 + NOISES[kind](rng, 200)) for _ in range(200)]
    assert sum("does not fall" not in suggestion.reason for suggestion in found) <= 10


@pytest.mark.parametrize(("noise", "least"), [(0.1, 40), (0.3, 34)])
def test_falls_are_seen_through_the_noise_of_single_batches(noise, least):
    """Of 40 % of the loss; 3 times the noise of single readings, which was asked for once, are 90 % of it in the second."""
    x = np.linspace(-7, -0.8, 250)
    curve = 1 - 0.4 / (1 + np.exp(-3 * (x + 3))) + 0.4 * 10 ** (2 * (x + 1.2))
    rng = np.random.default_rng(0)
    for rule, apart in ((minimum_tenth, 0.5), (valley, 1.0)):
        expected = rule(10**x, curve).lr
        found = [rule(10**x, curve * (1 + noise * rng.standard_normal(250))).lr for _ in range(40)]
        apart_by = [abs(math.log10(lr / expected)) for lr in found if lr is not None]
        assert len(apart_by) >= least
        assert np.median(apart_by) < apart


@pytest.mark.parametrize(("memory", "goes_on"), [(MEMORY["classic"], True), (MEMORY["probe"], False)])
def test_noise_of_batches_is_not_a_rise(memory, goes_on):
    """The loss falls little, and a batch of high losses follows at the highest rate; a probe's losses are no chance."""
    rng, readings = np.random.default_rng(1), Readings(100, 10.0, memory)
    for done in range(1, 100):
        assert readings.add(done, 1e-7 * 1.1**done, 1 - 0.001 * done + 0.3 * memory * rng.standard_normal(), np.empty(0))
    assert readings.add(100, 1e-2, 1.3, np.empty(0)) is goes_on


REFUSED = {
    "all NaN": (np.full(101, np.nan), "not finite from the start"),
    "NaN after 3": (np.where(np.arange(101) < 3, 1.0, np.nan), "known at 3 rates only"),
    "level": (np.ones(101), "does not fall between"),
    "rises": (1 + fall(-4)[::-1], "does not fall and rises"),
    "noise": (1 + 0.05 * np.random.default_rng(0).standard_normal(101), "does not fall"),
    "a fall of a thousandth": (1 + 0.001 * fall(-4), "does not fall between"),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", REFUSED)
def test_refusals(rule, name):
    losses, reason = REFUSED[name]
    suggestion = RULES[rule](LRS, losses)
    assert suggestion.lr is None is suggestion.interval
    assert reason in suggestion.reason
    assert suggestion.is_noise is (name == "noise") is ("by more than the noise of independent losses" in suggestion.reason)


def test_three_points_are_too_few():
    assert steepest([1e-5, 1e-4, 1e-3], [1.0, 0.5, 0.7]).reason.startswith("the loss is known at 3 rates only")


def test_a_least_that_is_not_in_sight_is_none():
    suggestion = minimum_tenth(LRS, 0.2 + fall(-2, width=4))
    assert suggestion.lr is None
    assert "still falls at the highest rate, 0.01" in suggestion.reason
    assert steepest(LRS, 0.2 + fall(-3)).lr == pytest.approx(1e-3, rel=0.1)


def test_a_loss_that_falls_until_it_is_no_number():
    cut = np.where(LRS < 1e-3, 0.2 + fall(-3.5, width=1), np.nan)
    suggestion = minimum_tenth(LRS, cut)
    assert suggestion.lr == pytest.approx(1e-4, rel=0.15)
    assert "the last rate with a finite loss" in suggestion.reason


@pytest.mark.parametrize(
    "lrs",
    [LRS[::-1], np.zeros(101), np.ones(101), LRS[:50], np.ones((101, 1))],
    ids=["falling", "zero", "constant", "too few", "two axes"],
)
def test_curves_that_are_none(lrs):
    with pytest.raises(ValueError, match="lrs"):
        steepest(lrs, VALLEY)


@given(st.lists(st.floats(0.01, 100) | st.just(math.nan), min_size=1, max_size=40), st.sampled_from(sorted(RULES)))
def test_a_rule_names_a_rate_of_the_range_or_none(losses, rule):
    lrs = np.geomspace(1e-6, 1e-1, len(losses))
    suggestion = RULES[rule](lrs, losses)
    assert suggestion.reason
    if suggestion.lr is not None:
        assert 1e-7 * 0.99 <= suggestion.interval[0] <= suggestion.lr * 1.0001
        assert suggestion.lr <= suggestion.interval[1] * 1.0001 <= 1e-1 * 1.001


@given(st.floats(0.1, 10), st.floats(1e-3, 1e3))
def test_rules_have_no_unit(stretch, scale):
    for rule in RULES.values():
        assert rule(LRS * stretch, VALLEY * scale).lr == pytest.approx(stretch * rule(LRS, VALLEY).lr, rel=1e-6)


def test_several_tests_are_combined():
    some = [Suggestion(lr, "here", (lr / 2, lr * 2)) for lr in (1e-4, 1e-3, 1e-2)]
    both = combine([*some, Suggestion(None, "none")])
    assert both.lr == pytest.approx(1e-3)
    assert both.interval == pytest.approx((5e-5, 2e-2))
    assert combine(some[:1]) == some[0]
    assert combine([some[0], Suggestion(None, "why not", is_noise=True)]) == Suggestion(None, "why not", is_noise=True)
    assert combine([]).lr is None


def test_rules_that_disagree_say_so():
    near = {"steepest": Suggestion(1e-4, ""), "valley": Suggestion(2.9e-4, ""), "minimum_tenth": Suggestion(None, "")}
    assert disagreement(near) is None
    assert disagreement({"steepest": Suggestion(1e-4, "")}) is None
    far = disagreement(near | {"minimum_tenth": Suggestion(1e-3, "")})
    assert far.startswith("The rules disagree: minimum_tenth suggests 0.001, steepest 0.0001, 10.0 times less.")


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"start_lr": 1e-2, "end_lr": 1e-3}, ["--start_lr 0.01 is not below --end_lr 0.001"]),
        ({"start_lr": 1e-3, "end_lr": 1e-3}, ["--start_lr 0.001 is not below"]),
        ({"start_lr": 1.0}, ["--start_lr 1 is not below --end_lr 0.01"]),
        ({"start_lr": 0.0}, ["--start_lr 0.0: must be"]),
        ({"end_lr": math.inf}, ["--end_lr inf: must be"]),
        ({"num_updates": 9}, ["--num_updates 9: must be a whole number in [10, 1e6]"]),
        ({"repeats": 0}, ["--repeats 0", "in [1, 10000]"]),
        ({"probe_size": 4}, ["--probe_size 4", "in [8, 1e7]"]),
        ({"probe_size": 32, "mode": "classic"}, ["--probe_size 32 has no effect without --mode probe"]),
        ({"stop_factor": 1.0}, ["--stop_factor 1.0", "in (1, 1e308]"]),
        ({"stop_factor": math.nan}, ["--stop_factor nan"]),
    ],
    ids=str,
)
def test_settings_that_cannot_be(options, parts):
    with pytest.raises(LabError) as told:
        resolve_settings(FinderConfig(**options), "adamw")
    for part in parts:
        assert part in str(told.value)


def test_the_range_follows_the_optimizer():
    assert resolve_settings(FinderConfig(), "adamw").start_lr == 1e-7
    assert resolve_settings(FinderConfig(), "sgd:momentum=0.8").end_lr == pytest.approx(1.0)
    with pytest.raises(LabError, match="'prodigy' finds its learning rate by itself"):
        resolve_settings(FinderConfig(), "prodigy")
    with pytest.raises(LabError, match=r"settings=.* of find_lr\(\): must be a FinderConfig or None, got "):
        find_lr(TrainingConfig(**POINTS), {"num_updates": 20})


def test_rates_are_spaced_evenly():
    lrs = FinderConfig(start_lr=1e-7, end_lr=1e-2, num_updates=11, extend=False).lrs()
    np.testing.assert_allclose(lrs, 10 ** np.linspace(-7, -2, 11))
    assert FinderConfig(start_lr=1e-7, end_lr=1e-2, num_updates=11).lrs()[-1] == pytest.approx(1.0)


# --- trainers --------------------------------------------------------------------------------------------------------

POINTS = {
    **{"dataset_name": "moons", "max_train_steps": 18, "train_batch_size": 32, "num_validation_images": 64},
    **{"ddpm_num_steps": 20, "num_inference_steps": 2, "output_dir": "run", "validation_steps": 8},
}
MLP = {"dimension": 2, "hidden_size": 64, "num_layers": 1, "embedding_size": 16}
DATA = {}


def make_trainer(folder, model=None, **options):
    config = resolve_config(TrainingConfig(**{**POINTS, **options}))
    source = config.dataset_name or config.train_data_dir
    if source not in DATA:
        DATA[source] = kind_of(config).load_data(config, 1)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=config.gradient_accumulation_steps)
    plan = make_plan(config, DATA[source], model or MLP)
    return Trainer(plan, DATA[source], accelerator, RunFolder(folder))


CASES = {
    name: {"optimizer": name}
    for name, entry in OPTIMIZERS.items()
    if is_installed(name) and "learning_rate" not in entry.facts
}
CASES["schedulefree_adamw"] = {**CASES.get("schedulefree_adamw", {}), "use_ema": False, "lr_scheduler": "constant"}
CASES |= {
    "accumulation": {"gradient_accumulation_steps": 2, "train_batch_size": 16},
    "follows losses": {"timestep_sampler": "loss_second_moment:history=1", "loss_weighting": "learned_log_variance"},
    "bands and momentum": {"timestep_lr": "banded:factors=[1|2]", "lr_scheduler": "mdlrc"},
    "feedback": {"lr_scheduler": "reduce_lr_on_plateau:patience=0"},
    "images with dropout": {"optimizer": "adamw", "noise": "offset", "dataset_name": "digits"},
}
DIGITS = runs.TINY_UNET | {"dropout": 0.2}


FIRST = [
    ("adamw", "classic"),
    ("follows losses", "probe"),
    ("bands and momentum", "probe"),
    ("images with dropout", "probe"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), FIRST)
def test_everything_is_as_it_was(tmp_path, name, mode):
    """In the middle of a run, too; and the run goes on as if nothing had been."""
    assert_found_and_left(tmp_path, name, mode)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"), [case for case in itertools.product(CASES, ["probe", "classic"]) if case not in FIRST]
)
def test_everything_is_as_it_was_of_all_others(tmp_path, name, mode):
    assert_found_and_left(tmp_path, name, mode)


def assert_found_and_left(tmp_path, name, mode):
    options = dict(CASES[name])
    model = None
    if options.get("dataset_name") == "digits":
        model = {key: value for key, value in DIGITS.items() if key != "_class_name"}
        options |= {"distance_samples": 0, "ddpm_num_steps": 20}
    trainers = [make_trainer(tmp_path / str(number), model, **options) for number in range(2)]
    for trainer in trainers:
        torch.manual_seed(0)  # of dropout, which draws from the one generator of this process
        updates = trainer.updates(show_progress=False)
        for _ in range(10):
            next(updates)
        trainer.rest = updates
    before = state_of(trainers[0])
    result = find_lr_of(
        trainers[0], FinderConfig(mode=mode, **(QUICK | {"probe_size": None} if mode == "classic" else QUICK))
    )
    assert len(result.sweeps) == 2
    assert np.isfinite(result.sweeps[0].losses[0])
    assert_same(state_of(trainers[0]), before)
    for trainer in trainers:
        torch.manual_seed(1)
        for _ in trainer.rest:
            pass
    assert_same(state_of(trainers[0])["model"], state_of(trainers[1])["model"])
    assert_same(state_of(trainers[0])["optimizer"], state_of(trainers[1])["optimizer"])
    ours, others = (runs.read_metrics(trainer.folder.path) for trainer in trainers)
    assert ours == others


def test_an_exception_changes_nothing_either(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    before, calls = state_of(trainer), []
    do_update = trainer.do_update

    def fails(images):
        calls.append(1)
        if len(calls) == 15:
            raise KeyboardInterrupt
        return do_update(images)

    monkeypatch.setattr(trainer, "do_update", fails)
    with pytest.raises(KeyboardInterrupt):
        range_test(trainer, resolve_settings(FinderConfig(**QUICK), "adamw"))
    assert_same(state_of(trainer), before)


def test_a_rate_that_is_too_high_ends_the_test(tmp_path):
    trainer = make_trainer(tmp_path, optimizer="sgd", max_grad_norm=0.0)
    settings = resolve_settings(FinderConfig(start_lr=1e-3, end_lr=1e6, num_updates=60), "sgd")
    sweep = range_test(trainer, settings)
    assert sweep.num_updates < 60
    assert "times its minimum" in sweep.ended or "not finite" in sweep.ended
    assert len(sweep.lrs) == len(sweep.losses) == len(sweep.bins)


def test_it_goes_on_while_the_loss_falls(tmp_path):
    trainer = make_trainer(tmp_path)
    short = {"start_lr": 1e-6, "end_lr": 1e-4, "num_updates": 40, "probe_size": 32}
    assert range_test(trainer, FinderConfig(**short, extend=False)).lrs[-1] == pytest.approx(1e-4)
    longer = range_test(trainer, FinderConfig(**short))
    assert 1e-4 < longer.lrs[-1] <= 1.01e-2


def test_tests_repeat_and_differ(tmp_path):
    trainer = make_trainer(tmp_path)
    settings = resolve_settings(FinderConfig(**QUICK), "adamw")
    one, again, other = (range_test(trainer, settings, repeat) for repeat in (0, 0, 1))
    np.testing.assert_array_equal(one.losses, again.losses)
    np.testing.assert_array_equal(one.bins, again.bins)
    assert not np.array_equal(one.losses[1:], other.losses[1:])
    assert one.losses[0] == other.losses[0]  # the probe is fixed, and the weights are those of the trainer
    assert one.losses[0] == pytest.approx(one.bins[0].mean(), rel=0.05)


def test_classic_reads_what_was_trained_on(tmp_path):
    trainer = make_trainer(tmp_path)
    settings = resolve_settings(FinderConfig(mode="classic", **QUICK | {"probe_size": None}), "adamw")
    classic = range_test(trainer, settings)
    assert len(classic.losses) >= 24
    assert classic.bins.shape == (len(classic.losses), 0)
    assert np.abs(np.diff(classic.losses[:8])).max() > 1e-3  # single batches, each with its own noise


def test_timesteps_are_spread_and_noise_comes_in_pairs(tmp_path, monkeypatch):
    trainer, seen = make_trainer(tmp_path), []
    add_noise = trainer.run.process.scheduler.add_noise
    monkeypatch.setattr(
        trainer.run.process.scheduler,
        "add_noise",
        lambda images, noise, timesteps: seen.append((noise, timesteps)) or add_noise(images, noise, timesteps),
    )
    range_test(trainer, resolve_settings(FinderConfig(**QUICK), "adamw"))
    batches = [pair for pair in seen if len(pair[1]) == 32 and pair[1].unique().numel() > 1][2:]
    noise, timesteps = next((n, t) for n, t in batches if torch.equal(n[:16], -n[16:]))
    np.testing.assert_array_equal(np.bincount(timesteps.numpy(), minlength=20) >= 1, True)
    assert not torch.equal(noise[0], noise[1])


@pytest.mark.parametrize("mode", ["probe", "classic"])
def test_no_data_at_all(tmp_path, mode):
    result = find_lr_of(make_trainer(tmp_path), FinderConfig(mode=mode), [])
    assert result.suggestion.lr is None
    assert "The data ended after 0 of 200 updates" in result.describe()
    result.save(tmp_path / "lrlab")


def test_an_update_that_is_cut_short_leaves_no_count_of_micro_batches(tmp_path):
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=2, train_batch_size=16)
    with pytest.raises(RuntimeError):
        find_lr_of(trainer, FinderConfig(probe_size=32), [Batch(torch.randn(16, 2))])
    other = make_trainer(tmp_path / "other", gradient_accumulation_steps=2, train_batch_size=16)
    for one in (trainer, other):
        for _ in itertools.islice(one.updates(show_progress=False), 3):
            pass
    assert_same(state_of(trainer)["model"], state_of(other)["model"])


def test_bands_take_turns_at_their_own_rates(tmp_path, monkeypatch):
    trainer, seen = make_trainer(tmp_path, timestep_lr="banded:factors=[1|3]"), []
    do_update = trainer.do_update

    def watched(images):
        seen.append((trainer.run.objective.draw(trainer.run.update), trainer.run.optimizer.param_groups[0]["lr"]))
        return do_update(images)

    monkeypatch.setattr(trainer, "do_update", watched)
    settings = FinderConfig(start_lr=1e-4, end_lr=1.0001e-4, num_updates=10, probe_size=32, extend=False)
    range_test(trainer, settings)
    (one, one_lr), (other, other_lr) = sorted(seen[:2], key=lambda pair: pair[1])
    assert (one < 10).all() != (other < 10).all()
    assert other_lr == pytest.approx(3 * one_lr, rel=1e-3)


def test_skipped_fp16_updates_are_done_again(tmp_path, monkeypatch):
    trainer, calls = make_trainer(tmp_path), []
    do_update = trainer.do_update
    monkeypatch.setattr(trainer, "do_update", lambda images: calls.append(1) or (len(calls) % 3 == 0 and do_update(images)))
    sweep = range_test(trainer, resolve_settings(FinderConfig(mode="classic", num_updates=10, extend=False), "adamw"))
    assert len(calls) == 30
    assert (sweep.losses > 0).all()


def test_the_shortest_test_has_readings_enough(tmp_path):
    short = FinderConfig(start_lr=1e-6, end_lr=1e-2, num_updates=10, probe_size=32, extend=False)
    assert len(range_test(make_trainer(tmp_path), short).losses) >= 8


@pytest.mark.parametrize("streaming", [False, True])
def test_each_test_has_other_batches(tmp_path, monkeypatch, streaming):
    datasets.Dataset.from_dict({"x": [[float(n), 0.0] for n in range(200)]}).to_parquet(str(tmp_path / "data.parquet"))
    trainer = make_trainer(
        tmp_path / "run",
        **{"dataset_name": None, "train_data_dir": str(tmp_path), "data_kind": "points", "streaming": streaming},
        **{"train_batch_size": 4, "num_validation_images": 20},
    )
    seen = []
    monkeypatch.setattr(
        range_tests, "do_one_update", lambda _, batch: seen.append(sorted(batch.data[:, 0].tolist())) or True
    )
    settings = FinderConfig(start_lr=1e-6, end_lr=1e-4, num_updates=10, repeats=3, probe_size=8, extend=False)
    for repeat in range(3):
        range_test(trainer, settings, repeat=repeat)
    assert len({str(batch) for batch in seen}) == len(seen) == 30


def test_data_that_end_early_are_used_as_far_as_they_go(tmp_path):
    trainer = make_trainer(tmp_path)
    batches = [Batch(torch.randn(32, 2)) for _ in range(13)]
    result = find_lr_of(trainer, FinderConfig(num_updates=40, probe_size=32), batches)
    (sweep,) = result.sweeps
    assert sweep.num_updates == 13
    assert sweep.ended.startswith("the data ended after 13 of 40 updates")
    assert "The data ended after 13 of 40 updates" in result.describe()


def test_data_that_end_with_the_test_are_not_complained_of(tmp_path):
    """Though the test would have gone on beyond the highest rate."""
    batches = [Batch(torch.randn(32, 2)) for _ in range(40)]
    settings = FinderConfig(start_lr=1e-6, end_lr=1e-4, num_updates=40, probe_size=32)
    (sweep,) = find_lr_of(make_trainer(tmp_path), settings, batches).sweeps
    assert (sweep.num_updates, sweep.ended) == (40, None)


def test_a_loss_that_is_not_finite_from_the_start(tmp_path):
    trainer = make_trainer(tmp_path)
    with torch.no_grad():
        trainer.run.model.output.weight.fill_(math.nan)
    before = state_of(trainer)
    with pytest.raises(LabError, match="returns predictions that are not finite .* before the first update"):
        find_lr_of(trainer, FinderConfig(**QUICK))
    assert_same(state_of(trainer), before)


def test_a_model_without_parameters_to_train(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.run.model.requires_grad_(False)
    with pytest.raises(LabError, match="no parameter that is trained"):
        range_test(trainer, resolve_settings(FinderConfig(), "adamw"))


@pytest.mark.slow
@pytest.mark.pictures
def test_from_python(tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    result = find_lr(TrainingConfig(**POINTS), FinderConfig(**QUICK))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert result.about["optimizer"] == "adamw"
    call = result.about["command"]
    assert eval(call, {"find_lr": lambda *given: given, "TrainingConfig": TrainingConfig, "FinderConfig": FinderConfig}) == (
        TrainingConfig(**POINTS),
        FinderConfig(**QUICK),
    )
    assert list(result.suggestions) == list(RULES)
    result.save(str(tmp_path))
    found = json.loads((tmp_path / "lr_finder.json").read_text())
    assert len(found["sweeps"]) == 2
    assert len(found["sweeps"][0]["losses_by_noise"][0]) == 4
    assert (tmp_path / "lr_finder.png").stat().st_size > 10_000
    found = {**result.suggestions, "valley": result.suggestions["valley"]._replace(lr=0.00123)}
    result = dataclasses.replace(result, suggestions=found)
    assert re.fullmatch(r"FinderResult\(.*valley=0\.0012, rule='minimum_tenth'\)", repr(result))
    shown = result._repr_html_()
    assert base64.b64decode(re.search(r'src="data:image/png;base64,([^"]*)"', shown)[1]).startswith(b"\x89PNG")
    assert "valley=0.0012" in re.search(r'alt="([^"]*)"', shown)[1]
    assert html.escape(result.describe()) in shown


def test_errors_from_python_name_the_argument():
    with pytest.raises(LabError, match=r"^repeats=0: must be"):
        find_lr(TrainingConfig(**POINTS), FinderConfig(repeats=0))
    with pytest.raises(LabError, match=r"repeats='3' of FinderConfig\(\): must be a whole number, got '3'"):
        find_lr(TrainingConfig(**POINTS), FinderConfig(repeats="3"))
    with pytest.raises(LabError, match=r"^train_batch_size=0: must be"):
        find_lr(TrainingConfig(**{**POINTS, "train_batch_size": 0}))


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def auto(tmp_path_factory):
    """The finder by its script, a run that takes its rate by itself, and one that is given this rate."""
    base = tmp_path_factory.mktemp("auto")
    (base / "mlp").mkdir()
    (base / "mlp" / "config.json").write_text(json.dumps({"_class_name": "MLPDenoiser", **MLP}))
    options = ["--dataset_name=moons", "--train_batch_size=64", f"--model_config_name_or_path={base}/mlp"]
    options += ["--num_validation_images=200", "--distance_samples=200", "--eval_batch_size=50", "--ddpm_num_steps=20"]
    options += ["--num_inference_steps=20"]
    status, shown, message = started.run(FIND_LR, *options, f"--output_dir={base}/found", env=runs.environment())
    assert status == 0, message
    train = [*options, "--max_train_steps=20", "--logging_steps=1", "--checkpointing_steps=10"]
    told = started.run(runs.SCRIPT, *train, "--learning_rate=auto", f"--output_dir={base}/auto", env=runs.environment())
    assert told[0] == 0, told[2]
    lr = runs.read_record(base / "auto")["config"]["learning_rate"]
    runs.run(*train, f"--learning_rate={lr!r}", f"--output_dir={base}/given")
    runs.run(*train, f"--learning_rate={lr!r}", f"--output_dir={base}/found")
    runs.run(*train, "--learning_rate=auto", f"--output_dir={base}/auto", "--resume_from_checkpoint=checkpoint-10")
    return base, shown, told[1], lr


@pytest.mark.slow
def test_of_a_recipe_it_says_what_has_no_effect_and_what_a_killed_one_left_is_gone(tmp_path):
    left = [tmp_path / "run" / ".tmp-lrlab-7-run.json", tmp_path / "run" / "lrlab" / ".tmp-lrlab-7-lr_finder.json"]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    options = ["--lr_scheduler=rex", "--no_use_ema", "--dataset_name=moons", f"--output_dir={tmp_path}/run"]
    options += ["--num_updates=10", "--repeats=1", "--train_batch_size=16", "--num_validation_images=20"]
    status, _, told = started.run(FIND_LR, *options, env=runs.environment())
    assert status == 0, told
    assert "Options that affect the run and not the finder: " in told
    assert set(told.partition("not the finder: ")[2].partition(".")[0].split(", ")) == {"--lr_scheduler", "--use_ema"}
    assert not any(path.exists() for path in left)


OTHERS = {
    **{
        "data": {"dataset_name": "circle"},
        "prediction": {"prediction_type": "v_prediction"},
        "batch": {"train_batch_size": 8},
    },
    **{"optimizer": {"optimizer": "adamw:beta2=0.9"}, "timesteps": {"timestep_sampler": "clts"}, "same": {}},
}


def test_a_result_is_of_its_run_alone(tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)
    options = {**POINTS, "output_dir": str(tmp_path)}
    find_lr_for_folder(TrainingConfig(**options), FinderConfig(**{**QUICK, "repeats": 1}))
    for name, other in OTHERS.items():
        plan = make_trainer(tmp_path, {"dimension": 2}, **other).run.plan
        assert (read_saved_result(tmp_path, plan) is not None) == (name == "same"), name


def test_a_narrow_range_goes_on_for_as_long_again():
    config = FinderConfig(start_lr=1e-3, end_lr=2e-3, num_updates=50)
    assert len(config.lrs()) == 100


@pytest.mark.slow
def test_the_script_says_what_it_found(auto):
    base, shown, _, lr = auto
    assert "minimum_tenth" in shown
    found = json.loads((base / "found/lrlab/lr_finder.json").read_text())
    assert found["learning_rate"] == lr
    assert f"{lr:.2g}" in shown


@pytest.mark.slow
def test_auto_takes_what_the_script_finds_and_says_why(auto):
    _, _, told, lr = auto
    assert f"Learning rate {lr:g}, as the finder suggests." in told
    assert "a tenth of" in told


@pytest.mark.slow
def test_a_run_after_the_finder_is_one_without_it(auto):
    base, *_ = auto
    weights = "denoiser/diffusion_pytorch_model.safetensors"
    auto, given, found = ((base / name / weights).read_bytes() for name in ("auto", "given", "found"))
    assert auto == given == found
    rows = [runs.read_metrics(base / name)[0] for name in ("auto", "given")]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]


@pytest.mark.slow
def test_the_cards_mention_it(auto):
    base, *_ = auto
    for name in ("auto", "found"):
        card = (base / name / "README.md").read_text()
        assert "The finder's test before the run (`minimum_tenth`, 3 times" in card
        assert "lrlab/lr_finder.png" in card
        assert (base / name / "lrlab/lr_finder.png").exists()
    assert "finder" not in (base / "given/README.md").read_text()


@pytest.mark.parametrize(
    ("script", "arguments", "parts"),
    [
        (
            runs.SCRIPT,
            ["--learning_rate=quick"],
            ["--learning_rate: must be a number, such as 1e-4, or auto, got 'quick'"],
        ),
        (runs.SCRIPT, ["--learning_rate=auto", "--optimizer=prodigy"], ["'prodigy' finds its learning rate by itself"]),
        (FIND_LR, ["--overwrite_output_dir"], ["--overwrite_output_dir is for training"]),
        (FIND_LR, ["--scale_lr=sqrt"], ["--scale_lr is for training"]),
        (FIND_LR, ["--start_lr=1"], ["--start_lr 1 is not below --end_lr 0.01"]),
        (FIND_LR, ["--start_lr=8e-3"], ["--end_lr 0.01 is too close to --start_lr 0.008", "at least 2 times"]),
        (FIND_LR, ["--stop_factor=inf"], ["--stop_factor inf: must be a number in (1, 1e308]"]),
        (runs.SCRIPT, ["--scale_lr=sqrt", "--optimizer=prodigy"], ["'prodigy' finds its learning rate by itself"]),
        (FIND_LR, ["--mode=quick"], ["--mode: must be one of 'probe', 'classic', got 'quick'"]),
        (FIND_LR, ["--num_update=3"], ["Unknown argument '--num_update=3'", "--num_updates"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else Path(value).stem,
)
def test_wrong_input(tmp_path, monkeypatch, script, arguments, parts):
    monkeypatch.chdir(tmp_path)
    status, _, told = started.run(script, *arguments, env=runs.environment())
    assert status == 2
    assert "Traceback" not in told
    for part in parts:
        assert part in told


@pytest.mark.slow
def test_two_processes_find_what_one_finds_and_are_as_they_were(tmp_path):
    """With accumulation, in the middle of a run."""
    (tmp_path / "mlp").mkdir()
    (tmp_path / "mlp" / "config.json").write_text(json.dumps({"_class_name": "MLPDenoiser", **MLP}))
    options = ["--dataset_name=moons", "--gradient_accumulation_steps=2", f"--model_config_name_or_path={tmp_path}/mlp"]
    options += ["--num_validation_images=100", "--validation_steps=1", "--max_train_steps=10"]
    found = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        arguments = [folder, *options, f"--train_batch_size={32 // processes}", f"--output_dir={folder}"]
        if processes == 1:
            status, _, told = started.run(DRIVER, *arguments, env=runs.environment())
        else:
            status, _, told = started.run_ranks(DRIVER, *arguments, processes=2, env=runs.environment())
        assert status == 0, told
        found.append(np.array(json.loads((folder / "losses.json").read_text())))
    np.testing.assert_allclose(*found, rtol=1e-3)
