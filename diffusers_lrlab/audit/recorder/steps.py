"""The one counter of the updates of a program, which everything else subscribes to; and how its schedulers keep up.

[`RealSteps`] counts the steps of the optimizers. [`Schedulers`] has the positions of torch's schedulers at these steps, and
the length that they were made for.
"""

from __future__ import annotations

import inspect
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

_OPTIMIZERS = register_optimizer_step_pre_hook.__code__.co_filename
_LENGTH_NAMES = ("num_training_steps", "total_steps", "T_max", "max_steps", "max_train_steps", "total_iters")
_WARMUP_NAMES = ("num_warmup_steps", "warmup_steps", "warmup_iters")


class RealSteps:
    """
    Counts the steps of optimizers between [`begin`] and [`end`], which torch's hooks around steps call.

    The step of a base class belongs to that of its subclass. `before` is called with an optimizer before its step, `after`
    once the step is counted. A step that `is_left_out`, as some optimizers do for a gradient scaler, is not counted.
    """

    def __init__(self, is_left_out: Callable[[Any], bool] = lambda optimizer: False) -> None:
        self.total = 0
        self.num_inner = 0  # steps of a base class, or of the class by a step that replaces it
        self.before: list[Callable[[Any], None]] = []
        self.after: list[Callable[[Any], None]] = []
        self.running: list[Any] = []  # optimizers, the outermost first
        self._is_left_out = is_left_out
        self._num_without_hooks = 0  # of those running
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._wrappers: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, optimizer: Any, *_: Any) -> None:
        if self.running and not self._num_without_hooks and not _is_nested_step():
            self.running.clear()  # left by a step that raised an error
        is_part = self.is_running(optimizer)
        self.running.append(optimizer)
        for call in () if is_part else self.before:
            call(optimizer)

    def end(self, optimizer: Any, *_: Any) -> None:
        while self.running and self.running.pop() is not optimizer:
            pass
        if self.is_running(optimizer):  # its step called that of its base class
            self.num_inner += 1
            return
        self._wrappers.update(self.running)
        if not self._is_left_out(optimizer):
            self.add(optimizer)

    @contextmanager
    def step_without_hooks(self, optimizer: Any) -> Iterator[None]:
        """Around a step that does not call torch's hooks, or whose parts alone do."""
        self.begin(optimizer)
        self._num_without_hooks += 1
        try:
            yield
        finally:
            self._num_without_hooks -= 1
        self.end(optimizer)

    def add(self, optimizer: Any) -> None:
        """Counts a step, also one that no hook has seen."""
        self.total += 1
        self._counts[optimizer] = self.count(optimizer) + 1
        for call in self.after:
            call(optimizer)

    def count(self, optimizer: Any) -> int:
        """The steps of an optimizer in this process."""
        return self._counts.get(optimizer, 0)

    def is_running(self, optimizer: Any) -> bool:
        return any(each is optimizer for each in self.running)

    def is_wrapper(self, optimizer: Any) -> bool:
        """Whether its step has called that of another optimizer."""
        return optimizer in self._wrappers


def _is_nested_step() -> bool:
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


# --- schedulers -------------------------------------------------------------------------------------------------------


class Schedulers:
    """The schedulers that the program has made for an optimizer, and which of them sets its rates."""

    def __init__(self) -> None:
        self.number = 0  # of those that were in charge
        self._current: weakref.ref[Any] | None = None
        self._made: list[weakref.ref[Any]] = []  # since the last update
        self._stepped: list[weakref.ref[Any]] = []  # since the last update

    def add(self, scheduler: Any) -> None:
        self._made.append(weakref.ref(scheduler))

    def note_step(self, scheduler: Any) -> None:
        self._stepped.append(weakref.ref(scheduler))

    def current(self) -> Any:
        """The one in charge: the last one made, which may contain others, or the most advanced one that was stepped."""
        for references in (self._made, self._stepped):
            alive = [each for each in (reference() for reference in references) if each is not None]
            if alive:
                in_charge = [each for each in alive if not is_replaced(each)] or alive
                return max(reversed(in_charge), key=position)
        return None if self._current is None else self._current()

    def begin_update(self) -> Any:
        """The scheduler in charge of the coming update."""
        scheduler = self.current()
        if scheduler is not None and (self._current is None or self._current() is not scheduler):
            self._current = weakref.ref(scheduler)
            self.number += 1
        self._made, self._stepped = [], []
        return scheduler


def is_replaced(scheduler: Any) -> bool:
    """Whether the launcher replaces the rates of a scheduler by those of another one."""
    return "lrlab_update" in vars(scheduler)


def bare_optimizer(optimizer: Any) -> Any:
    """An optimizer without wrappers, such as accelerate's."""
    while optimizer is not None and "param_groups" not in vars(optimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


def position(scheduler: Any) -> int:
    """How often a scheduler has been stepped."""
    number = getattr(scheduler, "last_epoch", None)
    if number is None:  # ChainedScheduler
        return max(map(position, getattr(scheduler, "_schedulers", [])), default=-1)
    return int(number) if isinstance(number, (int, float)) and math.isfinite(number) else -1


def describe_scheduler(scheduler: Any) -> dict[str, Any]:
    """Name, length and warm-up of a scheduler, in its own steps; `None` where they are unknown."""
    known = _arguments(scheduler)
    length = next((known[name] for name in _LENGTH_NAMES if _is_count(known.get(name))), None)
    warmup = next((known[name] for name in _WARMUP_NAMES if _is_count(known.get(name))), None)
    name = type(scheduler).__name__
    parts = getattr(scheduler, "_schedulers", None)
    milestones = getattr(scheduler, "_milestones", None)
    if parts and milestones:  # SequentialLR: a short first part is taken for the warm-up
        last = describe_scheduler(parts[-1])
        length = milestones[-1] + last["length"] if last["length"] else None
        warmup = milestones[0] if len(milestones) == 1 else None
        name = " then ".join(type(part).__name__ for part in parts)
    elif parts:  # ChainedScheduler
        described = [describe_scheduler(part) for part in parts]
        length, warmup = (next(filter(None, (each[key] for each in described)), None) for key in ("length", "warmup"))
        name = " and ".join(type(part).__name__ for part in parts)
    return {"name": known.get("__name__") or name, "length": length, "warmup": warmup}


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**53


def _arguments(scheduler: Any) -> dict[str, Any]:
    """What a scheduler was made with: its attributes, and what its function of the step number has been given."""
    known = dict(vars(scheduler))
    rises = known.get("start_factor", 0.0) < known.get("end_factor", 1.0)
    if type(scheduler).__name__ in ("ConstantLR", "LinearLR") and rises:
        known["warmup_steps"] = known.pop("total_iters", None)
    plan = known.get("plan")
    known |= plan if isinstance(plan, dict) else {}
    functions = known.get("lr_lambdas") or []
    for function in functions[:1]:
        keywords = getattr(function, "keywords", None)
        if keywords is not None:  # a functools.partial, as in transformers
            known |= keywords
            function = function.func
        if hasattr(function, "__code__"):
            with suppress(TypeError, ValueError):  # not a Python function; a variable that is assigned later
                known |= inspect.getclosurevars(function).nonlocals  # of a nested function, as in diffusers
            maker = getattr(function, "__qualname__", "").split(".")[0]
            known["__name__"] = f"LambdaLR of {maker}" if maker else None
    return known
