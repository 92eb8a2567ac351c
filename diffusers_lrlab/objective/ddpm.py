"""DDPM: variance-preserving noise, and a model that predicts the noise, the data or the velocity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler

from ..core.errors import LabError
from ..core.words import counted
from ..timesteps.noise_levels import NoiseLevels, find_prediction, noise_levels
from .process import NoiseProcess


class DDPM(NoiseProcess):
    """The process of a diffusers scheduler of the DDPM family, whose `prediction_type` says what the model predicts."""

    scheduler_options: ClassVar = {
        "prediction_type": "--prediction_type",
        "num_train_timesteps": "--ddpm_num_steps",
        "beta_schedule": "--ddpm_beta_schedule",
    }
    terminal_noise_hint = "Raise --ddpm_num_steps, or use --ddpm_beta_schedule squaredcos_cap_v2."

    def __init__(self, scheduler: Any):
        self.scheduler, self.prediction_type = scheduler, scheduler.config.prediction_type
        find_prediction(self.prediction_type)

    @cached_property
    def levels(self) -> NoiseLevels:  # type: ignore[override]
        return noise_levels(self.scheduler)

    @classmethod
    def of(cls, num_steps: int, beta_schedule: str, prediction_type: str, is_bounded: bool) -> DDPM:
        """By the parameters of its row; samples of bounded data are clipped to [-1, 1] at each step."""
        try:
            scheduler = DDPMScheduler(
                num_train_timesteps=num_steps,
                beta_schedule=beta_schedule,
                prediction_type=prediction_type,
                clip_sample=is_bounded,
            )
        except NotImplementedError:  # "laplace" came with diffusers 0.37
            raise LabError(
                f"--ddpm_beta_schedule {beta_schedule!r} is not in diffusers {diffusers.__version__}. Choose another, or "
                "install a newer version: pip install -U diffusers"
            ) from None
        return cls(scheduler)

    @property
    def built_in_weights(self) -> np.ndarray:
        """SNR for `sample`, as in diffusers' example: the error of the noise that the predicted image implies."""
        return find_prediction(self.prediction_type).plain(self.levels.snr)

    def add_noise(self, data: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        return self.scheduler.add_noise(data, noise, timesteps)

    def model_time(self, timesteps: torch.Tensor) -> torch.Tensor:
        return timesteps

    def describe(self) -> list[tuple[str, str]]:
        config = self.scheduler.config
        noise_schedule = f"{counted(config.num_train_timesteps, 'timestep')}, {config.beta_schedule}"
        return [("Noise schedule", noise_schedule), ("Prediction type", self.prediction_type)]

    def contradictions(self, saved: Mapping[str, Any]) -> list[str]:
        name = str(saved.get("_class_name"))
        if name.startswith("FlowMatch"):
            return [f"is a {name}, which is for flow matching. Choose --objective flow_matching, or another model."]
        return super().contradictions(saved)

    def prediction_losses(
        self, prediction: torch.Tensor, data: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        target = noise
        if self.prediction_type == "sample":
            target = data
        elif self.prediction_type == "v_prediction":
            target = self.scheduler.get_velocity(data, noise, timesteps)
        errors = F.mse_loss(prediction.float(), target.float(), reduction="none").mean(dim=tuple(range(1, data.ndim)))
        if self.prediction_type == "sample":
            alphas = self.scheduler.alphas_cumprod.to(timesteps.device)[timesteps]
            errors = errors * (alphas / (1 - alphas))
        return errors

    def model_input(self, scaled: torch.Tensor, sigma: float) -> torch.Tensor:
        return scaled / math.sqrt(1 + sigma**2)

    def predicted_noise(self, prediction: torch.Tensor, scaled: torch.Tensor, sigma: float) -> torch.Tensor:
        if self.prediction_type == "epsilon":
            return prediction
        if self.prediction_type == "sample":
            return (scaled - prediction) / sigma
        # v = alpha * epsilon - sigma_vp * x0, so epsilon = alpha * v + sigma_vp * x_t.
        return (prediction + sigma * self.model_input(scaled, sigma)) / math.sqrt(1 + sigma**2)
