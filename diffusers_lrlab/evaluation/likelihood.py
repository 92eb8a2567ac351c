"""How likely points are under a diffusion model: the probability-flow ODE, with its divergence exact."""

import math
from typing import Any

import numpy as np
import torch

from ..objective.process import NoiseProcess


class _NoisePrediction:
    r"""
    The model as a function of scaled points \(\bar x = x / \sqrt{\bar\alpha}\) and the noise level
    \(\sigma = \sqrt{(1 - \bar\alpha) / \bar\alpha}\), between the timesteps too.
    """

    def __init__(self, model: Any, process: NoiseProcess):
        self.model, self.process = model, process
        alphas = torch.from_numpy(process.levels.alphas_cumprod)
        if not 0 < float(alphas[-1]) < float(alphas[0]) < 1:
            raise ValueError(
                "The noise schedule has a single timestep, no noise at its first timestep or no signal at its last one."
            )
        self.log_sigmas = ((1 - alphas).log() - alphas.log()) / 2

    def __call__(self, scaled: torch.Tensor, log_sigma: float) -> torch.Tensor:
        timestep = float(np.interp(log_sigma, self.log_sigmas.numpy(), np.arange(len(self.log_sigmas))))
        sigma = math.exp(log_sigma)
        timesteps = torch.full((len(scaled),), timestep, device=scaled.device)
        prediction = self.model(self.process.model_input(scaled, sigma).to(self.model.dtype), timesteps).sample.double()
        return self.process.predicted_noise(prediction, scaled, sigma)

    def with_divergence(self, scaled: torch.Tensor, log_sigma: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The prediction `(batch, dimension)`, and the sum of its derivatives by its own coordinates `(batch,)`."""
        with torch.enable_grad():
            scaled = scaled.detach().requires_grad_()
            prediction = self(scaled, log_sigma)
            divergence = torch.zeros(len(scaled), dtype=torch.float64, device=scaled.device)
            for axis in range(scaled.shape[1]):
                # Points do not see each other, so the gradient of a sum holds the derivative of each.
                (gradient,) = torch.autograd.grad(prediction[:, axis].sum(), scaled, retain_graph=True)
                divergence += gradient[:, axis]
        return prediction.detach(), divergence


def log_likelihood(
    model: Any, process: NoiseProcess, points: torch.Tensor, num_steps: int = 100, batch_size: int = 10_000
) -> torch.Tensor:
    r"""
    The log-density of points under the distribution that the model's probability-flow ODE makes of Gaussian noise.

    With \(\bar x = x / \sqrt{\bar\alpha}\) and \(\sigma = \sqrt{(1 - \bar\alpha) / \bar\alpha}\) the ODE is
    \(d\bar x / d\sigma = \epsilon(\bar x, \sigma)\) (DDIM, arXiv 2010.02502, eq. 14), along which \(\log p\) changes by
    \(-\mathrm{div}\,\epsilon\,d\sigma\) (arXiv 2011.13456, eq. 39). It is integrated from the noise
    level of the first timestep to that of the last by Heun's method, evenly in \(\log \sigma\), between timesteps by linear
    interpolation. There \(\bar x\) has the density of the noise that sampling starts from. So this is the density of what
    DDIM makes with many steps, with the noise of the first timestep still on it; ancestral sampling has another one.

    The model is in evaluation mode, and `points` `(num_points, dimension)` are on its device. The results are natural
    logarithms, float64 `(num_points,)`.

    The steps bias the density a little, which shows in small divergences: `benchmarks/likelihood_steps.py` measures it. It
    falls with the square of their number.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} is not allowed; use 1 or more.")
    predict = _NoisePrediction(model, process)
    grid = np.linspace(float(predict.log_sigmas[0]), float(predict.log_sigmas[-1]), num_steps + 1)
    logs = []
    for part in points.double().split(batch_size):
        scaled, dimension, total = part, part.shape[1], torch.zeros(len(part), dtype=torch.float64, device=part.device)
        slope, divergence = predict.with_divergence(scaled, grid[0])
        for before, after in zip(grid[:-1], grid[1:], strict=True):
            step = math.exp(after) - math.exp(before)
            trial, trial_divergence = predict.with_divergence(scaled + step * slope, after)
            scaled = scaled + step * (slope + trial) / 2
            # In log sigma: the divergence falls about as 1 / sigma, which a trapezoid in sigma overrates.
            total += (after - before) * (math.exp(before) * divergence + math.exp(after) * trial_divergence) / 2
            slope, divergence = predict.with_divergence(scaled, after)
        variance = 1 + math.exp(2 * grid[-1])
        log_prior = -(scaled**2).sum(dim=1) / (2 * variance) - dimension / 2 * math.log(2 * math.pi * variance)
        logs.append(log_prior + total)
    return torch.cat(logs)


def exact_kl(log_prob: np.ndarray, model_log_prob: np.ndarray) -> tuple[float, float]:
    r"""
    KL(data || model) from natural log-densities at the same points of the data: \(E[\log p - \log q]\).

    The two numbers are its mean, without bias, and its standard error, in bits.
    """
    first, second = np.asarray(log_prob, np.float64), np.asarray(model_log_prob, np.float64)
    if first.shape != second.shape or first.ndim != 1 or len(first) < 2:
        raise ValueError(f"Expected two arrays of as many numbers, 2 at least; got shapes {first.shape} and {second.shape}.")
    differences = (first - second) / math.log(2)
    return float(differences.mean()), float(differences.std(ddof=1) / math.sqrt(len(differences)))
