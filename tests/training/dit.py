"""A plug-in that trains a `DiTTransformer2DModel` on the labels of the digits."""

from diffusers import DiTTransformer2DModel

from diffusers_lrlab import register_denoiser
from diffusers_lrlab.data.image_loading import load_image_data
from diffusers_lrlab.training.kinds.images import Images

register_denoiser("tiny_dit", description="a transformer", source="diffusers")(DiTTransformer2DModel)
Images.load_data = lambda kind, config, num: load_image_data(
    config, config.seed, config.layout(num), {"class_labels": "label"}
)
