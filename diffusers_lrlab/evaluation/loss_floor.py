r"""The loss of a perfect model at each noise level, which no training can go below (arXiv 2506.13763).

A prediction is best if it is the mean of the data given the noisy input. For a finite set, that mean is a softmax over its
members. Here \(y = x + \sigma \epsilon\), with \(\sigma^2\) the inverse of the SNR, and errors are those of the data
\(x\); [`in_loss_units`] turns them into losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..core.streams import stream_generator
from ..objective.process import NoiseProcess
from ..timesteps.noise_levels import find_prediction

_CHUNK_PAIRS = 4_000_000  # queries times data at a time: 32 MB
_GRID = 1024  # cells along each axis of a density
_FEWEST_DRAWN = 100  # draws of noise; queries are repeated up to so many
_MOST_OUTPUTS = 2048  # points along each axis where its posterior mean is computed


def posterior_mean(noisy: torch.Tensor, data: torch.Tensor, sigma: float) -> torch.Tensor:
    r"""
    The mean of `data` (equally likely) given `noisy` \(= x + \sigma \epsilon\): \(\sum_i w_i x_i\) with \(w\) the softmax of
    \(-|y - x_i|^2 / 2 \sigma^2\) (arXiv 2506.13763, section 3).

    Both are float64, `(num, dimension)` and `(size, dimension)`; the result is like `noisy`.
    """
    half_squares = data.square().sum(dim=1) / 2
    size = max(1, _CHUNK_PAIRS // len(data))
    parts = [((part @ data.T - half_squares) / sigma**2).softmax(dim=1) @ data for part in noisy.split(size)]
    return torch.cat(parts)


@dataclass(frozen=True)
class _Linear:
    """The best linear prediction by mean and covariance of a set, whose error is known without drawing noise."""

    mean: torch.Tensor
    variances: torch.Tensor  # along the axes, the columns of `axes`
    axes: torch.Tensor

    @classmethod
    def of(cls, data: torch.Tensor) -> _Linear:
        return cls(data.mean(dim=0), *torch.linalg.eigh(torch.atleast_2d(torch.cov(data.T, correction=0))))

    def predict(self, noisy: torch.Tensor, sigma: float) -> torch.Tensor:
        kept = self.variances / (self.variances + sigma**2)
        return self.mean + (noisy - self.mean) @ self.axes * kept @ self.axes.T

    def error(self, queries: torch.Tensor, sigma: float) -> float:
        """Its mean squared error per value for `queries`, in expectation over the noise."""
        squares = ((queries - self.mean) @ self.axes).square().mean(dim=0)
        if np.isinf(sigma):
            return float(squares.mean())
        kept = self.variances / (self.variances + sigma**2)
        return float(((1 - kept) ** 2 * squares + kept**2 * sigma**2).mean())


def linear_errors(data: torch.Tensor, queries: torch.Tensor, sigmas: np.ndarray) -> np.ndarray:
    """Like [`set_errors`], for the best linear prediction by mean and covariance of `data`; exact for these queries."""
    linear = _Linear.of(data)
    return np.array([linear.error(queries, float(sigma)) for sigma in sigmas])


def set_errors(
    data: torch.Tensor, queries: torch.Tensor, sigmas: np.ndarray, num_drawn: int = 1000
) -> tuple[np.ndarray, np.ndarray]:
    """
    Mean squared errors per value of the posterior mean over `data` for noisy `queries`, and their standard errors.

    Data and queries are float64 `(size, dimension)`, sigmas positive or infinite `(levels,)`, as the results are. With
    `data` as queries, it is the floor of the loss on this set; with others, an upper bound of that of its distribution.
    Noise is drawn for at most `num_drawn` queries, and several times for each of a few. The linear prediction, whose error
    is known, is a control variate: at high noise little is left to chance.
    """
    linear = _Linear.of(data)
    drawn = queries[:: math.ceil(len(queries) / num_drawn)]
    drawn = drawn.repeat(math.ceil(_FEWEST_DRAWN / len(drawn)), 1)
    # The same noise at all levels: neighbouring levels differ by less.
    noise = torch.randn(drawn.shape, generator=stream_generator(0, "loss-floor"), dtype=torch.float64)
    means, deviations = [], []
    for sigma in map(float, sigmas):
        known = linear.error(queries, sigma)
        if np.isinf(sigma):
            means.append(known)
            deviations.append(0.0)
            continue
        noisy = drawn + sigma * noise
        errors, others = (
            (predicted - drawn).square().mean(dim=1)
            for predicted in (posterior_mean(noisy, data, sigma), linear.predict(noisy, sigma))
        )
        shared = torch.cov(torch.stack([errors, others]))
        errors = errors - shared[0, 1] / shared[1, 1].clamp(min=1e-300) * (others - known)
        means.append(max(0.0, float(errors.mean())))
        deviations.append(float(errors.std()) / len(drawn) ** 0.5)
    return np.array(means), np.array(deviations)


def density_errors(
    log_prob: Callable[[np.ndarray], np.ndarray], low: np.ndarray, high: np.ndarray, sigmas: np.ndarray
) -> np.ndarray | None:
    """
    Mean squared errors per coordinate of the posterior mean under a density in the plane: float64 `(levels,)`.

    By quadrature on a grid of 1,024 x 1,024 cells of the rectangle from `low` to `high`; NaN for noise that the grid does
    not resolve. `None` if the density does not integrate to 1 on it within 1 %.
    """
    step = (high - low) / _GRID
    nodes = [low[axis] + (np.arange(_GRID) + 0.5) * step[axis] for axis in (0, 1)]
    points = np.stack(np.meshgrid(*nodes, indexing="ij"), axis=-1).reshape(-1, 2)
    mass = np.exp(log_prob(points)).reshape(_GRID, _GRID) * step.prod()
    if not abs(mass.sum() - 1) < 0.01:
        return None
    mass /= mass.sum()
    first, second = nodes[0] - (mass.sum(axis=1) * nodes[0]).sum(), nodes[1] - (mass.sum(axis=0) * nodes[1]).sum()
    squares = first[:, None] ** 2 + second**2
    moments = [mass, mass * first[:, None], mass * second, mass * squares]
    found = []
    for sigma in sigmas:
        if np.isinf(sigma):
            found.append((mass * squares).sum() / 2)
        elif sigma < 1.5 * step.max():
            found.append(np.nan)
        else:
            found.append(_error_on_grid(moments, (first, second), float(sigma)))
    return np.array(found)


def _error_on_grid(moments: list[np.ndarray], nodes: tuple[np.ndarray, np.ndarray], sigma: float) -> float:
    """The integral of the posterior variance, from moments that are convolved with the noise."""
    kernels, cell = [], 1.0
    for axis in nodes:
        low, high = axis[0] - 6 * sigma, axis[-1] + 6 * sigma
        outputs, step = np.linspace(low, high, int(min(_MOST_OUTPUTS, 3 * (high - low) / sigma)), retstep=True)
        scaled = (outputs[:, None] - axis) / sigma
        kernels.append(np.exp(-0.5 * scaled**2) / (np.sqrt(2 * np.pi) * sigma))
        cell *= step
    density, first, second, squares = (kernels[0] @ moment @ kernels[1].T for moment in moments)
    squared_mean = np.divide(first**2 + second**2, density, out=np.zeros_like(density), where=density > 1e-300)
    return float((squares - squared_mean).sum() * cell / 2)


def in_loss_units(errors: np.ndarray, process: NoiseProcess, timesteps: np.ndarray) -> np.ndarray:
    """Errors of the data at timesteps, as unweighted losses of what the model predicts; both of shape `(levels,)`."""
    factors = find_prediction(process.prediction_type).error(process.levels.snr) * process.built_in_weights
    return errors * factors[timesteps]


def sigmas_of(process: NoiseProcess, timesteps: np.ndarray) -> np.ndarray:
    """The standard deviation of the noise at timesteps, for data of scale 1; infinite without signal."""
    with np.errstate(divide="ignore"):
        return 1 / np.sqrt(process.levels.snr[timesteps])
