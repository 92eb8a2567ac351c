"""How smooth the loss is around weights, and between the weights of two runs."""

from typing import Any

import numpy as np
import torch

from ..core.streams import stream_generator

_POINTS = 2000
_ITERATIONS = 30
_TOLERANCE = 1e-3


def _mean_loss(run: Any, model: Any) -> torch.Tensor:
    """Of the first held-out points, with the timesteps and noise of validation."""
    validation, part = run.validation, slice(0, _POINTS)
    parts = (validation.batch[part], validation.noise[part], validation.timesteps[part])
    return validation.process.losses(model, *parts).mean()


def sharpness(run: Any) -> float:
    """
    The eigenvalue of largest magnitude of the Hessian of the held-out loss at the weights that the model carries.

    Power iteration on Hessian-vector products (Pearlmutter, 1994), on 2,000 points at most, until the eigenvalue changes by
    less than a thousandth, or 30 times.
    """
    model = run.model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    generator = stream_generator(0, "sharpness", device=model.device)
    vector = [torch.randn(p.shape, generator=generator, device=p.device, dtype=p.dtype) for p in parameters]
    gradients = torch.autograd.grad(_mean_loss(run, model), parameters, create_graph=True)
    value = 0.0
    for _ in range(_ITERATIONS):
        norm = torch.sqrt(sum((part.square().sum() for part in vector), torch.zeros((), device=model.device)))
        vector = [part / norm for part in vector]
        product = torch.autograd.grad(gradients, parameters, vector, retain_graph=True)
        before, value = value, sum(float((a * b).sum()) for a, b in zip(product, vector, strict=True))
        vector = list(product)
        if abs(value - before) <= _TOLERANCE * abs(value):
            break
    return value


def losses_between(
    model: Any, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], loss: Any, num_points: int = 11
) -> np.ndarray:
    """
    The loss at evenly spread points of the straight line between two state dicts, both ends included.

    `loss` is a function of the model, such as a mean of a [`ValidationLoss`]; the model carries the last weights afterwards.
    """
    losses = []
    for share in np.linspace(0, 1, num_points):
        model.load_state_dict({name: torch.lerp(first[name], second[name], float(share)) for name in first})
        with torch.no_grad():
            losses.append(float(loss(model)))
    return np.array(losses)


def curvature(losses: np.ndarray) -> float:
    """The second difference of the loss at the two ends of a line of length 1, their mean."""
    step = 1 / (len(losses) - 1)
    ends = (losses[0] - 2 * losses[1] + losses[2], losses[-1] - 2 * losses[-2] + losses[-3])
    return float(np.mean(ends) / step**2)


def barrier(losses: np.ndarray) -> float:
    """How far the loss along a line rises above the straight line between its ends (arXiv 1912.05671); 0 if nowhere."""
    return float(np.max(losses - np.linspace(losses[0], losses[-1], len(losses))).clip(min=0))
