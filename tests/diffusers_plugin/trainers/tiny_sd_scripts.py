"""A Stable Diffusion of a few thousand random weights, and images, for sd-scripts: `python tiny_sd_scripts.py FOLDER`.

Run by the interpreter of sd-scripts, whose versions of diffusers and transformers write the pipeline.
"""

import ast
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

WIDTHS = "(32, 32, 32, 32)"  # of the U-Net: groups of its norms are of 32 channels at least
NUM_IMAGES = 8


def make_tokenizer(folder: Path) -> None:
    """Of single bytes, where `--tokenizer_cache_dir` looks for the one of SD 1."""
    folder.mkdir(parents=True)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    words = ["<|startoftext|>", "<|endoftext|>", *symbols, *(symbol + "</w>" for symbol in symbols)]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = {"model_max_length": 77, "tokenizer_class": "CLIPTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_pipeline(folder: Path, tokenizer: Path) -> None:
    import diffusers
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 514, "hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.CLIPTextConfig(**sizes, projection_dim=8, bos_token_id=0, eos_token_id=1)
    diffusers.StableDiffusionPipeline(
        vae=diffusers.AutoencoderKL(
            block_out_channels=(4, 4, 4, 4),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=1,
            norm_num_groups=2,
        ),
        text_encoder=transformers.CLIPTextModel(config),
        tokenizer=transformers.CLIPTokenizer.from_pretrained(tokenizer),
        unet=diffusers.UNet2DConditionModel(
            sample_size=8, block_out_channels=ast.literal_eval(WIDTHS), cross_attention_dim=32, attention_head_dim=8
        ),
        scheduler=diffusers.DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)


def make_images(folder: Path) -> None:
    """In a folder whose name starts with the repeats, as sd-scripts wants it."""
    folder.mkdir(parents=True)
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, 64, 64, 3), np.uint8)):
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a picture of number {number}")


if __name__ == "__main__":
    root = Path(sys.argv[1])
    make_tokenizer(root / "tokenizers" / "openai_clip-vit-large-patch14")
    make_pipeline(root / "pipeline", root / "tokenizers" / "openai_clip-vit-large-patch14")
    make_images(root / "images" / "1_picture")
