"""Steps of optimizers whose `step` the program replaces on the instance, where torch's hooks do not see them."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler, optimizer

from ...audit.recorder.schedulers import bare_optimizer
from .patches import Patches

_OF_TORCH = lr_scheduler.__file__, optimizer.__file__  # whose functions around a step call it
_NUM_WEIGHTS, _NUM_VALUES = 8, 64  # that are compared


class ReplacedSteps:
    """Calls `before(optimizer)` and `after(optimizer, was_left_out)` around them, as torch's hooks do around others."""

    def __init__(self, before: Callable[[Optimizer], None], after: Callable[[Optimizer, bool], None]):
        self._before, self._after = before, after
        self.running: list[Optimizer] = []
        self._num_inner = 0  # steps of a class that a replaced step has called

    def install(self, patches: Patches) -> None:
        def set_attribute(set_value: Any, owner: Optimizer, name: str, value: Any, /) -> None:
            is_replaced = name == "step" and bare_optimizer(owner) is owner  # not of a wrapper, whose optimizer is followed
            set_value(owner, name, self._followed(owner, value) if is_replaced else value)

        patches.wrap(Optimizer, "__setattr__", set_attribute)

    def note_inner(self, owner: Optimizer) -> None:
        """A step of a class has begun, which torch's hooks see."""
        self._num_inner += any(each is owner for each in self.running)

    def _followed(self, owner: Optimizer, step: Any) -> Any:
        function = getattr(step, "__func__", step)
        if getattr(getattr(function, "__code__", None), "co_filename", None) in (*_OF_TORCH, __file__):
            return step

        @functools.wraps(function)
        def follow(owner: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
            return self._call(step, owner, *args, **kwargs)

        return types.MethodType(follow, owner)  # not a function, for which torch can make no scheduler

    def _call(self, step: Any, owner: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        if any(each is owner for each in self.running):
            return step(*args, **kwargs)
        self._before(owner)
        # Once it has called the step of its class, only that counts: a program may do so in every fourth call.
        num_inner, weights = self._num_inner, None if self._num_inner else _Weights(owner)
        self.running.append(owner)
        try:
            result = step(*args, **kwargs)
        finally:
            self.running.pop()
        self._after(owner, self._num_inner == num_inner and (weights is None or weights.are_kept()))
        return result


class _Weights:
    """Weights before a step, to tell one that was taken from a call that only counts micro-batches."""

    def __init__(self, owner: Optimizer):
        self._groups = owner.param_groups
        weights = [weight for group in owner.param_groups for weight in group["params"] if weight.grad is not None]
        self._versions = [(weight, weight._version) for weight in weights]
        dense = [weight for weight in weights if type(weight.data) is torch.Tensor and weight.grad.layout == torch.strided]
        self._values = [(weight, _some(weight)) for weight in dense[:_NUM_WEIGHTS]]
        self._has_gradient = [_some(weight.grad).any() for weight in dense[:_NUM_WEIGHTS]]

    def are_kept(self) -> bool:
        """Whether the weights are as before, where a step would have changed them."""
        if any(weight._version != version for weight, version in self._versions):
            return False
        if all(isinstance(group["lr"], float) and not group["lr"] for group in self._groups):
            return False  # a step at a rate of 0 keeps them, too
        # Those that are written by their `data` have no new version. Half precision may lose a small step to rounding.
        is_exact = all(values.dtype in (torch.float32, torch.float64) for _, values in self._values)
        return (
            is_exact and any(self._has_gradient) and all(torch.equal(_some(each), values) for each, values in self._values)
        )


def _some(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().reshape(-1)[:_NUM_VALUES].clone()
