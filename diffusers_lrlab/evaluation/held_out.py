"""A model on held-out data: the validation loss, and the likelihood of points by the probability-flow ODE."""

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..core.streams import block_randn, random_states_kept, stream_generator
from ..core.values import COUNT
from ..data.batch import Batch
from ..objective.process import NoiseProcess

# The same for every seed of a run, so that validation losses of different runs use the same images, timesteps and noise.
VALIDATION_SEED = 0

NUM_STEPS = 40
"""Steps of the probability-flow ODE, each of four evaluations of the model."""


class ValidationLoss:
    """
    The loss of a noise process on held-out examples, as a function of the model alone: it has its own random streams, so
    that it does not disturb training. `draw` chooses one of many draws of timesteps and noise.
    """

    def __init__(self, batch: Batch, process: NoiseProcess, batch_size: int, device: torch.device, draw: int = 0):
        self.batch = batch.to(device)
        self.process, self.batch_size = process, batch_size
        num_images, num_timesteps = len(batch), process.num_train_timesteps
        # Evenly spread over all timesteps, in an order that has nothing to do with that of the images.
        spread = (torch.arange(num_images) * 2 + 1) * num_timesteps // (2 * num_images)
        counters = (draw,) if draw else ()
        generator = stream_generator(VALIDATION_SEED, "validation-timesteps", *counters)
        order = torch.randperm(num_images, generator=generator)
        self.timesteps = spread[order].to(device)
        shape = tuple(batch.data.shape[1:])
        self.noise = block_randn(VALIDATION_SEED, "validation-noise", draw, range(num_images), shape, "cpu").to(device)

    def try_one(self, model: Any) -> None:
        """Raises a `LabError` if the model, in evaluation mode, predicts what has no loss; one image is enough for that."""
        with random_states_kept():
            self._losses(model, [slice(0, 1)])

    def __call__(self, model: Any) -> np.ndarray:
        """The loss of each image, float64 `(num_images,)`, in evaluation mode; the model's mode is restored."""
        starts = range(0, len(self.batch), self.batch_size)
        losses = self._losses(model, [slice(start, start + self.batch_size) for start in starts])
        return losses.double().cpu().numpy()

    @torch.no_grad()
    def _losses(self, model: Any, parts: list[slice]) -> torch.Tensor:
        was_training = model.training
        model.eval()
        losses = [self.process.losses(model, self.batch[part], self.noise[part], self.timesteps[part]) for part in parts]
        model.train(was_training)
        return torch.cat(losses)


# --- likelihood ------------------------------------------------------------------------------------------------------


class _NoisePrediction:
    r"""
    The model as a function of scaled points \(\bar x = x / \sqrt{\bar\alpha}\) and the noise level
    \(\sigma = \sqrt{(1 - \bar\alpha) / \bar\alpha}\), between the timesteps too.
    """

    def __init__(self, model: Any, process: NoiseProcess):
        self.model, self.process = model, process
        alphas = torch.from_numpy(process.levels.inner_alphas_cumprod)
        if not alphas[-1] < alphas[0]:
            raise ValueError(f"The noise level of all timesteps ({len(alphas)}) is the same; two levels are needed.")
        self.log_sigmas = ((1 - alphas).log() - alphas.log()) / 2

    @cached_property
    def dtype(self) -> torch.dtype:
        """That of the model, which looks for it in all its modules."""
        return self.model.dtype

    def __call__(self, scaled: torch.Tensor, log_sigma: float) -> torch.Tensor:
        timestep = float(np.interp(log_sigma, self.log_sigmas.numpy(), np.arange(len(self.log_sigmas))))
        sigma = math.exp(log_sigma)
        times = self.process.model_time(torch.full((len(scaled),), timestep, device=scaled.device))
        prediction = self.model(self.process.model_input(scaled, sigma).to(self.dtype), times).sample.double()
        return self.process.predicted_noise(prediction, scaled, sigma)

    def flow(self, state: torch.Tensor, log_sigma: float) -> torch.Tensor:
        r"""
        Derivatives by \(\log \sigma\) of \(\bar x / \sqrt{1 + \sigma^2}\), in the first columns of `state`, and of the
        logarithm of a volume that moves with it, in the last one.
        """
        sigma, scale = math.exp(log_sigma), _scale(log_sigma)
        points, shrinking = state[:, :-1], (sigma / scale) ** 2
        noise, divergence = self.with_divergence(scale * points, log_sigma)
        volume = sigma * divergence - points.shape[1] * shrinking
        return torch.cat([sigma / scale * noise - shrinking * points, volume[:, None]], dim=1)

    def flow_by_ratio(self, state: torch.Tensor, ratio: float) -> torch.Tensor:
        r"""[`flow`], by \(-\mathrm{arsinh}(1 / \sigma)\): like \(\log \sigma\) at low noise, and 0 at pure noise."""
        sigma = -1 / math.sinh(ratio)
        return math.hypot(1, sigma) * self.flow(state, math.log(sigma))

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


