"""The noise of each timestep, which every timestep sampler and loss weighting is a function of.

Timesteps are indices `0 ... T - 1` and grow with the noise, as in diffusers' `DDPMScheduler`. No torch in here: the
command line lists the names before it is imported.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import LabError
from ..core.values import Range

_TIMESTEPS = Range("[1, 1e7]", whole=True)
FLOW_VELOCITY = "flow_velocity"
"""The prediction type of flow matching, whose schedulers of diffusers name none."""
_NEAREST = 1e-12  # the distance from 0 or 1 of a share of the variance whose SNR has a finite logarithm


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
    def inner_alphas_cumprod(self) -> np.ndarray:
        """
        `alphas_cumprod` inside (0, 1), where the SNR has a finite logarithm: in place of 0 and 1, a number within 1e-12 of
        them that keeps the order. All others are as they are.
        """
        alphas = self.alphas_cumprod
        lowest = np.min(alphas, where=alphas > 0, initial=_NEAREST)
        return np.clip(alphas, lowest, np.max(alphas, where=alphas < 1, initial=1 - _NEAREST))

    @cached_property
    def snr(self) -> np.ndarray:
        """Signal-to-noise ratio: `alphas_cumprod / (1 - alphas_cumprod)`; 0 without signal, finite also without noise."""
        alphas = np.minimum(self.alphas_cumprod, self.inner_alphas_cumprod)
        return alphas / (1 - alphas)

    @cached_property
    def noise_rate(self) -> np.ndarray:
        """The factor of the noise: `sqrt(1 - alphas_cumprod)`."""
        return np.sqrt(1 - self.alphas_cumprod)

    @cached_property
    def flow_sigma(self) -> np.ndarray:
        """The fraction of noise in `(1 - sigma) * data + sigma * noise` of the same SNR: `1 / (1 + sqrt(SNR))`."""
        return 1 / (1 + np.sqrt(self.snr))

    @cached_property
    def log_sigma_borders(self) -> np.ndarray:
        """Where the timesteps' shares of the logarithm of `sigma = 1 / sqrt(SNR)` meet: midpoints, of shape `(T + 1,)`."""
        # A terminal SNR of zero has no logarithm.
        log_sigma = -0.5 * np.log(np.clip(self.snr, 1e-12, 1e12))
        if len(log_sigma) == 1:
            return np.array([-math.inf, math.inf])
        middles = (log_sigma[1:] + log_sigma[:-1]) / 2
        return np.concatenate([[2 * log_sigma[0] - middles[0]], middles, [2 * log_sigma[-1] - middles[-1]]])


@dataclass(frozen=True)
class LogSigma:
    """
    ln sigma of the timesteps that have a signal, for densities over it that are constant between borders.

    `sigma = 1 / sqrt(SNR)` is the noise level of EDM; under flow matching it is the fraction of noise over that of data.
    Pure noise, whose sigma is infinite, has no probability here.
    """

    levels: NoiseLevels

    @cached_property
    def timesteps(self) -> np.ndarray:
        """The timesteps with a signal: int64 of shape `(n,)`."""
        return np.flatnonzero(self.levels.snr > 0)

    @cached_property
    def values(self) -> np.ndarray:
        """Their ln sigma, rising: float64 of shape `(n,)`."""
        return np.asarray(-0.5 * np.log(self.levels.snr[self.timesteps]))

    @cached_property
    def borders(self) -> np.ndarray:
        """Where their shares of ln sigma meet: of shape `(n + 1,)`."""
        if len(self.timesteps) < 2:  # the share of a single one is any interval around it
            return np.append(self.values - 0.5, self.values[-1:] + 0.5)
        return NoiseLevels(self.levels.alphas_cumprod[self.timesteps]).log_sigma_borders

    def edges(self, num_parts: int, low: float | None = None, high: float | None = None) -> np.ndarray:
        """Borders of equal parts from `low` to `high`, by default of all noise levels: of shape `(num_parts + 1,)`."""
        first = self.borders[0] if low is None else low
        last = self.borders[-1] if high is None else high
        return np.linspace(first, last, num_parts + 1)

    def overlaps(self, edges: np.ndarray) -> np.ndarray:
        """How much of ln sigma each timestep shares with each part: float64 of shape `(T, num_parts)`."""
        upper = np.minimum(self.borders[1:, None], edges[None, 1:])
        lower = np.maximum(self.borders[:-1, None], edges[None, :-1])
        found = np.zeros((self.levels.num_train_timesteps, len(edges) - 1))
        found[self.timesteps] = np.clip(upper - lower, 0.0, None)
        return found


