"""The noise of each timestep, which every timestep sampler and loss weighting is a function of.

Timesteps are indices `0 ... T - 1` and grow with the noise, as in diffusers' DDPM schedulers. No torch in here: the
command line lists the names before it is imported.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import LabError

_MOST_TIMESTEPS = 10_000_000


@dataclass(frozen=True)
class NoiseLevels:
    """The noise of each timestep."""

    alphas_cumprod: np.ndarray  # the share of the image's variance that is left, float64 of shape (T,), falling

    @property
    def num_train_timesteps(self) -> int:
        return len(self.alphas_cumprod)

    @cached_property
    def position(self) -> np.ndarray:
        """`t / T`, in [0, 1)."""
        return np.arange(self.num_train_timesteps) / self.num_train_timesteps

    @cached_property
    def centre(self) -> np.ndarray:
        """`(t + 1/2) / T`: the middle of each timestep's share of [0, 1]."""
        return (np.arange(self.num_train_timesteps) + 0.5) / self.num_train_timesteps

    @cached_property
    def borders(self) -> np.ndarray:
        """`0, 1 / T, ... 1`: where the shares meet, of shape `(T + 1,)`."""
        return np.arange(self.num_train_timesteps + 1) / self.num_train_timesteps

    @cached_property
    def snr(self) -> np.ndarray:
        """Signal-to-noise ratio: `alphas_cumprod / (1 - alphas_cumprod)`."""
        return self.alphas_cumprod / (1 - self.alphas_cumprod)

    @cached_property
    def noise_rate(self) -> np.ndarray:
        """What the noise is multiplied by: `sqrt(1 - alphas_cumprod)`."""
        return np.sqrt(1 - self.alphas_cumprod)

    @cached_property
    def log_sigma_borders(self) -> np.ndarray:
        """Where the timesteps' shares of the logarithm of `sigma = 1 / sqrt(SNR)` meet: midpoints, of shape `(T + 1,)`."""
        # A terminal SNR of zero has no logarithm.
        log_sigma = -0.5 * np.log(np.clip(self.snr, 1e-12, 1e12))
        if len(log_sigma) == 1:
            return np.array([-math.inf, math.inf])
        middles = (log_sigma[1:] + log_sigma[:-1]) / 2
        return np.concatenate([[2 * log_sigma[0] - middles[0]], middles, [2 * log_sigma[-1] - middles[-1]]])


def noise_levels(noise_scheduler: Any = None, num_train_timesteps: int | None = None) -> NoiseLevels:
    """
    The noise of each timestep of a diffusers scheduler with `alphas_cumprod`.

    Without a scheduler, that of `DDPMScheduler()` (linear betas) with `num_train_timesteps`, which else must agree with it.
    """
    if num_train_timesteps is not None and (
        not isinstance(num_train_timesteps, Integral)
        or isinstance(num_train_timesteps, bool)
        or not 1 <= num_train_timesteps <= _MOST_TIMESTEPS
    ):
        raise LabError(
            f"num_train_timesteps={num_train_timesteps} is not allowed; it is a whole number of 1 or more, "
            f"{_MOST_TIMESTEPS:,} at most."
        )
    if noise_scheduler is None:
        if num_train_timesteps is None:
            raise LabError("How many timesteps are there? Give noise_scheduler, or num_train_timesteps such as 1000.")
        betas = np.linspace(1e-4, 0.02, num_train_timesteps, dtype=np.float64)
        return NoiseLevels(np.cumprod(1 - betas))
    alphas = getattr(noise_scheduler, "alphas_cumprod", None)
    if alphas is None:
        raise LabError(
            f"{type(noise_scheduler).__name__} has no alphas_cumprod, from which the noise of a timestep follows. Give a "
            "scheduler of the DDPM family (DDPMScheduler, DDIMScheduler, ...), or num_train_timesteps alone."
        )
    if num_train_timesteps not in (None, len(alphas)):
        raise LabError(
            f"num_train_timesteps={num_train_timesteps} is not what the noise scheduler has, {len(alphas)}. Drop one."
        )
    return NoiseLevels(np.asarray(alphas.cpu() if hasattr(alphas, "cpu") else alphas, dtype=np.float64))


class Prediction(NamedTuple):
    """What a model predicts, as functions of SNR."""

    error: Callable[[np.ndarray], np.ndarray]  # its squared error, in units of the image's error of the same prediction
    plain: Callable[[np.ndarray], np.ndarray]  # the weights on it where nobody chose any


# arXiv 2202.00512, section 4. An objective adds its own.
PREDICTIONS = {
    "epsilon": Prediction(error=lambda snr: snr, plain=np.ones_like),
    "sample": Prediction(error=np.ones_like, plain=lambda snr: snr),
    "v_prediction": Prediction(error=lambda snr: snr + 1, plain=np.ones_like),
    # Noise minus data of flow matching, whose mixture is (1 - sigma) * data + sigma * noise: sqrt(SNR) = 1 / sigma - 1.
    "flow_velocity": Prediction(error=lambda snr: (1 + np.sqrt(snr)) ** 2, plain=np.ones_like),
}


def find_prediction(prediction_type: str) -> Prediction:
    if prediction_type not in PREDICTIONS:
        raise LabError(f"Unknown prediction type {prediction_type!r}; known: {', '.join(PREDICTIONS)}.")
    return PREDICTIONS[prediction_type]


def convert_weights(weights: np.ndarray, snr: np.ndarray, prediction_type: str, of_images: bool = False) -> np.ndarray:
    """
    Weights on the squared error of the noise, or of the image, as those on the squared error of what the model predicts.

    Where SNR is 0, the noise says nothing about the image; there, weights on images (`of_images`) become 1 on the noise, as
    in the code of Min-SNR.
    """
    error = find_prediction(prediction_type).error(snr)
    if prediction_type == "epsilon" and not of_images:
        return weights
    weights = weights if of_images else weights * snr
    return np.divide(weights, error, out=np.ones_like(snr), where=error > 0)
