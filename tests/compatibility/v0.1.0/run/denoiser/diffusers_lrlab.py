"""A denoiser of points: sinusoidal embeddings of coordinates and timestep, and a residual MLP.

This file imports nothing but torch and diffusers: a copy of it travels beside saved weights, so that they load where
diffusers_lrlab is not installed.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils import BaseOutput
from torch import nn

_LARGEST = 100_000  # of sizes and layers; more is a slip


@dataclass
class MLPDenoiserOutput(BaseOutput):
    """
    What [`MLPDenoiser`] returns.

    Args:
        sample (`torch.Tensor`): The prediction, of shape `(batch, dimension)`.
    """

    sample: torch.Tensor


class MLPDenoiser(ModelMixin, ConfigMixin):
    r"""
    A residual MLP on sinusoidal embeddings, for points in `dimension` dimensions.

    Each coordinate times `coordinate_scale`, and the timestep, become `embedding_size` numbers: the sines and cosines of
    their products with frequencies from 1 down to 1/10,000. Then come a linear layer, residual blocks
    \(h + W \mathrm{relu}(h) + b\), and a linear output. The defaults are the network of the 2d_diffusion template of
    SakanaAI's AI-Scientist: 296,450 parameters.

    Args:
        dimension (`int`, *optional*, defaults to 2): Coordinates of a point.
        hidden_size (`int`, *optional*, defaults to 256): Width of the residual blocks.
        num_layers (`int`, *optional*, defaults to 3): Number of residual blocks.
        embedding_size (`int`, *optional*, defaults to 128): Size of the embedding of a coordinate or the timestep; even, and
            at least 4.
        coordinate_scale (`float`, *optional*, defaults to 25.0): Factor on coordinates before they are embedded: the
            network easily sees details down to a size of about 1 / `coordinate_scale`.
    """

    # Saved pipelines name classes by their module; this one is where users find it, also in a copy of this file.
    __module__ = "diffusers_lrlab"

    @register_to_config
    def __init__(
        self,
        dimension: int = 2,
        hidden_size: int = 256,
        num_layers: int = 3,
        embedding_size: int = 128,
        coordinate_scale: float = 25.0,
    ):
        super().__init__()
        for name, value, least in (
            ("dimension", dimension, 1),
            ("hidden_size", hidden_size, 1),
            ("num_layers", num_layers, 0),
            ("embedding_size", embedding_size, 4),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
                raise ValueError(f"{name} must be a whole number from {least} to {_LARGEST}, got {value!r}.")
        if embedding_size % 2:
            raise ValueError(f"embedding_size={embedding_size} is odd; half of it are sines and half cosines.")
        is_number = isinstance(coordinate_scale, (int, float)) and not isinstance(coordinate_scale, bool)
        if not is_number or not 0 < coordinate_scale < math.inf:
            raise ValueError(f"coordinate_scale must be a number above 0, got {coordinate_scale!r}.")
        self.input = nn.Linear((dimension + 1) * embedding_size, hidden_size)
        self.blocks = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))
        self.output = nn.Linear(hidden_size, dimension)

    def angles(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        """Arguments of sines and cosines, for points `(batch, dimension)`: `(batch, dimension + 1, embedding_size / 2)`."""
        half = self.config.embedding_size // 2
        steps = torch.arange(half, dtype=torch.float32, device=sample.device)
        frequencies = torch.exp(steps * (-math.log(10_000) / (half - 1)))
        # One operation for all: many small ones cost more.
        values = torch.cat([sample.float() * self.config.coordinate_scale, timestep[:, None].float()], dim=1)
        return values[:, :, None] * frequencies

    def embed(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        """Sines and cosines of coordinates `(batch, dimension)` and timesteps `(batch,)`, in float32."""
        angles = self.angles(sample, timestep)
        return torch.cat([angles.sin(), angles.cos()], dim=2).flatten(1)

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor | float | int, return_dict: bool = True
    ) -> MLPDenoiserOutput | tuple[torch.Tensor]:
        """
        Predicts the noise of noisy points, or another prediction type of the pipeline's scheduler.

        Args:
            sample (`torch.Tensor`): Points, of shape `(batch, dimension)`.
            timestep (`torch.Tensor`, `float` or `int`): One for all points, or one for each, of shape `(batch,)`.
            return_dict (`bool`, *optional*, defaults to `True`): Return an [`MLPDenoiserOutput`] rather than a tuple.
        """
        if sample.ndim != 2 or sample.shape[1] != self.config.dimension:
            raise ValueError(f"Expected points of shape (batch, {self.config.dimension}), got {tuple(sample.shape)}.")
        timestep = torch.as_tensor(timestep, device=sample.device).expand(len(sample))
        hidden = self.input(self.embed(sample, timestep).to(self.input.weight.dtype))
        for block in self.blocks:
            hidden = hidden + block(F.relu(hidden))
        prediction = self.output(F.relu(hidden))
        return MLPDenoiserOutput(prediction) if return_dict else (prediction,)