def noise_levels(noise_scheduler: Any = None, num_train_timesteps: int | None = None) -> NoiseLevels:
    """
    The noise of each timestep of a diffusers scheduler with `alphas_cumprod`, or of flow matching.

    Without a scheduler, that of `DDPMScheduler()` (linear betas) with `num_train_timesteps`, which else must agree with it.
    """
    _TIMESTEPS.check("num_train_timesteps", num_train_timesteps, "1000 is usual")
    if noise_scheduler is None:
        if num_train_timesteps is None:
            raise LabError("How many timesteps are there? Give noise_scheduler, or num_train_timesteps such as 1000.")
        betas = np.linspace(1e-4, 0.02, num_train_timesteps, dtype=np.float64)
        return NoiseLevels(np.cumprod(1 - betas))
    alphas = getattr(noise_scheduler, "alphas_cumprod", None)
    if is_flow(noise_scheduler):
        levels = flow_levels(noise_scheduler)
    elif alphas is not None:
        levels = NoiseLevels(np.asarray(alphas.cpu() if hasattr(alphas, "cpu") else alphas, dtype=np.float64))
    else:
        raise LabError(
            f"{type(noise_scheduler).__name__} has no alphas_cumprod, from which the noise of a timestep follows. Give a "
            "scheduler of the DDPM family (DDPMScheduler, DDIMScheduler, ...) or FlowMatchEulerDiscreteScheduler, or "
            "num_train_timesteps alone."
        )
    if num_train_timesteps not in (None, levels.num_train_timesteps):
        raise LabError(
            f"num_train_timesteps={num_train_timesteps} is not what the noise scheduler has, {levels.num_train_timesteps}. "
            "Drop one."
        )
    return levels


def is_flow(scheduler: Any) -> bool:
    """Whether a scheduler is one of flow matching."""
    return hasattr(scheduler, "sigmas") and hasattr(scheduler, "scale_noise") and not hasattr(scheduler, "alphas_cumprod")


def prediction_type_of(scheduler: Any) -> str | None:
    """The prediction type of a scheduler; `None` if it has none."""
    return FLOW_VELOCITY if is_flow(scheduler) else getattr(getattr(scheduler, "config", None), "prediction_type", None)


def flow_sigmas(scheduler: Any, sigma_is_of_data: bool = False) -> np.ndarray:
    """
    The fraction of noise at each timestep of a flow-matching scheduler, float64 of shape `(T,)`.

    Its table begins with the most noise, and timesteps count from the least: timestep t is entry T - 1 - t of the table.
    The table is that of training, also after `set_timesteps` has replaced the scheduler's own, and ends at 1 exactly where
    float32 rounds it.
    """
    table = type(scheduler).from_config(scheduler.config).sigmas if hasattr(scheduler, "from_config") else scheduler.sigmas
    sigmas = np.asarray(table[: scheduler.config.num_train_timesteps].cpu(), np.float64)
    sigmas = np.where(np.abs(sigmas - 1) < 1e-5, 1.0, sigmas)
    return 1 - sigmas if sigma_is_of_data else sigmas[::-1].copy()


def flow_levels(scheduler: Any, sigma_is_of_data: bool = False) -> NoiseLevels:
    """
    The noise levels of a flow-matching scheduler, which mixes `(1 - sigma) * data + sigma * noise`.

    Divided by `sqrt((1 - sigma)^2 + sigma^2)`, such a mixture is the state of a variance-preserving process of the same SNR,
    whose share of the data is returned.
    """
    sigmas = flow_sigmas(scheduler, sigma_is_of_data)
    return NoiseLevels((1 - sigmas) ** 2 / ((1 - sigmas) ** 2 + sigmas**2))


class Prediction(NamedTuple):
    """A prediction type, as functions of SNR."""

    error: Callable[[np.ndarray], np.ndarray]  # its squared error, in units of the image's error of the same prediction
    plain: Callable[[np.ndarray], np.ndarray]  # its weights without a loss weighting


# arXiv 2202.00512, section 4. An objective adds its own.
PREDICTIONS = {
    "epsilon": Prediction(error=lambda snr: snr, plain=np.ones_like),
    "sample": Prediction(error=np.ones_like, plain=lambda snr: snr),
    "v_prediction": Prediction(error=lambda snr: snr + 1, plain=np.ones_like),
    # Noise minus data of flow matching, whose mixture is (1 - sigma) * data + sigma * noise: sqrt(SNR) = 1 / sigma - 1.
    FLOW_VELOCITY: Prediction(error=lambda snr: (1 + np.sqrt(snr)) ** 2, plain=np.ones_like),
}


def find_prediction(prediction_type: str) -> Prediction:
    if prediction_type not in PREDICTIONS:
        raise LabError(f"Unknown prediction type {prediction_type!r}; known: {', '.join(PREDICTIONS)}.")
    return PREDICTIONS[prediction_type]


def convert_weights(weights: np.ndarray, snr: np.ndarray, prediction_type: str, of: str = "epsilon") -> np.ndarray:
    """
    Weights on the squared error of `of`, in `PREDICTIONS`, as those on the squared error of what the model predicts.

    At a fraction of noise sigma, errors of one prediction of the noise, the image and the velocity of flow matching are as
    `(1 - sigma)^2 : sigma^2 : 1`. Where SNR is 0, the noise says nothing about the image; there, weights on images become 1
    on the noise, as in the code of Min-SNR.
    """
    if prediction_type == of:
        return weights
    error = find_prediction(prediction_type).error(snr)
    return np.divide(weights * find_prediction(of).error(snr), error, out=np.ones_like(snr), where=error > 0)
