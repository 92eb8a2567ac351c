import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusers_lrlab.errors import LabError
from diffusers_lrlab.schedules.spec import format_spec, parse_json_kwargs, parse_spec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cosine", ("cosine", {})),
        ("step:step_size=100,gamma=0.5", ("step", {"step_size": 100, "gamma": 0.5})),
        ("exponential:gamma=1e-3", ("exponential", {"gamma": 1e-3})),
        ("reduce_lr_on_plateau:mode=max", ("reduce_lr_on_plateau", {"mode": "max"})),
        ('piecewise_constant:{"step_rules": "1:5,0.1"}', ("piecewise_constant", {"step_rules": "1:5,0.1"})),
    ],
)
def test_forms(text, expected):
    assert parse_spec(text) == expected


@pytest.mark.parametrize(
    ("text", "position", "problem"),
    [
        ("", 0, "no name"),
        ("step size:gamma=1", 4, "unexpected character"),
        ("step:", 5, "key=value is missing"),
        ("step:gamma", 10, "key=value is missing"),
        ("step:gamma=0.5,", 15, "key=value is missing"),
        ("step:gamma=", 11, "has no value"),
        ("step:gamma=1,gamma=2", 13, "given twice"),
        ("step:=5", 5, "key=value is missing"),
    ],
)
def test_syntax_errors_point_at_the_character(text, position, problem):
    with pytest.raises(LabError, match=problem) as caught:
        parse_spec(text)
    shown, marker = str(caught.value).splitlines()[-2:]
    assert shown == f"  {text}"
    assert marker.index("^") - 2 == position


@pytest.mark.parametrize(
    "kwargs", [{}, {"gamma": 0.5, "step_size": 10}, {"mode": "max"}, {"step_rules": "1:5,0.1"}, {"eps": 1e-8}]
)
def test_format_is_read_back(kwargs):
    assert parse_spec(format_spec("name", kwargs)) == ("name", kwargs)
    assert format_spec("name", {**kwargs, "derived": None}) == format_spec("name", kwargs)


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
        st.one_of(st.integers(-99, 99), st.floats(allow_nan=False, allow_infinity=False), st.booleans()),
        min_size=1,
    )
)
def test_both_forms_carry_any_scalars(kwargs):
    joined = ",".join(f"{key}={json.dumps(value)}" for key, value in kwargs.items())
    assert parse_spec(f"name:{joined}") == ("name", kwargs)
    assert parse_spec(f"name:{json.dumps(kwargs)}") == ("name", kwargs)


@pytest.mark.parametrize("text", ["{", "{'gamma': 1}", "[1]", "5", '{"gamma": }'])
def test_bad_json_says_how_to_write_it(text):
    with pytest.raises(LabError, match=r"--lr_scheduler_kwargs .*\{\"gamma\": 0.5\}"):
        parse_json_kwargs(text, "--lr_scheduler_kwargs")


def test_json_with_a_repeated_key_is_refused():
    with pytest.raises(LabError, match="'gamma' twice"):
        parse_spec('step:{"gamma": 0.5, "gamma": 0.1}')
