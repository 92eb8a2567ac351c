"""Optimizer updates of any program, counted by the optimizer's real steps."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...audit.recorder.recorder import is_nested_step
from ..host.patches import Patches


def keeps_no_state(optimizer: Optimizer) -> bool:
    """Whether it is SGD without momentum, whose state is empty after any number of steps."""
    return isinstance(optimizer, SGD) and not any(group["momentum"] for group in optimizer.param_groups)


def is_left_out(optimizer: Optimizer) -> bool:
    """Whether an optimizer that gets the flag of a gradient scaler, such as a fused one, leaves out the running step."""
    return bool(getattr(optimizer, "found_inf", False))


class RealUpdates:
    """
    The updates of the first optimizer that steps, with those before a resume, as its loaded state counts them.

    `before_first` is called before its first step in this process.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_left_out: Any = 0  # of these: a number, or a tensor that is read when the updates are asked for
        self.is_known = True  # not after a resume of an optimizer whose state counts no steps
        self.before_first: list[Any] = []
        self._optimizer: Optimizer | None = None
        self._loaded: WeakKeyDictionary[Optimizer, tuple[int, bool]] = WeakKeyDictionary()  # updates, whether they are known

    @property
    def num_updates(self) -> int:
        if isinstance(self._num_left_out, torch.Tensor):
            self._num_left_out = int(self._num_left_out)  # waits for the device
        return self._num_steps - int(self._num_left_out)

    def _begin(self, num_updates: int, is_known: bool) -> None:
        self._num_steps, self._num_left_out, self.is_known = num_updates, 0, is_known

    def install(self, patches: Patches) -> None:
        patches.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        patches.callback(register_optimizer_step_post_hook(self._after_step).remove)
        patches.wrap(Optimizer, "load_state_dict", self._load)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            self._begin(*self._loaded.get(optimizer, (0, True)))
            for call in self.before_first:
                call()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self._optimizer and not is_nested_step():  # it may call the step of its base class
            self._num_steps += 1
            flag = getattr(optimizer, "found_inf", None)  # a tensor on the device, of a gradient scaler
            if flag is not None:
                self._num_left_out = self._num_left_out + (flag != 0)

    def _load(self, load: Any, optimizer: Optimizer, state: dict[str, Any], /) -> None:
        load(optimizer, state)
        states = state["state"].values()
        steps = [int(each["step"]) for each in states if "step" in each]
        is_known = bool(steps) or not states and not keeps_no_state(optimizer)
        self._loaded[optimizer] = found = max(steps, default=0), is_known
        if self._optimizer in (None, optimizer):
            self._begin(*found)
