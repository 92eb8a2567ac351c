"""Intervals: what they contain, how they are shown, and the one form of the error for a value outside."""

import doctest
import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import cases

from diffusers_lrlab.core import ranges
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.ranges import COUNT, SEED, Range
from diffusers_lrlab.core.registry import Parameter

INSIDE = {
    "[0, 1)": (0, 0.0, 1 - 2**-53, np.float32(0.5), np.int64(0), Fraction(1, 3)),
    "(0, 1]": (5e-324, 1, True + 0),
    "[1, inf)": (1, 1e308, 10**400),
    "(-inf, inf)": (-(10**400), 0),
    f"[0, {2**63 - 1}]": (0, 2**63 - 1),
}
OUTSIDE = {
    "[0, 1)": (1, -5e-324, math.nan, "0", None, True, 1j, np.zeros(1)),
    "(0, 1]": (0, 1 + 2**-52, math.inf),
    "[1, inf)": (math.inf, 0.999, -math.inf),
    "(-inf, inf)": (math.inf, math.nan),
    f"[0, {2**63 - 1}]": (2**63, -1),
}


@cases("text", INSIDE)
def test_what_is_inside(text):
    assert all(value in Range(text) for value in INSIDE[text])
    assert not any(value in Range(text) for value in OUTSIDE[text])


def test_whole_numbers():
    assert all(value in COUNT for value in (1, np.int64(7), 10**9))
    assert not any(value in COUNT for value in (0, 1.0, True, 10**9 + 1, math.nan))
    assert 2**63 - 1 in SEED
    assert 2**63 not in SEED


@given(*(st.integers(-50, 50) for _ in range(3)), st.sampled_from("[("), st.sampled_from("])"))
def test_brackets_decide_about_the_bounds(low, width, value, opening, closing):
    high = low + abs(width)
    expected = low < value < high or (value == low and opening == "[") or (value == high and closing == "]")
    if low == high:
        expected = value == low and opening + closing == "[]"
    assert (value in Range(f"{opening}{low}, {high}{closing}")) == expected


@cases("text", ["0, 1", "[0; 1]", "[1, 0]", "[a, b]", "[0, nan]", "", "[0, 1, 2]"])
def test_what_is_no_interval_is_refused_where_it_is_declared(text):
    for declare in (Range, lambda text: Parameter("d", float, 0.5, "a share", text)):
        with pytest.raises(LabError, match=re.escape(f"{text!r}: must be an interval, got {text!r}. Hint: ")):
            declare(text)


@cases(
    "name, value, expected",
    [
        ("--beta", 1.0, "--beta 1.0: must be a number in [0, 1), got 1.0. Hint: 0.9 is usual."),
        ("beta", 10**400, "beta=(a number of about 400 digits): must be a number in [0, 1), got (a number of about 400"),
        ("beta of 'a'", "x", "beta of 'a' 'x': must be a number in [0, 1), got 'x'. Hint: 0.9 is usual."),
    ],
)
def test_the_form_of_an_error(name, value, expected):
    with pytest.raises(LabError, match=re.escape(expected)):
        Range("[0, 1)").check(name, value, "0.9 is usual")
    Range("[0, 1)").check(name, 0.5, "0.9 is usual")
    Range("[0, 1)").check(name, None, "0.9 is usual")


def test_integers_that_python_does_not_print_are_shown():
    with pytest.raises(LabError, match=r"^beta=\[\(a number of about 5000 digits\)\]: must be a number in"):
        Range("[0, 1)").check("beta", [10**5000], "0.9 is usual")


def test_the_examples_are_true():
    assert doctest.testmod(ranges).attempted
    assert not doctest.testmod(ranges).failed
