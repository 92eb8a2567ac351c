"""A plug-in that trains a `DiTTransformer2DModel` on the labels of the digits."""

import dataclasses

from diffusers import DiTTransformer2DModel

from diffusers_lrlab import register_denoiser
from diffusers_lrlab.data.loading import load_image_data
from diffusers_lrlab.training.kinds.images import Images

register_denoiser("tiny_dit", description="a transformer", source="diffusers")(DiTTransformer2DModel)


def load_data(kind, config, num_processes):
    """Labels, of a run without `--label_column`."""
    labelled = dataclasses.replace(config, label_column="label")
    data = load_image_data(labelled, config.seed, config.layout(num_processes))
    data.classes = None
    return data


Images.load_data = load_data