def log_likelihood(model: Any, process: NoiseProcess, points: torch.Tensor, num_steps: int = NUM_STEPS) -> torch.Tensor:
    r"""
    The log-density of points under the distribution that the model's probability-flow ODE makes of Gaussian noise.

    With \(\bar x = x / \sqrt{\bar\alpha}\) and \(\sigma = \sqrt{(1 - \bar\alpha) / \bar\alpha}\) the ODE is \(d\bar x /
    d\sigma = \epsilon(\bar x, \sigma)\) (DDIM, arXiv 2010.02502, eq. 14), along which \(\log p\) changes by
    \(-\mathrm{div}\,\epsilon\,d\sigma\) (arXiv 2011.13456, eq. 39). It is integrated for \(\bar x / \sqrt{1 + \sigma^2}\),
    from the noise level of the first timestep to that of the last, in even steps of \(\log \sigma\), by the classical
    Runge-Kutta method; the timestep is interpolated linearly. A process that ends in pure noise, such as flow matching, has
    even steps of \(-\mathrm{arsinh}(1 / \sigma)\) instead, which end at 0.

    At the last timestep this variable has the standard normal density of the noise that sampling starts from. So this is
    the density of what the deterministic sampler (DDIM, or Euler's method of flow matching) makes with many steps, with the
    noise of the first timestep still on it; ancestral sampling has another one.

    The model is in evaluation mode, and `points` `(num_points, dimension)` are on its device. The results are natural
    logarithms, float64 `(num_points,)`.

    A step evaluates the model four times. For a smooth model the error falls with the fourth power of the number of steps.
    The divergence of a network with ReLUs jumps, which leaves an error of either sign at each point.
    `benchmarks/likelihood_steps.py` measures it for the default objective; [`exact_kl`] includes an estimate of the bias in
    its error.
    """
    COUNT.check("num_steps", num_steps, "each evaluates the model four times")
    predict = _NoisePrediction(model, process)
    first, last = float(predict.log_sigmas[0]), float(predict.log_sigmas[-1])
    slope: Callable[[torch.Tensor, float], torch.Tensor] = predict.flow
    start, end = first, last
    if process.levels.alphas_cumprod[-1] == 0:
        slope, start, end = predict.flow_by_ratio, -math.asinh(math.exp(-first)), -math.asinh(math.exp(-last))
    step, dimension, points = (end - start) / num_steps, points.shape[1], points.double()
    # The last column: how much the logarithm of the volume has changed.
    state = torch.cat([points / _scale(first), points.new_zeros(len(points), 1)], dim=1)
    for number in range(num_steps):
        state = _runge_kutta_step(slope, state, start + number * step, step)
    log_prior = -(state[:, :-1] ** 2).sum(dim=1) / 2 - dimension / 2 * math.log(2 * math.pi)
    return log_prior + state[:, -1] - dimension * math.log(_scale(first))


def _scale(log_sigma: float) -> float:
    r"""\(\sqrt{1 + \sigma^2}\)."""
    return math.hypot(1, math.exp(log_sigma))


def _runge_kutta_step(
    slope: Callable[[torch.Tensor, float], torch.Tensor], state: torch.Tensor, at: float, step: float
) -> torch.Tensor:
    first = slope(state, at)
    second = slope(state + step / 2 * first, at + step / 2)
    third = slope(state + step / 2 * second, at + step / 2)
    return state + step / 6 * (first + 2 * second + 2 * third + slope(state + step * third, at + step))


def exact_kl(log_prob: np.ndarray, model_log_prob: np.ndarray, half_steps: np.ndarray | None = None) -> tuple[float, float]:
    r"""
    KL(data || model) from natural log-densities at the same points of the data: \(E[\log p - \log q]\), in bits.

    Args:
        log_prob (`np.ndarray`): Of the data, of shape `(num_points,)`.
        model_log_prob (`np.ndarray`): Of the model, of shape `(num_points,)`.
        half_steps (`np.ndarray`, *optional*): Of the model by half as many steps, at the first of these points.

    Returns: The mean, and its standard error: that of the points, and the bias of the steps as the second part of the root
    of a sum of squares, if `half_steps` are given. The bias is at most what halving the steps adds, wherever more steps
    help at all; the square of what it adds on average is estimated without the spread of the points.
    """
    first, second = np.asarray(log_prob, np.float64), np.asarray(model_log_prob, np.float64)
    if first.shape != second.shape or first.ndim != 1 or len(first) < 2:
        raise ValueError(f"Expected two arrays of the same length, at least 2; got shapes {first.shape} and {second.shape}.")
    differences = (first - second) / math.log(2)
    squared_error = differences.var(ddof=1) / len(differences)
    if half_steps is not None:
        added = (second[: len(half_steps)] - np.asarray(half_steps, np.float64)) / math.log(2)
        squared_error += max(0.0, added.mean() ** 2 - added.var(ddof=1) / len(added))
    return float(differences.mean()), math.sqrt(squared_error)
