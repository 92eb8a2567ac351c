"""The noise processes of DDPM and of flow matching."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import numpy as np

from ..core.errors import LabError
from ..core.registry import Parameter
from ..core.words import counted
from ..timesteps.noise_levels import FLOW_VELOCITY, NoiseLevels, find_prediction, flow_levels, flow_sigmas, noise_levels
from .process import DEFAULT_OBJECTIVE, OBJECTIVES, BetaSchedule, NoiseProcess, PredictionType

if TYPE_CHECKING:
    import torch


class DDPM(NoiseProcess):
    """
    Variance-preserving noise of a diffusers scheduler of the DDPM family, whose `prediction_type` says what the model
    predicts.
    """

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
        import torch.nn.functional as F

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


@OBJECTIVES.register(
    DEFAULT_OBJECTIVE,
    description="noise, image or velocity, predicted at the timesteps of a variance-preserving noise schedule",
    source="DDPM, arXiv 2006.11239; velocity: arXiv 2202.00512",
    parameters=(
        Parameter("beta_schedule", str, "linear", "noise schedule", choices=get_args(BetaSchedule)),
        Parameter("prediction_type", str, "epsilon", "what the model predicts", choices=get_args(PredictionType)),
    ),
)
def ddpm(num_steps: int, beta_schedule: str, prediction_type: str, is_bounded: bool) -> DDPM:
    """Samples of bounded data are clipped to [-1, 1] at each step."""
    import diffusers

    try:
        scheduler = diffusers.DDPMScheduler(
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
    return DDPM(scheduler)


@OBJECTIVES.register(
    "flow_matching",
    description="the velocity from data to noise, along straight lines",
    source="rectified flow, arXiv 2209.03003; the shift: Stable Diffusion 3, arXiv 2403.03206, section 5.3.2",
    parameters=(
        Parameter("shift", float, 1.0, "above 1, more of the timesteps have much noise; below 1, fewer", "(0, 1000]"),
        Parameter(
            "base_resolution", int, None,
            "side in pixels of images with a shift of 1; the shift becomes resolution / base_resolution", "[1, 1e5]",
        ),
    ),
)  # fmt: skip
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
        import torch
        from diffusers import FlowMatchEulerDiscreteScheduler

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
        log_ratio = log_ratios[below].lerp(log_ratios[above], timesteps.double() - below)
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
        import torch
        import torch.nn.functional as F

        precision = torch.promote_types(data.dtype, torch.float32)
        errors = F.mse_loss(prediction.to(precision), (noise - data).to(precision), reduction="none")
        return errors.mean(dim=tuple(range(1, data.ndim)))

    def model_input(self, scaled: torch.Tensor, sigma: float) -> torch.Tensor:
        return scaled / (1 + sigma)

    def predicted_noise(self, prediction: torch.Tensor, scaled: torch.Tensor, sigma: float) -> torch.Tensor:
        return (scaled + prediction) / (1 + sigma)
