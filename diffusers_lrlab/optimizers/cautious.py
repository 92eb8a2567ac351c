"""
Cautious weight decay (arXiv 2510.12402): w <- w - lr (u + weight_decay [u w >= 0] w), for the update u of an optimizer.

Only weights that the update brings closer to 0 decay, so that decay never opposes the gradient.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer


def decay_cautiously(weights: list[Tensor], updates: list[Tensor], amount: float) -> None:
    """Shrinks weights by the share `amount`, in place, except where the update has the opposite sign; it is subtracted."""
    factors = list(torch._foreach_sign(weights))
    torch._foreach_mul_(factors, torch._foreach_sign(updates))
    torch._foreach_add_(factors, 1)
    torch._foreach_clamp_max_(factors, 1)
    torch._foreach_mul_(factors, -amount)
    torch._foreach_add_(factors, 1)
    torch._foreach_mul_(weights, factors)


class CautiousDecay(Optimizer):
    """
    Makes the decoupled weight decay of an optimizer cautious, whose updates have the signs of a mean of gradients, the state
    `exp_avg`, with the decay `betas[0]`. It comes before the optimizer's class among the bases of a class.
    """

    plain_step: Callable[..., Any]  # of that class, without hooks, which are those of `step`

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            self._decay(group)
        try:
            for group in self.param_groups:
                group["weight_decay"] = 0.0
            type(self).plain_step(self)
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        return loss

    def _decay(self, group: dict[str, Any]) -> None:
        weights = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not weights or not group["weight_decay"]:
            return
        gradients: list[Any] = [weight.grad for weight in weights]
        if "exp_avg" in self.state[weights[0]]:  # else, at the first step, updates have the signs of gradients
            means = [self.state[weight]["exp_avg"] for weight in weights]
            gradients = list(torch._foreach_lerp(means, gradients, 1 - float(group["betas"][0])))
        decay_cautiously(weights, gradients, float(group["lr"]) * float(group["weight_decay"]))


class CautiousAdamW(CautiousDecay, AdamW):
    """`torch.optim.AdamW` with cautious weight decay."""

    plain_step = inspect.unwrap(AdamW.step)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._step_supports_amp_scaling = False  # a gradient scaler unscales gradients before the step, as decay needs
