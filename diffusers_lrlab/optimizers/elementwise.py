"""
Elementwise optimizers for many runs at once: the numbers of a run are a row of a matrix.

Weights, gradients and states are `(runs, numbers)`; learning rate, momentum and all other settings are `(runs, 1)` in
float64. So one operation serves all runs, and nothing is read back from a device.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

# "lr", "momentum" (or beta1), "step" (the number of this update, from 1 on) and those of `settings_of`; no "weight_decay" if
# it is 0 in all runs.
Settings = Mapping[str, torch.Tensor]
State = Mapping[str, torch.Tensor]
_SETTINGS = {"eps", "alpha", "weight_decay"}


class Rule(NamedTuple):
    """
    An elementwise optimizer.

    `state` gives the names of state tensors for the optimizer's defaults. `step` changes weights and state, and may change
    gradients. `fused` does the same for runs with equal settings, given as lists of rows, by torch's CPU kernel, which reads
    everything once.
    """

    state: Callable[[Mapping[str, Any]], tuple[str, ...]]
    step: Callable[[Settings, torch.Tensor, torch.Tensor, State], None]
    fused: (
        Callable[[Mapping[str, float], Sequence[torch.Tensor], Sequence[torch.Tensor], Mapping[str, Any]], None] | None
    ) = None


def settings_of(group: Mapping[str, Any]) -> dict[str, float]:
    """The settings of a parameter group that no schedule changes, by name."""
    numbers = {name: float(value) for name, value in group.items() if type(value) in (int, float)}
    numbers = {name: value for name, value in numbers.items() if name in _SETTINGS}
    return numbers | ({"beta2": float(group["betas"][1])} if "betas" in group else {})


def _add_penalty(settings: Settings, weights: torch.Tensor, gradients: torch.Tensor) -> None:
    if "weight_decay" in settings:
        gradients.addcmul_(weights, settings["weight_decay"].to(weights))


def _shrink(settings: Settings, weights: torch.Tensor) -> None:
    if "weight_decay" in settings:
        weights.mul_((1 - settings["lr"] * settings["weight_decay"]).to(weights))


def _adam(settings: Settings, weights: torch.Tensor, gradients: torch.Tensor, state: State, decoupled: bool) -> None:
    (_shrink if decoupled else partial(_add_penalty, gradients=gradients))(settings, weights)
    lr, beta1, beta2, step = (settings[name] for name in ("lr", "momentum", "beta2", "step"))
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    mean.lerp_(gradients, (1 - beta1).to(mean))
    square.lerp_(gradients.square(), (1 - beta2).to(square))
    denominators = square.sqrt().mul_((1 - beta2**step).rsqrt().to(square)).add_(settings["eps"].to(square))
    weights.addcmul_(mean / denominators, (-lr / (1 - beta1**step)).to(weights))


def _fused_adam(
    settings: Mapping[str, float],
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    state: Mapping[str, Any],
    decoupled: bool,
) -> None:
    kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    kernel(
        weights,
        gradients,
        state["exp_avg"],
        state["exp_avg_sq"],
        [],
        state["step"],
        lr=settings["lr"],
        beta1=settings["momentum"],
        beta2=settings["beta2"],
        weight_decay=settings["weight_decay"],
        eps=settings["eps"],
        amsgrad=False,
        maximize=False,
    )


def _sgd(settings: Settings, weights: torch.Tensor, gradients: torch.Tensor, state: State, nesterov: bool = False) -> None:
    _add_penalty(settings, weights, gradients)
    change = gradients
    if "momentum_buffer" in state:
        momentum = settings["momentum"].to(weights)
        change = state["momentum_buffer"].mul_(momentum).add_(gradients)
        if nesterov:
            change = gradients.addcmul_(change, momentum)
    weights.addcmul_(change, (-settings["lr"]).to(weights))


def _rmsprop(settings: Settings, weights: torch.Tensor, gradients: torch.Tensor, state: State) -> None:
    _add_penalty(settings, weights, gradients)
    square = state["square_avg"].lerp_(gradients.square(), (1 - settings["alpha"]).to(weights))
    change = gradients.div_(square.sqrt().add_(settings["eps"].to(weights)))
    if "momentum_buffer" in state:
        change = state["momentum_buffer"].mul_(settings["momentum"].to(weights)).add_(change)
    weights.addcmul_(change, (-settings["lr"]).to(weights))


def _lion(settings: Settings, weights: torch.Tensor, gradients: torch.Tensor, state: State) -> None:
    _shrink(settings, weights)
    mean, beta1, beta2 = state["exp_avg"], settings["momentum"], settings["beta2"]
    signs = (mean * beta1.to(mean)).addcmul_(gradients, (1 - beta1).to(mean)).sign_()
    weights.addcmul_(signs, (-settings["lr"]).to(weights))
    mean.mul_(beta2.to(mean)).addcmul_(gradients, (1 - beta2).to(mean))


def _buffer_of(defaults: Mapping[str, Any], *others: str) -> tuple[str, ...]:
    return (*others, "momentum_buffer") if defaults["momentum"] else others


_ADAMS = ("step", "exp_avg", "exp_avg_sq")
adam, adamw = (
    Rule(lambda _: _ADAMS, partial(_adam, decoupled=decoupled), partial(_fused_adam, decoupled=decoupled))
    for decoupled in (False, True)
)
sgd, nesterov = Rule(_buffer_of, _sgd), Rule(_buffer_of, partial(_sgd, nesterov=True))
rmsprop = Rule(lambda defaults: _buffer_of(defaults, "step", "square_avg"), _rmsprop)
lion = Rule(lambda _: ("exp_avg",), _lion)
