"""`splice`, and the curves of extended and branched runs, as tables."""

import numpy as np
import pytest

from diffusers_lrlab import Progress, lr_curve
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.schedules.continued import (
    RunCurve,
    agreeing_updates,
    cooled_down,
    followed_by,
    is_on_plateau,
    last_update_on_plateau,
    rewarmed,
    rewound,
)
from diffusers_lrlab.schedules.registries import COOLDOWNS, SCHEDULERS
from diffusers_lrlab.schedules.resolve import resolve_schedule

BASE, WARMUP, TOTAL = 1e-3, 5, 100
CURVES = {name: {} for name, entry in SCHEDULERS.items() if not {"feedback", "momentum"} & entry.traits} | {
    "one_cycle": {"cycle_momentum": False},
    "rex": {"min_lr": BASE / 10, "warmup_type": "cosine"},
    "cosine_annealing": {"min_lr_ratio": 0.2, "warmup_start_ratio": 0.3},
    "join": {"schedules": ["constant", "cosine"], "boundaries": [50]},
}


def curve(name, kwargs=None, warmup=WARMUP, num_updates=TOTAL):
    warmup = 0 if "no_warmup" in SCHEDULERS[name].traits else warmup
    return RunCurve(resolve_schedule(name, kwargs), BASE, 0.9, warmup, num_updates)


def test_a_part_is_written_without_its_defaults():
    for name, kwargs, text in (("cosine", {"num_cycles": 0.5}, "cosine"), ("rex", {"d": 0.9}, "rex:d=0.9")):
        assert rewound(curve(name, kwargs), 2 * TOTAL, TOTAL // 2).schedule.kwargs["schedules"] == [text, text]


def splice(**kwargs):
    return lr_curve("splice", 1.0, 2, 12, kwargs)


def test_parts_on_their_own_clocks_and_on_those_of_whole_runs():
    short, long = (lr_curve("cosine", 1.0, 2, num) for num in (8, 12))
    kwargs = {"schedules": ["cosine", "linear", "cosine"], "boundaries": [4, 6], "lengths": [8, 0, 12]}
    assert splice(**kwargs).tolist() == [*short[:4], 1.0, 0.5, *long[6:]]
    scaled = splice(**kwargs, scales=[1, 0.5, 0.1])
    assert scaled[4:].tolist() == [0.5, 0.25, *(0.1 * long[6:])]


def test_without_lengths_it_is_a_join_with_a_warm_up_of_the_first():
    kwargs = {"schedules": ["constant_with_warmup", "rex"], "boundaries": [6]}
    assert splice(**kwargs).tolist() == lr_curve("join", 1.0, 2, 12, kwargs).tolist()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"schedules": ["cosine"], "boundaries": [4]}, "splice got 1 schedules, 1 boundaries"),
        ({"schedules": ["cosine", "rex"], "boundaries": [4], "lengths": [8]}, "1 lengths"),
        ({"schedules": ["greedy", "rex"], "boundaries": [4]}, "splice cannot take 'greedy', which follows a metric"),
        ({"schedules": ["cosine:min_lr=0.1", "rex"], "boundaries": [4]}, "give min_lr_ratio there"),
        ({"schedules": ["hub:a/b", "rex"], "boundaries": [4]}, "which may change on the Hub"),
        (
            {"schedules": ["cosine", "rex"], "boundaries": [4], "lengths": [2, 0]},
            "shortest part with the 2 updates of warm-up has 2",
        ),
    ],
)
def test_refused(kwargs, message):
    with pytest.raises(LabError) as error:
        splice(**kwargs)
    assert message in str(error.value)


@pytest.mark.parametrize(("name", "kwargs"), CURVES.items(), ids=CURVES)
def test_every_curve_goes_on_as_it_began(name, kwargs):
    """Whatever follows, the rates so far are those that were applied; a re-warmed run ends on the longer curve."""
    before, longer = curve(name, kwargs), curve(name, kwargs, num_updates=2 * TOTAL)
    at, num = 60, 10
    others = [
        followed_by(before, 2 * TOTAL, at, "linear"),
        rewarmed(before, 2 * TOTAL, at, num),
        rewound(before, 2 * TOTAL, at),
    ]
    for other in others:
        np.testing.assert_allclose(other.lrs[:at], before.lrs[:at], rtol=1e-14)
        # One update at a time, as in training, is the same as all at once.
        some = [0, at - 1, at, at + num, 2 * TOTAL - 1]
        alone = [other.schedule.at(Progress(n, 2 * TOTAL, other.warmup_updates), BASE)[0] for n in some]
        np.testing.assert_allclose(alone, other.lrs[some], rtol=1e-15)
    assert others[0].lrs[at] == BASE
    np.testing.assert_allclose(others[1].lrs[at + num :], longer.lrs[at + num :], rtol=1e-14)
    np.testing.assert_allclose(others[2].lrs[at:], longer.lrs[at:], rtol=1e-14)
    rise = np.diff(others[1].lrs[at : at + num + 1])
    np.testing.assert_allclose(rise, rise[0], atol=1e-12)


@pytest.mark.parametrize(
    ("name", "kwargs", "equal"),
    [
        ("constant", {}, TOTAL),
        ("inverse_sqrt", {}, TOTAL),
        ("wsd", {"num_decay_steps": 20}, 81),  # a decay starts from the peak
        ("join", {"schedules": ["constant", "cosine"], "boundaries": [50]}, 51),
        ("cosine", {}, WARMUP + 1),
        ("step", {"step_size": 30}, TOTAL),
    ],
)
def test_how_far_two_lengths_agree(name, kwargs, equal):
    name = SCHEDULERS[name].name
    assert agreeing_updates(curve(name, kwargs), curve(name, kwargs, num_updates=2 * TOTAL)) == equal


def test_how_far_they_agree_within_a_tolerance():
    short, long = curve("cosine"), curve("cosine", num_updates=2 * TOTAL)
    near = agreeing_updates(short, long, 0.01)
    apart = np.abs(short.lrs - long.lrs[:TOTAL]) / BASE
    assert apart[:near].max() <= 0.01 < apart[near]


@pytest.mark.parametrize("decay", COOLDOWNS)
@pytest.mark.parametrize(
    ("name", "kwargs"), [("constant", {}), ("constant_with_warmup", {}), ("wsd", {"min_lr_ratio": 0.1})]
)
def test_a_branch_is_a_wsd(name, kwargs, decay):
    trunk = curve(SCHEDULERS[name].name, kwargs)
    new = cooled_down(trunk, 40, 10, decay)
    assert (new.schedule.name, new.num_updates) == ("warmup_stable_decay", 50)
    floor = kwargs.get("min_lr_ratio", 0.0)
    expected = floor + (1 - floor) * COOLDOWNS[decay](np.arange(10) / 10)
    assert new.lrs[:40].tolist() == trunk.lrs[:40].tolist()
    np.testing.assert_allclose(new.lrs[40:], BASE * expected, rtol=1e-12, atol=1e-18)


def test_plateaus():
    wsd = curve("warmup_stable_decay", {"num_decay_steps": 20})
    assert [update for update in range(1, TOTAL + 1) if is_on_plateau(wsd, update)] == [*range(7, 82)]
    assert last_update_on_plateau(wsd) == 81
    assert last_update_on_plateau(curve("cosine")) == 0
