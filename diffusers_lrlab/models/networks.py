"""Sizes of models for the data: the default `UNet2DModel`, and DiT (arXiv 2212.09748)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.errors import must_be
from ..core.words import times
from .registry import Architecture

# (training images below which it is used, channels of the first level, layers per block)
_SIZES_OF_UNET = ((10_000, 32, 1), (100_000, 64, 2), (float("inf"), 128, 2))
_MAX_LEVELS = 6


def default_down_blocks(resolution: int) -> tuple[str, ...]:
    """Six levels from 64 pixels on, as upstream; fewer below, down to maps of 4x4."""
    levels = _MAX_LEVELS if resolution >= 64 else max(2, resolution.bit_length() - 2)
    attention = levels - 2 if levels == _MAX_LEVELS else levels - 1
    return tuple("AttnDownBlock2D" if level == attention else "DownBlock2D" for level in range(levels))


def default_unet_config(resolution: int, channels: int, num_images: int | None) -> dict[str, Any]:
    """
    Arguments of a `UNet2DModel`: 0.7 M parameters for 1,541 digits of 8x8, up to upstream's 113.7 M for many of 64x64.

    `num_images` counts training images; `None`, a stream, stands for many. Large models memorise small sets, slowly.
    """
    _, width, layers = next(size for size in _SIZES_OF_UNET if (num_images or float("inf")) <= size[0])
    down = default_down_blocks(resolution)
    # 1, 2, 2, 2 as DDPM's CIFAR-10 model (arXiv 2006.11239, appendix B); 1, 1, 2, 2, 4, 4 as diffusers' own example.
    multipliers = [2 ** (level // 2) if len(down) == _MAX_LEVELS else 1 + (level > 0) for level in range(len(down))]
    return {
        "sample_size": resolution,
        "in_channels": channels,
        "out_channels": channels,
        "layers_per_block": layers,
        "block_out_channels": tuple(width * multiplier for multiplier in multipliers),
        "norm_num_groups": min(32, width // 4),
        "down_block_types": down,
        "up_block_types": tuple(name.replace("Down", "Up") for name in reversed(down)),
    }


def check_resolution(resolution: int, num_levels: int, called: str = "--resolution") -> None:
    """Each level but the last halves the image, so the resolution must be divisible by a power of two."""
    factor = 2 ** (num_levels - 1)
    if resolution % factor:
        below, above = resolution // factor * factor, (resolution // factor + 1) * factor
        sizes = " or ".join(str(size) for size in (below, above) if size)
        hint = f"the UNet halves images {times(num_levels - 1)}; use {sizes}"
        raise must_be(called, resolution, f"divisible by {factor}", hint)


# --- DiT ----------------------------------------------------------------------------------------------------------------

NULL_LABEL = 1000  # written into diffusers' DiTPipeline
# (training images below which it is used, hidden size, layers); the last one has the hidden size and layers of DiT-S.
_SIZES_OF_DIT = ((10_000, 64, 4), (100_000, 256, 8), (float("inf"), 384, 12))
# Unless they are given: numbers of a head; the side of a patch, in pixels or numbers of a latent; patches along a side.
_HEAD_SIZE, _PATCH_SIZE, _FEWEST_PATCHES, _MOST_PATCHES = 32, 2, 4, 16


class DiT(Architecture):
    """
    The conventions of `DiTTransformer2DModel`.

    Its table of labels has a row for each of 1,000 classes and one for "no label", which a model without labels is always
    told. In diffusers, each block drops labels by a random choice of its own; here that is switched off, and an image
    has one label in all blocks.
    """

    component = "transformer"
    pipeline = "diffusers_lrlab.pipelines.image:ImagePipeline"
    null_label = NULL_LABEL

    def of_data(self, of_data: Mapping[str, Any]) -> dict[str, Any]:
        # The table of labels has its size for any number of classes.
        return {name: value for name, value in of_data.items() if name != "num_class_embeds"}

    def sizes(self, given: Mapping[str, Any], of_data: Mapping[str, Any], num_images: int | None) -> dict[str, Any]:
        _, hidden_size, num_layers = next(size for size in _SIZES_OF_DIT if (num_images or float("inf")) <= size[0])
        hidden_size = given.get("hidden_size") or hidden_size
        if hidden_size % 4:
            hint = "half of it encodes the row of a patch and half its column, by sines and cosines"
            raise must_be("hidden_size", hidden_size, "divisible by 4", hint, of="dit")
        head_size = next(size for size in range(_HEAD_SIZE, 0, -1) if hidden_size % size == 0)
        num_heads = given.get("num_heads") or hidden_size // head_size
        if hidden_size % num_heads:
            hint = f"hidden_size={hidden_size} is divided among the heads"
            raise must_be("num_heads", num_heads, f"a divisor of {hidden_size}", hint, of="dit")
        return {
            "num_layers": given.get("num_layers") or num_layers,
            "num_attention_heads": num_heads,
            "attention_head_dim": hidden_size // num_heads,
            "patch_size": _patch_size(given.get("patch_size"), of_data.get("sample_size")),
            "num_embeds_ada_norm": NULL_LABEL,
        }

    def check_start(self, arguments: Mapping[str, Any], model: str) -> None:
        of = f"the model {model!r}"
        if (num := arguments["num_embeds_ada_norm"]) != NULL_LABEL:
            hint = f"label {NULL_LABEL} stands for no label, as in diffusers' DiTPipeline; start from other weights"
            raise must_be("num_embeds_ada_norm", num, str(NULL_LABEL), hint, of=of)
        if (channels := arguments["out_channels"]) not in (None, arguments["in_channels"]):
            hint = "models that also predict variances are not trained; start from other weights"
            raise must_be("out_channels", channels, f"{arguments['in_channels']}, its in_channels", hint, of=of)

    def prepared(self, model: Any) -> Any:
        """The model without dropout of its own, told "no label" where none is given, with adaLN-Zero initialization."""
        from diffusers.models.embeddings import LabelEmbedding
        from torch import nn

        for module in model.modules():
            if isinstance(module, LabelEmbedding):
                module.dropout_prob = 0.0
        # Section 3.2 of the paper: each block is the identity at first. diffusers initializes no weights.
        for layer in (*(block.norm1.linear for block in model.transformer_blocks), model.proj_out_1, model.proj_out_2):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        model.register_forward_pre_hook(_tell_no_label, with_kwargs=True)
        return model


def _tell_no_label(_model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Adds the label that stands for none to a call without labels."""
    import torch

    if len(args) < 3 and kwargs.get("class_labels") is None:
        images = args[0] if args else kwargs["hidden_states"]
        kwargs = {**kwargs, "class_labels": torch.full((len(images),), NULL_LABEL, device=images.device)}
    return args, kwargs


def _patch_size(given: int | None, size: int | None) -> int:
    """The side of a patch: the one given, or 2 if that makes 4 to 16 patches along a side, or else the nearest that does."""
    if size is None:  # of no images
        return given or 1
    allowed = [patch for patch in range(1, size // 2 + 1) if size % patch == 0]
    hint = f"a side of {size} is cut into two patches or more"
    if given is not None:
        if given not in allowed:
            raise must_be("patch_size", given, f"one of {', '.join(map(str, allowed)) or 'none'}", hint, of="dit")
        return given
    usual = [patch for patch in allowed if _FEWEST_PATCHES <= size // patch <= _MOST_PATCHES]
    if not usual:
        hint += f", by default into {_FEWEST_PATCHES} to {_MOST_PATCHES}; give patch_size, or use images of another size"
        raise must_be("patch_size", None, f"given for images or latents of {size} x {size}", hint, of="dit")
    return min(usual, key=lambda patch: abs(patch - _PATCH_SIZE))
