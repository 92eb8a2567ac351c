"""The real steps of the optimizers in this process: one count, to which schedules, samplers, averages and logs subscribe."""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer, lr_scheduler, optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from diffusers_lrlab.audit.recorder.steps import is_nested_step

from ...audit.recorder.schedulers import bare_optimizer
from ...core.errors import LabError
from .patches import Patches

_OF_TORCH = lr_scheduler.__file__, optimizer.__file__  # whose functions around a step call it


class OptimizerSteps:
    """
    Counts steps by torch's hooks. Calls `before(optimizer)` before each, and `after(optimizer)` once it is counted.

    A step that runs inside another step of its optimizer, such as that of a base class, is a part of it. One that a gradient
    scaler makes a fused optimizer leave out is not counted.
    """

    def __init__(self) -> None:
        self.before: list[Callable[[Optimizer], None]] = []
        self.after: list[Callable[[Optimizer], None]] = []
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._running: list[Optimizer] = []  # one may call another
        self._replaced: list[Optimizer] = []  # of these, in a step that the program has set on the instance
        self._num_replaced = self._num_inner = 0  # steps of these, and steps of their classes that they have called

    def install(self, patches: Patches) -> None:
        patches.callback(register_optimizer_step_pre_hook(self._begin).remove)
        patches.callback(register_optimizer_step_post_hook(self._end).remove)

    def count(self, owner: Optimizer) -> int:
        """The steps that an optimizer has taken in this process."""
        return self._counts.get(owner, 0)

    def is_running(self, owner: Optimizer) -> bool:
        return any(each is owner for each in self._running)

    def _begin(self, owner: Optimizer, *_: Any) -> None:
        if self._running and not self._replaced and not is_nested_step():
            self._running.clear()  # left by a step that raised an error
        is_inside = self.is_running(owner)
        self._num_inner += any(each is owner for each in self._replaced)
        self._running.append(owner)
        for call in () if is_inside else self.before:
            call(owner)

    def _end(self, owner: Optimizer, *_: Any) -> None:
        while self._running and self._running.pop() is not owner:
            pass
        if self.is_running(owner):
            return
        # A gradient scaler tells an optimizer that takes its flag, such as a fused one, to leave out the step.
        if getattr(owner, "found_inf", False):
            return
        self._counts[owner] = self.count(owner) + 1
        for call in self.after:
            call(owner)

    # --- steps that torch's hooks do not see --------------------------------------------------------------------------

    def follow_replaced(self, patches: Patches) -> None:
        """Also counts the steps of optimizers whose `step` the program replaces on the instance, as OneTrainer does."""

        def set_attribute(set_value: Any, owner: Optimizer, name: str, value: Any, /) -> None:
            is_replaced = name == "step" and bare_optimizer(owner) is owner  # not of a wrapper, whose optimizer is followed
            set_value(owner, name, self._followed(owner, value) if is_replaced else value)

        patches.wrap(Optimizer, "__setattr__", set_attribute)

    def _followed(self, owner: Optimizer, step: Any) -> Any:
        function = getattr(step, "__func__", step)
        if getattr(getattr(function, "__code__", None), "co_filename", None) in (*_OF_TORCH, __file__):
            return step

        @functools.wraps(function)
        def follow(owner: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
            return self._call(step, owner, *args, **kwargs)

        return types.MethodType(follow, owner)  # not a function, for which torch can make no scheduler

    def _call(self, step: Any, owner: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        if any(each is owner for each in self._replaced):
            return step(*args, **kwargs)
        num_inner = self._num_inner
        self._begin(owner)
        self._replaced.append(owner)
        try:
            result = step(*args, **kwargs)
        finally:
            self._replaced.pop()
        calls_class = self._num_inner > num_inner
        if self._num_replaced and calls_class != (num_inner > 0):  # as one that counts micro-batches would
            raise LabError(
                f"--lr_scheduler: the program replaces the step of {type(owner).__name__} by one that only sometimes calls "
                "that of the class, so its updates cannot be counted. Switch that off in the program."
            )
        self._num_replaced += 1
        self._end(owner)
        return result
