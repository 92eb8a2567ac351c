"""What users write: spec strings to the character, schedules and counts that cannot be, and what the errors say."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_rows import BASE, Row, run
from tables import cases

from diffusers_lrlab import get_scheduler, list_schedulers, lr_curve
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.progress import resolve_updates, resolve_warmup_updates
from diffusers_lrlab.core.spec import format_spec, parse_json_kwargs, parse_spec, shown_spec
from diffusers_lrlab.schedules.registries import SCHEDULERS


@cases(
    ("text", "expected"),
    [
        ("cosine", ("cosine", {})),
        ("step:step_size=100,gamma=0.5", ("step", {"step_size": 100, "gamma": 0.5})),
        ("rex:d=.5", ("rex", {"d": 0.5})),
        ("wsd:decay_type=1-sqrt", ("wsd", {"decay_type": "1-sqrt"})),
        ("greedy:smooth=true", ("greedy", {"smooth": True})),
        ('piecewise_constant:{"step_rules": "1:5,0.1"}', ("piecewise_constant", {"step_rules": "1:5,0.1"})),
        ("multistep:milestones=[10|0.5]", ("multistep", {"milestones": [10, 0.5]})),
        ("multistep:milestones=[10, 20],gamma=0.5", ("multistep", {"milestones": [10, 20], "gamma": 0.5})),
        ("multistep:milestones=[]", ("multistep", {"milestones": []})),
        (
            "join:schedules=[join:schedules=[constant|rex:d=0.9],boundaries=[5]|cosine]",
            ("join", {"schedules": ["join:schedules=[constant|rex:d=0.9],boundaries=[5]", "cosine"]}),
        ),
    ],
)
def test_forms(text, expected):
    assert parse_spec(text) == expected


@cases(
    ("text", "position", "problem"),
    [
        ("", 0, "no name"),
        ("step size:gamma=1", 4, "unexpected character"),
        ("step:", 5, "key=value is missing"),
        ("step:gamma=0.5,", 15, "key=value is missing"),
        ("step:gamma=", 11, "has no value"),
        ("step:gamma=1,gamma=2", 13, "given twice"),
        ("join:schedules=[a|b", 15, "this bracket is never closed"),
        ("join:schedules=[a|b]],x=1", 20, "this bracket was never opened"),
        ("join:schedules=[a|b]boundaries=[5]x", 20, "a comma is missing after the bracket"),
    ],
)
def test_syntax_errors_point_at_the_character(text, position, problem):
    with pytest.raises(LabError, match=problem) as caught:
        parse_spec(text)
    shown, marker = str(caught.value).splitlines()[-2:]
    assert shown == f"  {text}"
    assert marker == "  " + " " * position + "^"


def test_a_spec_for_readers_needs_no_json_for_empty_lists():
    kwargs = {"momentum": 0.95, "chunks": True, "hidden": [], "adamw": []}
    assert shown_spec("muon", kwargs) == "muon:momentum=0.95,chunks=true"
    assert parse_spec(shown_spec("muon", {**kwargs, "hidden": ["a*"]})) == (
        "muon",
        {"momentum": 0.95, "chunks": True, "hidden": ["a*"]},
    )


scalars = st.one_of(
    st.integers(-99, 99),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([True, "true", "1-sqrt"]),
)
keys = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


@given(st.dictionaries(keys, st.one_of(scalars, st.lists(scalars)), min_size=1))
def test_lists_between_bars_are_those_of_json(kwargs):
    barred = ",".join(
        f"{key}=" + (f"[{'|'.join(map(json.dumps, value))}]" if isinstance(value, list) else json.dumps(value))
        for key, value in kwargs.items()
    )
    assert parse_spec(f"name:{barred}") == parse_spec(f"name:{json.dumps(kwargs)}") == ("name", kwargs)


@given(st.dictionaries(keys, st.one_of(scalars, st.text(), st.lists(st.text()))))
def test_format_is_read_back_whatever_it_holds(kwargs):
    assert parse_spec(format_spec("name", kwargs)) == ("name", kwargs)
    assert format_spec("name", {**kwargs, "derived": None}) == format_spec("name", kwargs)


@given(st.text(alphabet="ab=,[]|:{}\"' 1.", max_size=20))
def test_any_text_is_read_or_refused_in_words(text):
    try:
        parse_spec(text)
    except LabError as error:
        *_, shown, marker = ["", *str(error).splitlines()]
        if marker.strip() == "^":
            assert shown == f"  {text}"
            assert 2 <= marker.index("^") <= len(shown)


@pytest.mark.parametrize("text", ["{", "[1]", '{"gamma": 0.5, "gamma": 0.1}'])
def test_bad_json_says_how_to_write_it(text):
    with pytest.raises(LabError, match=r"^--lr_scheduler_kwargs .*: (is not|must be a).*\{\"gamma\": 0.5\}"):
        parse_json_kwargs(text, "--lr_scheduler_kwargs")


def test_a_parameter_in_the_spec_and_beside_it_is_refused():
    with pytest.raises(LabError, match=r"'gamma' is given twice: in the spec string 'step:gamma=0.5' and as gamma=0.1"):
        lr_curve("step:gamma=0.5", BASE, 0, 10, {"gamma": 0.1})


# --- asking for it wrongly -------------------------------------------------------------------------------------------


@cases(
    ("spec", "message"),
    [
        ("polynomial:lr_end=1.0", "The floor 1 of 'polynomial' is above its peak, 0.001. Lower one or raise the other."),
        ("wsd:num_decay_steps=21", "0 updates of warm-up, -1 at the peak and 21 of cool-down: that is not 20"),
        ("wsd:num_decay_steps=1.5", "num_decay_steps 1.5 is neither a whole number of updates"),
        ("one_cycle:base_momentum=0.95,max_momentum=0.85", "base_momentum=0.95 above max_momentum=0.85. Swap them."),
        ("one_cycle:three_phase=true,pct_start=0.7", "three_phase rises for 14 of 20 updates. Use less than half"),
        ("edm2_inverse_sqrt:reference_images=1000", "without images_per_update. Add images_per_update=N"),
        ("multistep:milestones=[2.5]", "A milestone 2.5 is neither a whole number of updates"),
        ('piecewise_constant:{"step_rules": "1:x,0.1"}', "step_rules='1:x,0.1': must be MULTIPLIER:UPDATE"),
        ('piecewise_constant:{"step_rules": "2:5,0.1"}', "must be multipliers, each a number in [0, 1], got '2:5,0.1'."),
    ],
)
def test_wrong_requests_name_the_value_and_the_remedy(spec, message):
    with pytest.raises(LabError, match=re.escape(message)):
        lr_curve(spec, BASE, 0, 20)


@pytest.mark.parametrize("spec", ["reduce_lr_on_plateau:min_lr=1", "greedy:min_lr=1", "greedy:max_lr=1e-6"])
def test_a_metric_cannot_move_a_rate_that_starts_outside_its_bounds(spec):
    with pytest.raises(LabError, match="above|below"):
        get_scheduler(spec, Row("cosine", {}).optimizer(), 0, 10)


@pytest.mark.parametrize(
    ("spec", "needs"),
    [
        ("cyclic:gamma=0.5", "mode='exp_range'"),
        ("wsd:decay_type=linear,num_cycles=3", "decay_type='cosine'"),
        ("one_cycle:cycle_momentum=false,base_momentum=0.5", "cycle_momentum=True"),
    ],
)
def test_arguments_without_effect_are_errors(spec, needs):
    with pytest.raises(LabError, match=f"has no effect with .*; it needs {needs}"):
        lr_curve(spec, BASE, 0, 20)


# --- counts ----------------------------------------------------------------------------------------------------------

takes_warmup = [name for name in list_schedulers() if "no_warmup" not in SCHEDULERS[name].traits]


def build(name, warmup, total, lr=BASE):
    return get_scheduler(name, Row(name, {}).optimizer(lr=lr), warmup, total)


@cases("name", takes_warmup)
@cases("warmup", [10, -1, 2.5, float("nan"), True, "3"])
def test_a_warm_up_that_does_not_fit_is_an_error(name, warmup):
    with pytest.raises(LabError, match=r"(?i)warm-?up"):
        build(name, warmup, 10)
    with pytest.raises(LabError, match=r"(?i)warm-?up"):
        lr_curve(name, BASE, warmup, 10)


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name not in takes_warmup])
def test_warm_up_is_refused_where_it_would_be_ignored(name):
    with pytest.raises(LabError, match="has no warm-up, but 2 warm-up steps"):
        build(name, 2, 10)


@cases("name", list_schedulers())
def test_the_length_of_the_run_is_needed_unless_nothing_depends_on_it(name):
    if "endless" in SCHEDULERS[name].traits:
        assert build(name, 0, None).get_last_lr() == [BASE]
    else:
        with pytest.raises(LabError, match=f"'{SCHEDULERS[name].name}' needs num_training_steps, the optimizer updates"):
            build(name, 0, None)


@cases("total", [0, -3, 10.5, float("nan"), True, "10"])
def test_a_length_that_is_no_count_is_an_error_in_words(total):
    with pytest.raises(LabError, match="num_training_steps|updates"):
        build("cosine", 0, total)


def test_a_fraction_of_an_endless_run_is_an_error():
    with pytest.raises(LabError, match="Warm-up of 0.05 of the run needs num_training_steps"):
        build("constant_with_warmup", 0.05, None)
    scheduler = build("constant_with_warmup", 2, None)
    assert [float(scheduler.values(update)[0]) for update in (0, 1, 2, 10**9)] == [0, BASE / 2, BASE, BASE]


@pytest.mark.parametrize(("warmup", "total"), [(np.int64(3), np.int64(10)), (3.0, 10.0), (np.float64(0.3), np.int32(10))])
def test_counts_of_numpy_are_counts(warmup, total):
    scheduler = build("cosine", warmup, total)
    assert json.loads(json.dumps(scheduler.state_dict())) == build("cosine", 3, 10).state_dict()
    np.testing.assert_array_equal(lr_curve("cosine", BASE, warmup, total), lr_curve("cosine", BASE, 3, 10))


@cases("name", ["constant", "cosine", "cyclic", "mdlrc"])
def test_a_group_that_does_not_learn_stays_so(name):
    scheduler = build(name, 0, 5, lr=0.0)
    assert not run(scheduler, scheduler.optimizer, 5)[:, 0, 0].any()


@given(st.integers(2, 10**6), st.data())
def test_warm_up_counts_and_fractions_agree(total, data):
    updates = data.draw(st.integers(0, total - 1))
    assert resolve_warmup_updates(updates, total) == updates
    if 0 < updates:
        assert resolve_warmup_updates(updates / total, total) == updates
        assert resolve_updates(updates / total, total, "") == updates
