"""The real steps of a program's optimizers, of which one inside another counts once."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

_OPTIMIZERS = register_optimizer_step_pre_hook.__code__.co_filename


class RealSteps:
    """
    Counts the steps of optimizers between [`begin`] and [`end`], which torch's hooks around steps call.

    The step of a base class belongs to that of its subclass, and a wrapper's step to the optimizer inside it. Each of
    `subscribers` gets the optimizer after a real step.
    """

    def __init__(self) -> None:
        self.count = 0
        self.subscribers: list[Callable[[Any], None]] = []
        self.running: list[Any] = []  # optimizers, the outermost first
        self._wrappers: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, optimizer: Any) -> None:
        if self.running and not is_nested_step():
            self.running.clear()  # left by a step that raised an error
        self.running.append(optimizer)

    def end(self, optimizer: Any) -> None:
        while self.running and self.running.pop() is not optimizer:
            pass
        if any(each is optimizer for each in self.running):
            return  # its step called that of its base class
        self._wrappers.update(self.running)
        if not self.is_wrapper(optimizer):
            self.add(optimizer)

    def add(self, optimizer: Any) -> None:
        """Counts a step, also one that no hook has seen."""
        self.count += 1
        for call in self.subscribers:
            call(optimizer)

    def is_wrapper(self, optimizer: Any) -> bool:
        """Whether its step has called that of another optimizer."""
        return optimizer in self._wrappers


def is_nested_step() -> bool:
    """Whether the optimizer step that has called a hook runs inside another one."""
    count, frame = 0, _outward(sys._getframe(1))
    while frame is not None:  # in torch's function around steps
        count += 1
        frame = _outward(frame.f_back, frame.f_code)
    return count > 1


def _outward(frame: FrameType | None, code: CodeType | None = None) -> FrameType | None:
    """The next frame of torch's module of optimizers, or of one of its functions, in the calling order."""
    while frame is not None and (frame.f_code is not code if code else frame.f_code.co_filename != _OPTIMIZERS):
        frame = frame.f_back
    return frame
