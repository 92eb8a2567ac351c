"""
The noise process: how data become noise, and what a model learns of it.

Everything outside this room speaks of a timestep's noise level (alpha, sigma, SNR) and asks the process for the rest. An
objective is a class of its own file and a row here.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from ..core.registry import Registry
from ..timesteps.noise_levels import NoiseLevels

if TYPE_CHECKING:
    import numpy as np
    import torch

OBJECTIVES = Registry("objective")
"""Entries are `"module:factory"` of a [`NoiseProcess`], so that nothing heavy is imported for the names alone."""

OBJECTIVES.register(
    "ddpm",
    description="noise, image or velocity, predicted at the timesteps of a variance-preserving noise schedule",
    source="DDPM, arXiv 2006.11239; velocity: arXiv 2202.00512",
)("diffusers_lrlab.objective.ddpm:DDPM.of")


def make_process(objective: str, **arguments: Any) -> NoiseProcess:
    """The noise process of an objective, in `OBJECTIVES`, by its own arguments."""
    return pkgutil.resolve_name(OBJECTIVES[objective].factory)(**arguments)


class NoiseProcess(ABC):
    """Data with noise at timesteps `0 ... T - 1`, which grow with the noise, and the loss of a prediction."""

    levels: NoiseLevels  # of each timestep
    prediction_type: str
    scheduler: Any  # of diffusers; it samples, and is saved with the pipeline

    @property
    def num_train_timesteps(self) -> int:
        return self.levels.num_train_timesteps

    @property
    @abstractmethod
    def built_in_weights(self) -> np.ndarray:
        """What [`prediction_losses`] multiplies the squared error at each timestep by: float64 of shape `(T,)`."""

    @abstractmethod
    def add_noise(self, data: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """What the model sees: data and standard normal noise of one shape, timesteps int64 of shape `(batch,)`."""

    @abstractmethod
    def prediction_losses(
        self, prediction: torch.Tensor, data: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """The loss of each prediction, means over pixels or coordinates: float32 of shape `(batch,)`."""

    def losses(self, model: Any, data: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """[`prediction_losses`] of a model that is called as `model(noisy, timesteps).sample`."""
        return self.prediction_losses(
            model(self.add_noise(data, noise, timesteps), timesteps).sample, data, noise, timesteps
        )

    # --- at any noise level, between timesteps too: `scaled` is data + sigma * noise, sigma = 1 / sqrt(SNR) --------------

    @abstractmethod
    def model_input(self, scaled: torch.Tensor, sigma: float) -> torch.Tensor:
        """What the model sees of `scaled`."""

    @abstractmethod
    def predicted_noise(self, prediction: torch.Tensor, scaled: torch.Tensor, sigma: float) -> torch.Tensor:
        """The noise in `scaled` that a prediction implies."""
