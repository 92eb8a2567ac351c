"""How smooth the loss is around weights."""

from typing import Any

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
