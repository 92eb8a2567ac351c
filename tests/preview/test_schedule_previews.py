"""`lrlab preview` of schedules: numbers, text and plots."""

import json
import re
import runpy
import sys

import numpy as np
import printed
import pytest
from lrlab_command import lrlab, lrlab_here
from PIL import Image

from diffusers_lrlab.schedules.expected import lr_curve
from diffusers_lrlab.schedules.registries import SCHEDULERS

pytestmark = pytest.mark.pictures


def previewed(capsys, *arguments):
    """`lrlab preview ... --json`."""
    return json.loads(lrlab_here(capsys, "preview", *arguments, "--json"))


# --- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", ["0", "7", "0.1"])
def test_json_has_the_promised_curves(warmup, capsys):
    specs = ["cosine:num_cycles=1.5", "rex:d=0.9", "one_cycle", "wsd:num_decay_steps=0.3", "reduce_lr_on_plateau"]
    options = [part for spec in specs for part in ("--lr_scheduler", spec)]
    shown = previewed(capsys, *options, "--num_training_steps", 60, "--num_warmup_steps", warmup, "--learning_rate", "3e-4")
    assert shown["updates"] == 60
    assert [schedule["spec"] for schedule in shown["schedules"]] == specs
    for schedule in shown["schedules"]:
        promised = lr_curve(schedule["spec"], 3e-4, float(warmup), 60)
        np.testing.assert_allclose(schedule["lr"], promised, rtol=1e-12, atol=0)
        assert (schedule["beta1"] is not None) == (schedule["spec"] == "one_cycle")
    assert "validation loss" in shown["schedules"][-1]["notes"][0]


def test_json_with_arguments_and_momentum(capsys):
    shown = previewed(
        capsys,
        *("--lr_scheduler", "constant_with_warmup:warmup_type=cosine", "--momentum_scheduler", "mdlrc:min_momentum=0.2"),
        *("--num_training_steps", 40, "--num_warmup_steps", 10, "--beta1", 0.9),
    )
    (schedule,) = shown["schedules"]
    assert schedule["spec"] == "constant_with_warmup:warmup_type=cosine"
    assert schedule["momentum"] == "mdlrc:min_momentum=0.2"
    share = np.clip((np.arange(40) - 10) / 30, 0, 1)
    beta1 = np.maximum(0.9 * (1 - share) / (0.1 + 0.9 * (1 - share)), 0.2)
    ramp = np.minimum(0.5 * (1 - np.cos(np.pi * np.arange(40) / 10)) * (np.arange(40) < 10) + (np.arange(40) >= 10), 1)
    np.testing.assert_allclose(schedule["beta1"], beta1, rtol=1e-12)
    np.testing.assert_allclose(schedule["lr"], 1e-4 * ramp * 0.1 / (1 - beta1), rtol=1e-12)


def test_a_rate_that_is_lowered_twice_is_said(capsys):
    shown = lrlab_here(
        capsys, "preview", "--lr_scheduler", "cosine", "--momentum_scheduler", "mdlrc", "--num_training_steps", 40
    )
    assert "changes the learning rate by itself, on top of 'cosine'" in shown


# --- plots --------------------------------------------------------------------------------------------------------


def test_the_terminal_gets_a_table():
    options = ["--lr_scheduler", "one_cycle", "--lr_scheduler", "rex", "--num_training_steps", 200]
    shown = lrlab("preview", *options, encoding="ascii")
    assert shown.isascii()
    assert max(map(len, shown.splitlines())) <= 80
    assert "beta1" in shown
    assert re.search(r"^rex +0\.0001 .* 9\.\d+e-07$", shown, re.MULTILINE)


def colors(path):
    picture = Image.open(path).convert("RGB")
    return {color for _, color in picture.getcolors(picture.width * picture.height)}


def test_a_picture_has_every_curve(tmp_path, capsys):
    out = tmp_path / "preview.png"
    options = ["--lr_scheduler", "one_cycle", "--lr_scheduler", "rex:d=0.9", "--num_training_steps", 200]
    assert lrlab_here(capsys, "preview", *options, "--out", out).endswith(f"Wrote {out}.\n")
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= colors(out)
    assert list(tmp_path.iterdir()) == [out]


def test_a_picture_and_json_at_once(tmp_path, capsys):
    out = tmp_path / "preview.svg"
    assert previewed(capsys, "--lr_scheduler", "cosine", "--num_training_steps", 20, "--out", out)["updates"] == 20
    assert "<!-- learning rate -->" in out.read_text()


@pytest.mark.slow
def test_the_plot_of_the_readme_shows_every_schedule(tmp_path, monkeypatch):
    out = tmp_path / "all.svg"
    monkeypatch.setattr(sys, "argv", ["schedule_gallery.py", str(out)])
    made = runpy.run_path(str(printed.ROOT / "docs" / "schedule_gallery.py"), run_name="__main__")
    drawn = re.findall(r"<!-- (.*) -->", out.read_text())
    assert {line for name in SCHEDULERS for line in made["_in_lines"](name).split("\n")} <= set(drawn)
    assert any("as if it never changed them" in text for text in drawn)
    assert "0.5" not in drawn  # as on the axes of an empty panel
