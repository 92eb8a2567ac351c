"""Tiny models and data in folders of the names that diffusers' tests load from the Hub: nothing is downloaded."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from . import tiny_models, tiny_pipelines

_NUM_IMAGES = 10
_DATA = {  # columns of images by data set, and that of the text
    "hf-internal-testing/dummy_image_text_data": (("image",), "text"),
    "hf-internal-testing/dummy_image_class_data": (("image",), "label"),
    "hf-internal-testing/fill10": (("image", "conditioning_image"), "text"),
    "hf-internal-testing/instructpix2pix-10-samples": (("input_image", "edited_image"), "edit_prompt"),
}
_MODELS: dict[str, Callable[[Path], None]] = {
    "diffusers/ddpm_dummy": tiny_pipelines.unconditional,
    "hf-internal-testing/tiny-stable-diffusion-torch": tiny_pipelines.stable_diffusion,
    "hf-internal-testing/tiny-stable-diffusion-xl-pipe": tiny_pipelines.stable_diffusion_xl,
    "hf-internal-testing/tiny-sd3-pipe": tiny_pipelines.stable_diffusion_3,
    "hf-internal-testing/tiny-flux-pipe": tiny_pipelines.flux,
    "hf-internal-testing/tiny-lumina2-pipe": tiny_pipelines.lumina2,
    "hf-internal-testing/tiny-sana-pipe": tiny_models.sana,
    "hf-internal-testing/tiny-random-kandinsky-v22-prior": tiny_models.kandinsky_prior,
    "hf-internal-testing/tiny-random-kandinsky-v22-decoder": tiny_models.kandinsky_decoder,
    "hf-internal-testing/tiny-adapter": tiny_models.t2i_adapter,
    # The last layer takes nothing from a ControlNet.
    "DavyMorgan/tiny-sd3-pipe": functools.partial(tiny_pipelines.stable_diffusion_3, num_layers=2),
    "DavyMorgan/tiny-controlnet-sd3": tiny_models.controlnet_sd3,
}


def make(root: Path) -> None:
    """Writes the folders below the place from which the tests run."""
    for name, model in _MODELS.items():
        torch.manual_seed(0)
        made = root / name / "with tokenizers beside it" / "pipeline"
        model(made)
        for part in made.iterdir():
            part.rename(root / name / part.name)
    for name, (images, text) in _DATA.items():
        _make_images(root / name, images, text)
    instances = root / "docs/source/en/imgs"
    if not instances.exists():
        tiny_pipelines.make_images(instances, num_images=2, captions=False)


def _make_images(folder: Path, images: tuple[str, ...], text: str, size: int = 64) -> None:
    folder.mkdir(parents=True)
    rng, rows = np.random.default_rng(0), []
    for number in range(_NUM_IMAGES):
        row = {text: "a red square"}
        for image in images:
            path = f"{number}-{image}.png"
            Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(folder / path)
            row["file_name" if image == "image" else f"{image}_file_name"] = path
        rows.append(row)
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
