"""Curves as text."""

import re

import numpy as np

from diffusers_lrlab.core.terminal_plot import terminal_plot

FALLING, FLAT = np.linspace(4.0, 0.0, 20), np.full(20, 2.0)


def test_a_curve_in_a_terminal():
    assert terminal_plot({"falling": FALLING}, "one", width=18, height=4).splitlines() == [
        "one",
        " 4 │⠉⠢⠤⡀",
        "   │   ⠈⠑⠤⢄",
        "   │       ⠉⠒⠢⡀",
        "   │          ⠈⠑⠒⢄",
        " 0 └──────────────",
        "    0   update  19",
    ]


def test_two_curves_in_a_terminal_that_knows_only_ascii():
    shown = terminal_plot({"falling": FALLING, "flat": FLAT, "also": FLAT}, "two", width=18, height=5, unicode=False)
    assert shown.splitlines() == [
        "two",
        " 4 |***",
        "   |  ****",
        "   |o+o+o+*o++o+o+",
        "   |         ***",
        "   |            **",
        " 0 +--------------",
        "    0   update  19",
        "    * falling",
        "    o flat",
        "    + also",
    ]


def test_two_curves_in_a_terminal_with_colours():
    shown = terminal_plot({"falling": FALLING, "flat": FLAT}, "", width=18, height=5, color=True)
    plain = re.sub(r"\033\[\d*m", "", shown)
    assert "   │⠤⠤⠤⠤⠤⠤⠵⠤⡤⠤⠤⠤⠤⠤" in plain.splitlines()
    assert plain.endswith("    ── falling\n    ── flat")
    assert shown.count("\033[36m") > 10
    assert shown.count("\033[33m") > 10


def test_plots_of_one_update_and_of_a_flat_curve():
    assert "0.5 │⠉" in terminal_plot({"flat": np.full(1, 0.5)}, "", from_zero=False)
    assert "0 └" in terminal_plot({"flat": np.zeros(3)}, "")
