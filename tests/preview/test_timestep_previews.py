"""`lrlab preview` of timestep samplers and loss weightings."""

import json

import pytest
from lrlab_command import lrlab_here
from PIL import Image

from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS

pytestmark = pytest.mark.pictures


def test_densities_and_weights_are_shown_as_they_are(tmp_path, capsys):
    out = tmp_path / "densities.png"
    arguments = ["--timestep_sampler", "speed", "--timestep_sampler", "clts", "--loss_weighting", "min_snr"]
    arguments = ["preview", *arguments, "--num_training_steps", 10]
    shown = {row["name"]: row for row in json.loads(lrlab_here(capsys, *arguments, "--json", "--out", out))}
    assert shown["speed"]["updates"] == [0]
    assert shown["speed"]["values"][0][:1] == [pytest.approx(5 * 1000 / 3800)]
    assert shown["clts"]["updates"] == [0, 5, 10]
    assert shown["clts"]["values"][0] == pytest.approx([1] * 1000)
    assert shown["clts"]["values"][2][300] == pytest.approx(1.5985, abs=5e-5)
    assert shown["min_snr"]["values"][0][100] == pytest.approx(0.58571, abs=5e-6)
    with Image.open(out) as picture:
        assert min(picture.size) > 200
    table = lrlab_here(capsys, *arguments)
    assert "clts at update 10: density / uniform" in table
    assert "min_snr: weight" in table
    assert "timestep of ddpm" in table
    assert "timestep of flow_matching:shift=3" in lrlab_here(capsys, *arguments, "--objective", "flow_matching:shift=3")


def test_all_densities_and_weights_fit_into_a_picture(tmp_path, capsys):
    out = tmp_path / "all.png"
    arguments = ["--timestep_sampler", "all", "--loss_weighting", "all", "--num_training_steps", 100, "--ddpm_num_steps", 20]
    shown = lrlab_here(capsys, "preview", *arguments, "--out", out)
    for registry in (TIMESTEP_SAMPLERS, LOSS_WEIGHTINGS):
        for name, entry in registry.items():
            assert (f"{name}:" in shown or f"{name} at" in shown) == ("feedback" not in entry.traits)
    with Image.open(out) as picture:
        assert min(picture.size) > 1000
