"""A tiny autoencoder, and digits encoded by it."""

import runs
import torch
from diffusers import AutoencoderKL

from diffusers_lrlab.data.latent_data import encode_dataset
from diffusers_lrlab.data.latents import LatentsRecord
from diffusers_lrlab.data.options import DataConfig

TINY_VAE = {
    "in_channels": 1,
    "out_channels": 1,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "latent_channels": 2,
    "layers_per_block": 1,
    "scaling_factor": 0.9,
    "shift_factor": 0.1,
}
TINY_UNET = {**runs.TINY_UNET, "sample_size": 4, "in_channels": 2, "out_channels": 2}


def save_vae(folder, seed=0, **changes):
    """An autoencoder with random weights of a seed, and standard deviations of about 0.3."""
    torch.manual_seed(seed)
    vae = AutoencoderKL(**{**TINY_VAE, **changes})
    with torch.no_grad():
        channels = vae.config.latent_channels
        vae.quant_conv.bias[channels:] -= 2.5
    vae.save_pretrained(folder)
    return folder


def encode(folder, vae, dataset="digits", label_column="label", flip=False, batch_size=200, **options):
    """A folder of latents of a data set."""
    config = DataConfig(dataset_name=str(dataset), label_column=label_column, **options)
    return encode_dataset(config, folder, vae=str(vae), flip=flip, batch_size=batch_size)


def record_of():
    """The record of latents of digits."""
    source = {"class_name": "AutoencoderKL", "name_or_path": "user/vae", "subfolder": None, "revision": "0" * 40}
    return LatentsRecord(
        autoencoder=source,
        weights_sha256="0" * 64,
        scaling_factor=1.0,
        shift_factor=0.0,
        shape=(4, 4, 4),
        flip=False,
        dataset="digits",
        resolution=8,
        image_channels=1,
        label_column="label",
        num_images=1797,
    )


def write_record(folder):
    """A folder that configurations take for latents of digits, without any."""
    folder.mkdir()
    record_of().write(folder)
