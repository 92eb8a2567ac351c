"""The networks of a stack as one computation: one batched product for each layer, which autograd differentiates."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch


@torch.no_grad()
def stack_parameters(parameters: Iterable[Iterable[torch.Tensor]]) -> list[torch.Tensor]:
    """The parameters of all networks, `(members, ...)` each, in the order of a network."""
    return [torch.stack(own) for own in zip(*parameters, strict=True)]


def own_parameters(stacked: Sequence[torch.Tensor], member: int) -> list[torch.Tensor]:
    """The parameters of one network, as views."""
    return [values[member] for values in stacked]


def per_member(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Numbers `(members,)` in the precision of `like`, so that they are broadcast over its other dimensions."""
    return values.to(like).view(-1, *[1] * (like.ndim - 1))


class _Layer(torch.autograd.Function):
    """
    A ReLU, unless `is_first`, and a linear layer of each member, `(members, batch, in)` to `(members, batch, out)`.

    Autograd would transpose the gradients of weights, and torch's fused optimizers for CPUs are wrong unless gradients lie
    in memory as weights do. It would also take new memory for the gradient of the ReLU.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, is_first: bool) -> torch.Tensor:
        active = values if is_first else values.relu()
        ctx.save_for_backward(active, weight)
        return torch.baddbmm(bias[:, None], active, weight.mT)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        active, weight = ctx.saved_tensors
        through = None
        if ctx.needs_input_grad[0]:
            through = torch.bmm(gradient, weight)
            torch.ops.aten.threshold_backward.grad_input(through, active, 0, grad_input=through)
        return through, torch.bmm(gradient.mT, active), gradient.sum(1), None


def predict(model: Any, parameters: Sequence[torch.Tensor], points: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
    """
    Predictions of networks with the architecture of the [`MLPDenoiser`] `model`, by the operations of its `forward`:
    `(members, batch, dimension)` at timesteps `(members, batch)`. No operation mixes networks.
    """
    embedding = model.embed(points.flatten(0, 1), timesteps.flatten()).to(parameters[0].dtype)
    (first, *blocks, last) = zip(parameters[::2], parameters[1::2], strict=True)
    hidden = _Layer.apply(embedding.unflatten(0, points.shape[:2]), *first, True)
    for layer in blocks:
        hidden = _Layer.apply(hidden, *layer, False).add_(hidden)
    return _Layer.apply(hidden, *last, False)


def clip(gradients: Sequence[torch.Tensor], max_norms: torch.Tensor) -> torch.Tensor:
    """
    Clips the gradient of each network as `torch.nn.utils.clip_grad_norm_` does, and returns the norms before clipping.

    `max_norms` is `(members,)`, infinite for networks without clipping.
    """
    # Members are the first dimension, so that the order of a sum does not depend on their number.
    parts = torch.stack([torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients], dim=1)
    norms = torch.linalg.vector_norm(parts, dim=1)
    factors = (max_norms / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(per_member(factors, gradient))
    return norms
