"""Densities over ln sigma, constant between borders, and the probabilities of timesteps that they give.

`sigma = 1 / sqrt(SNR)` is the noise level of EDM; under flow matching it is the fraction of noise over that of data.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .noise_levels import NoiseLevels


@dataclass(frozen=True)
class LogSigma:
    """ln sigma of the timesteps that have a signal. Pure noise, whose sigma is infinite, has no probability here."""

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
