"""`join` of any registered schedules, and `piecewise` and `multistep`: what begins where, and what cannot be joined."""

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from schedule_rows import BASE, close, cos, rows
from tables import cases

from diffusers_lrlab import get_scheduler, lr_curve
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.spec import format_spec, parse_spec
from diffusers_lrlab.schedules.registries import SCHEDULERS

TOTAL, WARMUP, BOUNDARY = 60, 6, 30
FRAME = ("min_lr", "eta_min", "lr_end", "warmup_type", "warmup_start_ratio")
# Every registered schedule of the learning rate and the clock alone, with each choice of each parameter.
PARTS = [row for row in rows("momentum") if not set(FRAME) & row.values[0].kwargs.keys()]


def join(schedules, boundaries, total=TOTAL, warmup=0, **kwargs):
    return lr_curve("join", BASE, warmup, total, {"schedules": schedules, "boundaries": boundaries, **kwargs})


def alone(spec, total):
    """The part as a run of its own; a floor in units of the learning rate is the whole's business."""
    name, kwargs = parse_spec(spec)
    if "min_lr" in SCHEDULERS[name].facts and "min_lr_ratio" not in kwargs:
        kwargs["min_lr"] = 0.0
    return BASE * lr_curve(name, 1.0, 0, total, kwargs)


@cases("row", PARTS)
def test_any_schedule_can_be_the_first_part_behind_the_warm_up_and_one_in_the_middle_at_a_smaller_scale(row):
    spec = format_spec(row.name, row.kwargs)
    lrs, first = join([spec, spec, "rex"], [20, 40], warmup=WARMUP, scales=[1.0, 0.5, 0.25]), alone(spec, 20 - WARMUP)
    close(lrs[WARMUP:], np.concatenate([first, 0.5 * alone(spec, 20), 0.25 * alone("rex", 20)]))
    top = BASE if row.has("early_peak") else first[0]  # which has begun to fall at its first update
    close(lrs[:WARMUP], top * np.arange(WARMUP) / WARMUP)


def test_one_cycle_without_its_momentum_is_a_part_like_others():
    spec = "one_cycle:cycle_momentum=false"
    close(join(["constant", spec], [BOUNDARY])[BOUNDARY:], alone(spec, TOTAL - BOUNDARY))


def test_boundaries_are_updates_or_fractions_of_the_run():
    parts = ["constant", "linear", "cosine"]
    expected = join(parts, [15, 45])
    np.testing.assert_array_equal(join(parts, [0.25, 0.75]), expected)
    np.testing.assert_array_equal(join(parts, [0.25, 45]), expected)


