"""The default UNet: sizes that fit the images and their number."""

import re

import pytest
import torch
from diffusers import UNet2DModel
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.models.networks import check_resolution, default_down_blocks, default_unet_config


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
