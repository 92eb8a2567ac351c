"""Pipelines of a few thousand random weights, in the folders that diffusers' example scripts load: `make(NAME, folder)`."""

import functools
import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image

_CAPTIONS = ("a red square", "a blue disc", "two green lines", "a grey cloud")


def clip_tokenizer(folder: Path) -> transformers.CLIPTokenizer:
    """Of single bytes: no pair of them is ever merged."""
    folder.mkdir(parents=True)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    words = ["<|startoftext|>", "<|endoftext|>", *symbols, *(symbol + "</w>" for symbol in symbols)]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = {"model_max_length": 77, "tokenizer_class": "CLIPTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return transformers.CLIPTokenizer.from_pretrained(folder)


def letters_tokenizer(kind: type) -> Any:
    """A tokenizer of letters, as T5's and Gemma's classes take it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = ["▁", *string.ascii_lowercase]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((letter, -3.0) for letter in letters)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    options = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "model_max_length": 77}
    return kind(tokenizer_object=tokenizer, **options)


def clip_config() -> transformers.CLIPTextConfig:
    sizes = {"vocab_size": 514, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    return transformers.CLIPTextConfig(**sizes, projection_dim=8, bos_token_id=0, eos_token_id=1)


def t5() -> transformers.T5EncoderModel:
    sizes = {"vocab_size": 30, "d_model": 32, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5EncoderModel(transformers.T5Config(**sizes))


def vae(levels: int = 2, latent_channels: int = 4, **changed: Any) -> diffusers.AutoencoderKL:
    return diffusers.AutoencoderKL(
        block_out_channels=(4, 8, 8, 8)[:levels],
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=2,
        **changed,
    )


def _unet(**changed: Any) -> diffusers.UNet2DConditionModel:
    options = {
        "sample_size": 16,
        "block_out_channels": (4, 8),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 8,
        "attention_head_dim": 2,
        "norm_num_groups": 2,
    }
    return diffusers.UNet2DConditionModel(**options | changed)


def _ddpm() -> diffusers.DDPMScheduler:
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    return diffusers.DDPMScheduler(**betas, steps_offset=1, clip_sample=False)


def stable_diffusion(folder: Path, vae_levels: int = 2) -> None:
    diffusers.StableDiffusionPipeline(
        vae=vae(vae_levels),
        text_encoder=transformers.CLIPTextModel(clip_config()),
        tokenizer=clip_tokenizer(folder.parent / "tokenizer"),
        unet=_unet(),
        scheduler=_ddpm(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)


def stable_diffusion_xl(folder: Path) -> None:
    diffusers.StableDiffusionXLPipeline(
        vae=vae(),
        text_encoder=transformers.CLIPTextModel(clip_config()),
        text_encoder_2=transformers.CLIPTextModelWithProjection(clip_config()),
        tokenizer=clip_tokenizer(folder.parent / "tokenizer"),
        tokenizer_2=clip_tokenizer(folder.parent / "tokenizer_2"),
        unet=_unet(
            cross_attention_dim=16,  # both encoders'
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 8,
            use_linear_projection=True,
        ),
        scheduler=_ddpm(),
    ).save_pretrained(folder)


def flux(folder: Path) -> None:
    diffusers.FluxPipeline(
        transformer=diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,  # 4 times the latent channels
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=8,
            axes_dims_rope=[4, 4, 8],
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae(shift_factor=0.06, scaling_factor=1.5, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=transformers.CLIPTextModel(clip_config()),
        tokenizer=clip_tokenizer(folder.parent / "tokenizer"),
        text_encoder_2=t5(),
        tokenizer_2=letters_tokenizer(transformers.T5TokenizerFast),
    ).save_pretrained(folder)


def lumina2(folder: Path) -> None:
    sizes = {"head_dim": 4, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
    diffusers.Lumina2Pipeline(
        transformer=diffusers.Lumina2Transformer2DModel(
            sample_size=4,
            patch_size=2,
            in_channels=4,
            hidden_size=8,
            num_layers=2,
            num_attention_heads=1,
            num_kv_heads=1,
            multiple_of=16,
            axes_dim_rope=[4, 2, 2],
            cap_feat_dim=8,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=vae(shift_factor=0.06, scaling_factor=1.5, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=transformers.Gemma2Model(transformers.Gemma2Config(vocab_size=30, num_key_value_heads=2, **sizes)),
        tokenizer=letters_tokenizer(transformers.GemmaTokenizerFast),
    ).save_pretrained(folder)


def unconditional(folder: Path) -> None:
    """The configuration of a model: the script makes the rest."""
    sizes = {"sample_size": 16, "block_out_channels": [4, 8], "layers_per_block": 1, "norm_num_groups": 2}
    blocks = {"down_block_types": ["DownBlock2D", "DownBlock2D"], "up_block_types": ["UpBlock2D", "UpBlock2D"]}
    diffusers.UNet2DModel(**sizes, **blocks).save_config(folder)


PIPELINES: dict[str, Callable[[Path], None]] = {
    "unconditional": unconditional,
    "stable_diffusion": stable_diffusion,
    "stable_diffusion_of_factor_8": functools.partial(stable_diffusion, vae_levels=4),
    "stable_diffusion_xl": stable_diffusion_xl,
    "flux": flux,
    "lumina2": lumina2,
}


def make(name: str, folder: Path) -> Path:
    """Writes the pipeline of a name below a folder; the weights are the same each time."""
    torch.manual_seed(0)
    place = folder / name / "pipeline"
    PIPELINES[name](place)
    return place


def make_images(folder: Path, num_images: int = 8, size: int = 32, others: bool = False, captions: bool = True) -> Path:
    """A folder of noisy images; with `others`, each has an edited or a conditioning image beside it."""
    folder.mkdir(parents=True)
    rng, rows = np.random.default_rng(0), []
    for number in range(num_images):
        row = {"file_name": f"{number}.png", "text": _CAPTIONS[number % len(_CAPTIONS)]}
        names = [f"{number}.png", *([f"{number}-other.png"] if others else [])]
        for name in names:
            Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(folder / name)
        rows.append(row | ({"other_file_name": names[1]} if others else {}))
    if captions:
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
