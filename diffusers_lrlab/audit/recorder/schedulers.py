"""The torch schedulers of a program: their positions, and the length they were made for."""

from __future__ import annotations

import math
import weakref
from typing import Any

_LENGTH_NAMES = ("num_training_steps", "total_steps", "T_max", "max_steps", "max_train_steps", "total_iters")
_WARMUP_NAMES = ("num_warmup_steps", "warmup_steps", "warmup_iters")


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
        code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
        if code is not None and cells is not None:  # a nested function, as in diffusers
            for name, cell in zip(code.co_freevars, cells):  # noqa: B905
                try:
                    known[name] = cell.cell_contents
                except ValueError:
                    continue
        if code is not None:
            maker = getattr(function, "__qualname__", "").split(".")[0]
            known["__name__"] = f"LambdaLR of {maker}" if maker else None
    return known