@given(st.integers(3, 300), st.data())
def test_each_part_has_a_clock_of_its_own(total, data):
    first = data.draw(st.integers(1, total - 2))
    second = data.draw(st.integers(first + 1, total - 1))
    lrs = lr_curve("join", 1.0, 0, total, {"schedules": ["linear", "cosine", "step"], "boundaries": [first, second]})
    n = np.arange(total)
    close(lrs[:first], 1 - n[:first] / first, scale=1)
    close(lrs[first:second], cos((n[first:second] - first) / (second - first)), scale=1)
    size = max(1, -((second - total) // 3))
    close(lrs[second:], 0.1 ** ((n[second:] - second) // size), scale=1)


def test_floors_of_the_whole_and_of_a_part():
    plain = join(["constant", "linear"], [BOUNDARY])
    close(join(["constant", "linear"], [BOUNDARY], min_lr=BASE / 4), BASE / 4 + 0.75 * plain)
    close(join(["constant", "linear:min_lr_ratio=0.25"], [BOUNDARY]), BASE / 4 + 0.75 * plain)
    close(join(["constant", "linear"], [BOUNDARY], min_lr_ratio=0.25), BASE / 4 + 0.75 * plain)


INNER = 'join:{"schedules": ["linear", "rex:d=0.9"], "boundaries": [15], "scales": [1.0, 0.5]}'


@cases(
    "text",
    [
        "join:schedules=[constant|join:schedules=[linear|rex:d=0.9],boundaries=[0.5],scales=[1|0.5]],boundaries=[30]",
        f"join:{json.dumps({'schedules': ['constant', INNER], 'boundaries': [0.5]})}",
    ],
)
def test_joins_nest_in_either_form(text):
    expected = np.concatenate([BASE * np.ones(30), alone("linear", 15), alone("rex:d=0.9", 15) / 2])
    close(lr_curve(text, BASE, 0, TOTAL), expected)


def test_a_part_is_evaluated_alone_or_within_an_array_alike():
    kwargs = {"schedules": ["linear", "cyclic", "piecewise", "multistep"], "boundaries": [13, 14, 50]}
    scheduler = get_scheduler("join", torch.optim.SGD([torch.zeros(1)], lr=BASE), 5, TOTAL, kwargs)
    close(scheduler.values(np.arange(80))[0], [float(scheduler.values(update)[0]) for update in range(80)])


@cases(
    ("kwargs", "message"),
    [
        ({"boundaries": []}, "join got 2 schedules, 0 boundaries and 2 scales. It takes one schedule or more, one boundary"),
        ({"schedules": ["linear"] * 3, "boundaries": [40, 20]}, "at the updates [40, 20]; they must increase"),
        ({"boundaries": [61]}, "boundaries at the updates [61]; they must increase and lie inside the run of 60"),
        ({"boundaries": [0.05]}, "boundaries at the updates [3]; the first must come after the 6 updates of warm-up"),
        ({"schedules": ["constant", "cosine:min_lr=1e-5"]}, "join cannot take min_lr inside 'cosine:min_lr=1e-5'"),
        ({"schedules": ["constant", "one_cycle"]}, "join cannot take 'one_cycle', which also sets the momentum"),
        ({"schedules": ["constant", "greedy"]}, "join cannot take 'greedy', which follows a metric"),
    ],
)
def test_joins_that_cannot_be(kwargs, message):
    with pytest.raises(LabError, match=re.escape(message)):
        join(**{"schedules": ["linear", "cosine"], "boundaries": [0.5], "warmup": WARMUP, **kwargs})


@cases(
    ("interpolation", "expected"),
    [
        ("linear", [0.2, 0.2, 0.2, 0.6, 1, 0.75, 0.5, 0.25, 0, 0]),
        ("cosine", [0.2, 0.2, 0.2, 0.6, 1, *cos([1 / 4, 1 / 2, 3 / 4]), 0, 0]),
        ("constant", [0.2, 0.2, 0.2, 0.2, 1, 1, 1, 1, 0, 0]),
    ],
)
@cases("updates", [[2, 4, 8], [0.2, 0.4, 0.8], [2, 0.4, 8]])
def test_piecewise_goes_through_its_points(interpolation, expected, updates):
    kwargs = {"updates": updates, "values": [0.2, 1.0, 0.0], "interpolation": interpolation}
    close(lr_curve("piecewise", BASE, 0, 10, kwargs), BASE * np.array(expected))


def test_piecewise_counts_from_the_start_of_the_run_and_warm_up_multiplies_it():
    kwargs = {"updates": [2, 6], "values": [1.0, 0.5], "min_lr": BASE / 10}
    shape = np.array([1, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.5])
    expected = (0.1 + 0.9 * shape) * np.minimum(np.arange(8) / 4, 1)
    close(lr_curve("piecewise", BASE, 4, 8, kwargs), BASE * expected)


@cases(("updates", "counts"), [([0, 1.0], [0, 8]), ([0.25, 1.0], [2, 8]), ([1, 8], [1, 8]), ([1], [1])])
def test_one_is_the_end_of_the_run_after_fractions_only(updates, counts):
    values = [1.0, 0.5][-len(counts) :]  # one point alone is a constant
    expected = BASE * np.interp(np.arange(8), counts, values)
    close(lr_curve("piecewise", BASE, 0, 8, {"updates": updates, "values": values}), expected)


@cases(
    ("updates", "message"),
    [
        ([1, 2, 3], "piecewise got 3 updates and 2 values; give equally many"),
        ([5, 5], r"piecewise has boundaries at the updates \[5, 5\]; they must increase"),
        ([2.5, 5], "A boundary of piecewise 2.5 is neither a whole number of updates"),
    ],
)
def test_piecewise_that_cannot_be(updates, message):
    with pytest.raises(LabError, match=message):
        lr_curve("piecewise", BASE, 0, 10, {"updates": updates, "values": [1.0, 0.5]})


def test_milestones_are_updates_of_the_run_or_fractions_in_any_order():
    expected = BASE * np.array([0, 0.25, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]) * [1, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    for milestones in ([4, 7], [0.7, 0.4], [4, 0.7]):
        close(lr_curve("multistep", BASE, 2, 10, {"milestones": milestones, "gamma": 0.5}), expected)
