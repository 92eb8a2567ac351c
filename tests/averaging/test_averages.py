"""Averages of the weights against their definitions."""

import numpy as np
import pytest
import torch
from diffusers.training_utils import EMAModel
from tables import cases

from diffusers_lrlab import LabError, TrainingConfig
from diffusers_lrlab.averaging.averages import EMA
from diffusers_lrlab.averaging.forms import EMA_FORMS, EMAForm
from diffusers_lrlab.training.resolve import resolve_config


def form_of(spec):
    """Some forms count images, as a run does that knows those of its updates."""
    return EMAForm.of(spec).with_images(64)


def test_the_decay_follows_the_clock_and_the_average_the_decay():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    average = EMA([weight], form_of("warmup_power:max_decay=0.8,inv_gamma=2,power=0.75,start_update=1,update_every=2"))
    expected = weight.detach().clone()
    for update in range(1, 20):
        with torch.no_grad():
            weight.fill_(update)
        average.advance(update)
        if update % 2 == 0:
            decay = min(0.8, 1 - (1 + (update - 2) / 2.0) ** -0.75)
            expected = decay * expected + (1 - decay) * update
            assert average.decay == pytest.approx(decay)
    with average.swapped_in():
        torch.testing.assert_close(weight.detach(), expected)
    assert (weight == 19).all()


OF_DIFFUSERS = {
    "warmup_power": {"use_ema_warmup": True, "power": 3 / 4},
    "warmup_power:inv_gamma=2,power=0.9,max_decay=0.7,min_decay=0.4,update_after_step=5": {
        "use_ema_warmup": True,
        **{"inv_gamma": 2.0, "power": 0.9, "decay": 0.7, "min_decay": 0.4, "update_after_step": 5},
    },
    "constant:decay=0.9": {"decay": 0.9, "min_decay": 0.9},
}


@cases(("spec", "options"), OF_DIFFUSERS.items())
def test_what_diffusers_has_is_the_same_to_the_bit(spec, options):
    weights = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(4))]
    ours, theirs = EMA(weights, EMAForm.of(spec)), EMAModel(weights, foreach=True, **options)
    for update in range(1, 31):
        with torch.no_grad():
            for weight in weights:
                weight += torch.randn_like(weight)
        ours.advance(update)
        theirs.step(weights)
        assert ours.decay == theirs.cur_decay_value
        assert all(map(torch.equal, ours.shadow_params, theirs.shadow_params))


@cases(("start", "every"), [(0, 1), (0, 3), (6, 1)])
def test_a_power_function_weighs_updates_by_its_profile(start, every):
    """The weight of the n-th of N updates is (n/N)^(gamma + 1) - ((n-1)/N)^(gamma + 1)."""
    form = EMAForm.of(f"power_function:gamma=2.5,start_update={start},update_every={every}")
    weight = torch.nn.Parameter(torch.full((), torch.nan, dtype=torch.float64))
    average = EMA([weight], form)
    average.shadow_params[0].zero_()
    values = np.random.default_rng(0).normal(size=24)
    expected = 0.0
    for update in range(every, 25, every):
        weight.data.fill_(values[update - 1])
        average.advance(update)
        if update > start:
            upper, lower = (update - start) / (24 - start), (update - start - every) / (24 - start)
            expected += (upper**3.5 - lower**3.5) * values[update - 1]
    assert average.shadow_params[0].item() == pytest.approx(expected, rel=1e-12)


def test_a_power_function_has_a_width_of_a_tenth_unless_it_is_given():
    assert EMAForm.of("power_function").decay(10) == EMAForm.of("power_function:sigma_rel=0.1").decay(10)


@cases("spec", EMA_FORMS)
def test_decays_of_a_run_are_those_of_its_updates(spec):
    form = form_of(f"{spec}:start_update=4,update_every=2")
    expected = [form.decay(update) if update % 2 == 0 else 1.0 for update in range(1, 50)]
    np.testing.assert_allclose(form.decays(49), expected)


def test_a_half_life_in_images_is_that_of_edm():
    """Its training loop, in float64: images are counted before the update, and the first average is a copy."""
    images, rampup, batch = 3000.0, 0.05, 16
    form = EMAForm.of("half_life", images=images, rampup=rampup).with_images(batch)
    so_far, found = 0, []
    for _ in range(10_000):
        half_life = min(images, so_far * rampup)
        found.append(0.5 ** (batch / max(half_life, 1e-8)))
        so_far += batch
    np.testing.assert_allclose(form.decays(10_000), found, rtol=1e-12)
    assert found[-1] == pytest.approx(0.5 ** (16 / 3000))


@cases("batch", (1, 4, 16))
def test_a_half_life_in_images_is_the_same_for_all_batches(batch):
    """Of the first weights, half are left after each half-life."""
    every, half_life = 3, 960
    form = EMAForm.of("half_life", images=half_life, rampup=1e9, update_every=every).with_images(batch)
    decays = form.decays(1 + every * 1920 // batch)[every:]
    averaged = (decays < 1).sum() * every * batch
    assert np.prod(decays) == pytest.approx(0.5 ** (averaged / half_life))


def test_a_half_life_needs_the_images_of_an_update():
    with pytest.raises(LabError, match=r"images=1000 without images_per_update. Add images_per_update=N"):
        EMAForm.of("half_life:images=1000").decay(5)
    form = EMAForm.of("half_life:images=1000,images_per_update=8")
    assert form.with_images(4) is form


WRONG = {
    "warmup_power:min_decay=0.9,max_decay=0.5": "is above max_decay=0.5",
    "power_function:gamma=3,sigma_rel=0.1": "Drop one",
    "posthoc:sigma_rels=[0.1|0.1]": "one or more different widths",
    "posthoc:sigma_rels=[0.1|0.3]": r"numbers in \[1e-5, 0.2886\]",
}


@cases(("spec", "reason"), WRONG.items())
def test_wrong_forms_are_refused(spec, reason):
    with pytest.raises(LabError, match=reason):
        EMAForm.of(spec)


def test_a_run_takes_a_form_in_place_of_the_options_of_the_usual_one():
    assert str(resolve_config(TrainingConfig()).ema_form) == str(EMAForm.of("warmup_power"))
    asked = TrainingConfig(ema="constant:decay=0.5")
    resolved = resolve_config(asked)
    assert resolved.ema == "constant:decay=0.5,start_update=0,update_every=1"
    assert resolved.ema_form.decay(7) == 0.5
    for both, reason in (
        ({"ema": "constant", "ema_power": 0.5}, "--ema_power 0.5 has no effect with --ema"),
        ({"ema": "constant", "use_ema": False}, "--ema .constant.* has no effect without --use_ema"),
        ({"ema": "constantly"}, "Unknown EMA form"),
    ):
        with pytest.raises(LabError, match=reason):
            resolve_config(TrainingConfig(**both))
