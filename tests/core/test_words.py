"""Counts and durations in sentences."""

import pytest

from diffusers_lrlab.core.words import agreeing, counted, duration, singular, times


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "update", "1 update"),
        (2, "process", "2 processes"),
        (2, "micro-batch", "2 micro-batches"),
        (2, "entry", "2 entries"),
        (0.5, "epoch", "0.5 epochs"),
        (2, "branch", "2 branches"),
    ],
)
def test_a_count_and_its_noun(number, noun, text):
    assert counted(number, noun) == text


def test_numbers_are_written_as_asked():
    assert counted(1500, "parameter", ",") == "1,500 parameters"
    assert counted(1.0, "epoch", ".4g") == "1 epoch"
    assert [times(number) for number in (1, 2, 30)] == ["once", "2 times", "30 times"]
    assert [agreeing(number, "is", "are") for number in (1, 2)] == ["is", "are"]


def test_every_name_of_a_kind_of_data_has_a_singular():
    from diffusers_lrlab.training.kinds import KINDS

    assert {name: singular(name) for name in KINDS} == {"images": "image", "latents": "latent", "points": "point"}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (43.21, "43.2 s"), (120, "2 min"), (1758, "29.3 min"), (7200, "2 h"), (9000, "2.5 h"), (1e7, "2,778 h")],
)
def test_times_have_the_unit_that_suits_them(seconds, text):
    assert duration(seconds) == text
