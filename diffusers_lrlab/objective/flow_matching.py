"""Flow matching: straight lines from data to noise, and a model that predicts their direction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler

from ..core.words import counted
from ..timesteps.noise_levels import FLOW_VELOCITY, flow_levels, flow_sigmas
from .process import NoiseProcess


class FlowMatching(NoiseProcess):
    r"""
    The process of diffusers' `FlowMatchEulerDiscreteScheduler` (arXiv 2209.03003, 2403.03206):
    \(x_t = (1 - \sigma) x_0 + \sigma \epsilon\), with the target \(\epsilon - x_0\).

    Timestep t of T has \(\tau = (t + 1) / T\) and \(\sigma = s \tau / (1 + (s - 1) \tau)\) for a shift s, and the model is
    given \(T \sigma\), as in sampling. The shift is static, since diffusers' dynamic one is a number of each call in
    sampling, which training ignores and `DDPMPipeline` does not pass.
    """

    prediction_type = FLOW_VELOCITY
    scheduler_options: ClassVar = {"num_train_timesteps": "num_steps of --objective", "shift": "shift of --objective"}

    def __init__(self, num_steps: int, shift: float, is_bounded: bool = False):
        self.scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=num_steps, shift=shift)
        self.levels = flow_levels(self.scheduler)
        alphas = torch.from_numpy(self.levels.inner_alphas_cumprod)
        # By timestep: the fraction of noise in float32, as the scheduler has it, and the logarithm of sigma / (1 - sigma).
        self._sigmas = torch.from_numpy(flow_sigmas(self.scheduler)).float()
        self._log_ratios = ((1 - alphas) / alphas).log() / 2
        self._on_devices: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def built_in_weights(self) -> np.ndarray:
        return np.ones(self.num_train_timesteps)

    def _tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Copied to a device once: copies would wait for it at every update."""
        if device not in self._on_devices:
            self._on_devices[device] = self._sigmas.to(device), self._log_ratios.to(device)
        return self._on_devices[device]

    def add_noise(self, data: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        sigma = self._tables(timesteps.device)[0][timesteps].to(data.dtype).view(-1, *[1] * (data.ndim - 1))
        return (1 - sigma) * data + sigma * noise

    def model_time(self, timesteps: torch.Tensor) -> torch.Tensor:
        sigmas, log_ratios = self._tables(timesteps.device)
        if not timesteps.is_floating_point():
            return sigmas[timesteps] * self.num_train_timesteps
        below = timesteps.floor().long().clamp(max=max(0, self.num_train_timesteps - 2))
        above = (below + 1).clamp(max=self.num_train_timesteps - 1)
        log_ratio = torch.lerp(log_ratios[below], log_ratios[above], timesteps.double() - below)
        return log_ratio.sigmoid() * self.num_train_timesteps

    def describe(self) -> list[tuple[str, str]]:
        noise_schedule = f"{counted(self.num_train_timesteps, 'timestep')}, shift {self.scheduler.config.shift:g}"
        return [("Noise schedule", noise_schedule), ("Prediction type", "velocity (noise minus data)")]

    def contradictions(self, saved: Mapping[str, Any]) -> list[str]:
        name = saved.get("_class_name", type(self.scheduler).__name__)
        if "FlowMatch" not in name:
            return [f"is a {name}, which is not for flow matching. Choose its objective with --objective, or another model."]
        found = super().contradictions(saved)
        if saved.get("use_dynamic_shifting"):
            found.append(
                "has use_dynamic_shifting=True, but a run has a single shift. Give the one that it was sampled with: shift "
                "of --objective is exp(mu) in the usual exponential form."
            )
        return found

    def prediction_losses(
        self, prediction: torch.Tensor, data: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        precision = torch.promote_types(data.dtype, torch.float32)
        errors = F.mse_loss(prediction.to(precision), (noise - data).to(precision), reduction="none")
        return errors.mean(dim=tuple(range(1, data.ndim)))

    def model_input(self, scaled: torch.Tensor, sigma: float) -> torch.Tensor:
        return scaled / (1 + sigma)

    def predicted_noise(self, prediction: torch.Tensor, scaled: torch.Tensor, sigma: float) -> torch.Tensor:
        return (scaled + prediction) / (1 + sigma)
