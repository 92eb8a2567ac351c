"""The noise that is added to the data, and its assignment to images.

Validation and sampling always have plain Gaussian noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.plugins import unusable
from ..core.registry import Parameter, Registry

if TYPE_CHECKING:
    import torch


def _check_noise(value: Any, noise: torch.Tensor, *_: Any) -> Any:
    """Checks that noise has the type, shape and dtype of the noise given. Reads nothing off the device."""
    if type(value) is not type(noise) or value.shape != noise.shape or value.dtype != noise.dtype:
        raise unusable(f"a tensor of {noise.dtype} of shape {tuple(noise.shape)}", value)
    return value


NOISES = Registry(
    "noise",
    returns=_check_noise,
    traits={
        "images": "depends on the data that it is added to",
        "spatial": "correlates neighbouring pixels; not for points",
    },
)
"""
Entries are functions `f(noise, images, generator, **parameters) -> noise` on the whole global batch of an update, all
float32 of shape `(batch, channels, height, width)` or, for points, `(batch, dimension)`; `generator` is on the device of the
noise.
"""

register_noise = NOISES.register
"""Registers a noise, such a function, with the arguments of [`Registry.register`]."""


@NOISES.register("gaussian", description="standard normal, independent of everything", source="DDPM, arXiv 2006.11239")
def gaussian(noise: torch.Tensor, images: torch.Tensor | None, generator: torch.Generator) -> torch.Tensor:
    return noise


@NOISES.register(
    "immiscible",
    description="the same noise, assigned within the batch so that each image gets noise that is close to it (a linear "
    "assignment, on the CPU)",
    source="arXiv 2406.12303",
    traits=("images",),
)
def immiscible(noise: torch.Tensor, images: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """A permutation of the batch's noise with the smallest sum of distances. Waits for the device."""
    import torch
    from scipy.optimize import linear_sum_assignment

    distances = torch.cdist(images.flatten(1).float(), noise.flatten(1).float())
    _, order = linear_sum_assignment(distances.cpu().numpy())
    return noise[torch.from_numpy(order).to(noise.device)]


@NOISES.register(
    "offset",
    description="standard normal plus a constant for each image and channel, so that the mean brightness is noisy too",
    source="N. Guttenberg, Diffusion with offset noise, 2023",
    parameters=(Parameter("strength", float, 0.1, "standard deviation of the constant", "(0, inf)"),),
    traits=("spatial",),
)
def offset(
    noise: torch.Tensor, images: torch.Tensor | None, generator: torch.Generator | None, strength: float
) -> torch.Tensor:
    import torch

    constants = torch.randn(
        (*noise.shape[:2], *(1 for _ in noise.shape[2:])), generator=generator, device=noise.device, dtype=noise.dtype
    )
    return noise + strength * constants


@NOISES.register(
    "pyramid",
    description="standard normal plus noise of ever lower resolution, rescaled to a variance of 1",
    source="J. Whitaker, Multi-resolution noise for diffusion model training, 2023",
    parameters=(
        Parameter("discount", float, 0.8, "factor on the strength at each halving of the resolution", "(0, 1)"),
        Parameter("num_levels", int, 10, "largest number of halvings; they end at one pixel", "[1, inf)"),
    ),
    traits=("spatial",),
)
def pyramid(
    noise: torch.Tensor, images: torch.Tensor | None, generator: torch.Generator | None, discount: float, num_levels: int
) -> torch.Tensor:
    """Noise at 1, 1/2, 1/4, ... of the resolution, enlarged bilinearly; the batch is divided by its root mean square."""
    import torch
    import torch.nn.functional as F

    total = noise.clone()
    height, width = noise.shape[-2:]
    for level in range(1, num_levels + 1):
        height, width = max(1, height // 2), max(1, width // 2)
        coarse = torch.randn((*noise.shape[:2], height, width), generator=generator, device=noise.device, dtype=noise.dtype)
        total += discount**level * F.interpolate(coarse, size=noise.shape[-2:], mode="bilinear")
        if (height, width) == (1, 1):
            break
    return total / total.square().mean().sqrt()
