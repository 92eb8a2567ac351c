"""Counts and durations in sentences."""

from diffusers_lrlab.core.words import agreeing, counted, duration, singular, times
from diffusers_lrlab.training.kinds import KINDS


def test_a_count_and_its_noun():
    plurals = {"update": "updates", "process": "processes", "micro-batch": "micro-batches", "entry": "entries"}
    assert [counted(2, noun) for noun in plurals] == [f"2 {plural}" for plural in plurals.values()]
    assert [counted(1, "update"), counted(0.5, "epoch"), counted(2, "branch")] == ["1 update", "0.5 epochs", "2 branches"]
    assert [counted(1500, "parameter", ","), counted(1.0, "epoch", ".4g")] == ["1,500 parameters", "1 epoch"]
    assert [times(number) for number in (1, 2)] == ["once", "2 times"]
    assert [agreeing(number, "is", "are") for number in (1, 2)] == ["is", "are"]
    assert [singular(name) for name in KINDS] == ["image", "latent", "point"]


def test_durations_have_the_unit_that_suits_them():
    texts = {0: "0 s", 43.21: "43.2 s", 120: "2 min", 1758: "29.3 min", 7200: "2 h", 9000: "2.5 h", 1e7: "2,778 h"}
    assert {seconds: duration(seconds) for seconds in texts} == texts
