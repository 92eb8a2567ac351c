"""The default model: a `UNet2DModel` sized for the images and their number."""

from typing import Any

from ..core.errors import must_be
from ..core.words import times

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
    Arguments of a `UNet2DModel`: 0.7 M parameters for 1,541 digits of 8x8, up to upstream's 113.7 M for many of 64x64.

    `num_images` counts training images; `None`, a stream, stands for many. Large models memorise small sets, slowly.
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
        hint = f"the UNet halves images {times(num_levels - 1)}; use {sizes}"
        raise must_be("--resolution", resolution, f"divisible by {factor}", hint)
