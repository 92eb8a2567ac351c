"""The built-in denoisers: that of points, and a UNet whose sizes fit the images and their number."""

import math
import re

import pytest
import torch
from diffusers import UNet2DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import cases

from diffusers_lrlab import MLPDenoiser
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.models.networks import check_resolution, default_down_blocks, default_unet_config


def test_the_default_is_the_studys_network():
    assert sum(parameter.numel() for parameter in MLPDenoiser().parameters()) == 296_450


def readable_twin(model, points, timesteps):
    """The network in the words of the study's template: an embedding for each coordinate, one point at a time."""

    def embed(value, scale):
        size = model.config.embedding_size // 2
        frequencies = [math.exp(-math.log(10_000) * i / (size - 1)) for i in range(size)]
        angles = [value * scale * frequency for frequency in frequencies]
        return [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]

    outputs = []
    for point, timestep in zip(points.tolist(), timesteps.tolist(), strict=True):
        embedded = [number for coordinate in point for number in embed(coordinate, model.config.coordinate_scale)]
        hidden = model.input(torch.tensor([embedded + embed(timestep, 1.0)], dtype=torch.float64))
        for block in model.blocks:
            hidden = hidden + block(hidden.clamp(min=0))
        outputs.append(model.output(hidden.clamp(min=0))[0])
    return torch.stack(outputs)


@pytest.mark.parametrize("config", [{}, {"dimension": 5, "num_layers": 0, "embedding_size": 6, "coordinate_scale": 3.0}])
def test_the_network_is_that_of_the_template(config):
    model = MLPDenoiser(**config)
    points, timesteps = torch.randn(7, model.config.dimension), torch.randint(0, 100, (7,))
    found = model(points, timesteps).sample
    twin = readable_twin(model.double(), points.double(), timesteps)
    torch.testing.assert_close(found.double(), twin, rtol=0, atol=2e-4)  # sines of large angles in float32


def test_one_timestep_stands_for_all():
    model, points = MLPDenoiser(hidden_size=8, num_layers=1, embedding_size=4), torch.randn(4, 2)
    each = model(points, torch.full((4,), 3)).sample
    for timestep in (3, 3.0, torch.tensor(3)):
        assert torch.equal(model(points, timestep).sample, each)
    assert torch.equal(model(points, 3, return_dict=False)[0], each)
    with pytest.raises(ValueError, match=r"\(batch, 2\)"):
        model(torch.zeros(4, 3), 0)


@cases("wrong", [{"dimension": 0}, {"num_layers": 1.5}, {"embedding_size": 7}, {"coordinate_scale": math.inf}])
def test_configurations_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MLPDenoiser(**wrong)


@settings(deadline=None)
@given(resolution=st.integers(1, 2000))
def test_the_resolutions_that_are_proposed_work(resolution):
    def check(size):
        check_resolution(size, len(default_down_blocks(size)))

    try:
        check(resolution)
    except LabError as error:
        proposed = re.search(r"use ([\d or]+)\.", str(error))
        for size in proposed[1].split(" or "):
            check(int(size))


@pytest.mark.parametrize(
    ("num_images", "resolution", "channels", "num_parameters"),
    [
        pytest.param(1541, 8, 1, 701_345, id="digits"),
        pytest.param(50_000, 32, 3, 8_952_067, id="thousands"),
        pytest.param(None, 64, 3, 113_673_219, id="a stream"),
    ],
)
def test_the_model_grows_with_the_number_of_images(num_images, resolution, channels, num_parameters):
    with torch.device("meta"):
        model = UNet2DModel(**default_unet_config(resolution, channels, num_images))
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
