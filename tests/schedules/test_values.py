"""Schedules as values: the value and the spec string are two spellings of one thing."""

import copy
import doctest
import json
import pickle
import re

import numpy as np
import printed
import pytest
import torch
import yaml
from diffusers.optimization import get_scheduler as get_diffusers_scheduler
from hypothesis import given
from hypothesis import strategies as st
from schedule_rows import BASE, rows
from tables import cases

import diffusers_lrlab
from diffusers_lrlab import Curve, Progress, get_scheduler, lr_curve, register_schedule, schedules
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.spec import format_spec, parse_spec
from diffusers_lrlab.schedules import constant, cosine, join, linear, rex, values
from diffusers_lrlab.schedules.registries import SCHEDULERS
from diffusers_lrlab.schedules.resolve import resolve_schedule

TOTAL, WARMUP = 60, 6
PURE = rows("momentum")


@cases("row", PURE)
def test_every_curve_of_the_clock_is_a_value_with_the_bits_of_its_spec_string(row):
    value, spec = getattr(schedules, row.name)(**row.kwargs), format_spec(row.name, row.kwargs)
    assert value == spec
    warmup = row.warmup(WARMUP)
    np.testing.assert_array_equal(lr_curve(value, BASE, warmup, TOTAL), lr_curve(spec, BASE, warmup, TOTAL))
    lrs = np.ones(TOTAL) * value(Progress(np.arange(TOTAL), TOTAL, warmup), lr=BASE)
    np.testing.assert_array_equal(lrs, lr_curve(row.name, BASE, warmup, TOTAL, row.kwargs))


SINGLE = st.one_of(
    st.builds(lambda d: rex(d=d), st.floats(0, 0.999)),
    st.builds(lambda cycles: cosine(cycles), st.floats(0.25, 3)),
    st.just(constant()),
    st.builds(lambda ratio: linear(min_lr_ratio=ratio), st.floats(0, 1)),
)


@given(st.lists(SINGLE, min_size=2, max_size=4), st.data())
def test_what_is_joined_is_each_part_on_its_own_clock(parts, data):
    edges = sorted(data.draw(st.sets(st.integers(1, TOTAL - 1), min_size=len(parts) - 1, max_size=len(parts) - 1)))
    whole = join(parts, boundaries=edges)
    found = whole(Progress(np.arange(TOTAL), TOTAL))
    for part, begin, end in zip(parts, [0, *edges], [*edges, TOTAL], strict=True):
        np.testing.assert_array_equal(found[begin:end], part(Progress(np.arange(end - begin), end - begin)))
    assert parse_spec(whole) == ("join", {"schedules": [*map(str, parts)], "boundaries": edges})
    nested = join([whole, rex()], boundaries=[0.5])
    np.testing.assert_array_equal(nested(Progress(np.arange(TOTAL), 2 * TOTAL)), found)


JOINED = "join:schedules=[constant|rex:d=0.9],boundaries=[0.5]"


@cases("get", [get_scheduler, get_diffusers_scheduler])
def test_schedulers_are_made_of_values(get):
    value = join([constant(), rex(d=0.9)], boundaries=[0.5])
    found = []
    for spec in (value, JOINED):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
        scheduler = get(spec, optimizer, num_warmup_steps=2, num_training_steps=10)
        lrs = []
        for _ in range(10):
            lrs += scheduler.get_last_lr()
            optimizer.step()
            scheduler.step()
        found.append((lrs, scheduler.state_dict()))
    assert found[0] == found[1]


@cases("again", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value)), Curve])
def test_values_travel(again):
    value = rex(d=0.9)
    assert again(value) == value
    assert again(value)(Progress(3, 4)) == value(Progress(3, 4))


@cases("dump", [json.dumps, yaml.safe_dump])
def test_values_are_written_as_their_spec_strings(dump):
    assert dump({"lr_scheduler": rex(d=0.9)}) == dump({"lr_scheduler": "rex:d=0.9"})


@cases(
    "make, expected",
    [
        (lambda: rex(d=2.0), "d=2.0 of 'rex': must be a number in [0, 1), got 2.0. Hint: "),
        (lambda: rex("0.5"), "d='0.5' of rex(): must be a number, got '0.5' (str)"),
        (lambda: schedules.mdlrc(), "'mdlrc' is not a function of the clock alone: it also sets the momentum"),
        (lambda: schedules.greedy(), "'greedy' is not a function of the clock alone: it follows a metric"),
        (
            lambda: Curve("reduce_lr_on_plateau"),
            "is not a function of the clock alone: it follows a metric",
        ),
        (lambda: Curve(0.9), "spec=0.9 of Curve(): must be a text, got 0.9 (float). Hint: give a name or a spec string"),
        (lambda: rex()(50), "progress=50 of Curve(): must be a Progress, got 50"),
        (lambda: Curve("rexx"), "Did you mean 'rex'?"),
        (lambda: join([constant(), "mdlrc"], [0.5])(Progress(9, 10)), "join cannot take 'mdlrc'"),
    ],
)
def test_what_is_no_value(make, expected):
    with pytest.raises(LabError, match=re.escape(expected)):
        make()


@pytest.mark.parametrize(
    ("parts", "boundaries", "message"), [([], [], "schedules"), (["rex:d=5"], [], "d=5 of 'rex'"), (["rexx"], [], "'rexx'")]
)
def test_a_join_says_at_once_what_is_wrong_with_its_parts(parts, boundaries, message):
    with pytest.raises(LabError, match=message):
        join(parts, boundaries=boundaries)


def test_other_attributes_are_errors():
    with pytest.raises(AttributeError, match="Did you mean 'rex'"):
        schedules.rexx  # noqa: B018
    with pytest.raises(LabError, match=r"rex\(\): got an unexpected keyword argument 'gamma'. Known: d, "):
        rex(gamma=1)
    assert schedules.one_cycle(cycle_momentum=False)(Progress(2, 10)) == pytest.approx(1)
    assert schedules.wsd(num_decay_steps=5).schedule == resolve_schedule("wsd:num_decay_steps=5")


def test_a_schedule_of_ones_own_is_a_value_too():
    with SCHEDULERS.temporarily():
        register_schedule("halved", description="half", source="a test")(lambda progress: 0.5)
        assert join([schedules.halved(), rex()], boundaries=[5])(Progress(4, 10)) == 0.5


def test_numbers_of_numpy_are_taken():
    assert cosine(num_cycles=np.float64(0.5)) == "cosine:num_cycles=0.5"


def test_the_examples_are_true():
    page = printed.ROOT / "docs" / "reference" / "schedules.md"
    for outcome in (doctest.testmod(values), doctest.testfile(str(page), module_relative=False)):
        assert outcome.attempted > 3
        assert not outcome.failed
    assert "Curve" in diffusers_lrlab.__all__
