"""The default model: a `UNet2DModel` whose size fits the images and how many of them there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import LabError

# (training images below which it is used, channels of the first level, layers per block)
_SIZES = ((10_000, 32, 1), (100_000, 64, 2), (float("inf"), 128, 2))
_MAX_LEVELS = 6


def default_down_blocks(resolution: int) -> tuple[str, ...]:
    """Six levels from 64 pixels on, as upstream; fewer below, down to maps of 4x4."""
    levels = _MAX_LEVELS if resolution >= 64 else max(2, resolution.bit_length() - 2)
    attention = levels - 2 if levels == _MAX_LEVELS else levels - 1
    return tuple("AttnDownBlock2D" if level == attention else "DownBlock2D" for level in range(levels))


def default_unet_config(resolution: int, channels: int, num_images: int | None) -> dict[str, Any]:
    """
    Arguments of a `UNet2DModel`.

    Args:
        resolution (`int`): Height and width of the images.
        channels (`int`): Of the images.
        num_images (`int` or `None`): Training images; `None` (a stream) counts as many. Large models memorise small
            sets, and take long to do so.

    Returns:
        `dict`: 0.7 M parameters for 1,541 digits of 8x8 up to upstream's 113.7 M for many images of 64x64 and more.
    """
    _, width, layers = next(size for size in _SIZES if (num_images or float("inf")) <= size[0])
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


def check_resolution(resolution: int, num_levels: int) -> None:
    """Each level but the last halves the image, so the resolution must be divisible by a power of two."""
    factor = 2 ** (num_levels - 1)
    if resolution % factor:
        below, above = resolution // factor * factor, (resolution // factor + 1) * factor
        sizes = " or ".join(str(size) for size in (below, above) if size)
        raise LabError(
            f"--resolution {resolution} cannot be halved {num_levels - 1} times, as the UNet does; it must be divisible "
            f"by {factor}. Use {sizes}."
        )


def load_unet_config(name_or_path: str, cache_dir: str | None) -> dict[str, Any]:
    """The configuration of a `UNet2DModel` from a folder, a file or the Hub, with diffusers' defaults filled in."""
    from diffusers import UNet2DModel

    path = Path(name_or_path).expanduser()
    try:
        if path.is_file():
            config = json.loads(path.read_text(encoding="utf-8"))
        else:
            config = UNet2DModel.load_config(name_or_path, cache_dir=cache_dir)
    except (OSError, ValueError) as error:
        raise LabError(
            f"--model_config_name_or_path {name_or_path!r} cannot be read: {error} Give a folder with a config.json, "
            "such a file, or a Hub id."
        ) from None
    kind = config.get("_class_name", "UNet2DModel")
    if kind != "UNet2DModel":
        raise LabError(f"{name_or_path!r} is the configuration of a {kind}; this script trains a UNet2DModel.")
    config = _with_defaults(UNet2DModel, config)
    _check_can_be_built(UNet2DModel, config, name_or_path)
    return config


def _check_can_be_built(model_class: Any, config: dict[str, Any], name_or_path: str) -> None:
    import torch

    try:
        with torch.device("meta"):
            model_class(**config)
    except Exception as error:  # diffusers and torch check only a part of this, and each in its own way
        raise LabError(
            f"--model_config_name_or_path {name_or_path!r} describes no UNet2DModel that can be built: {error} "
            "Correct its config.json."
        ) from error


def _with_defaults(model_class: Any, config: dict[str, Any]) -> dict[str, Any]:
    import inspect

    parameters = inspect.signature(model_class.__init__).parameters
    defaults = {
        name: parameter.default for name, parameter in parameters.items() if parameter.default is not inspect.Parameter.empty
    }
    unknown = [key for key in config if key not in parameters and not key.startswith("_")]
    if unknown:
        raise LabError(f"UNet2DModel does not take {', '.join(map(repr, unknown))} in its configuration. Remove it.")
    return defaults | {key: value for key, value in config.items() if not key.startswith("_")}
