"""The torch optimizers of a program, and the record of each of their updates."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterator
from typing import Any

import torch

from .records import RecordFile, readable
from .steps import RealSteps, Schedulers, describe_scheduler, is_replaced, position


class Watched:
    """An optimizer, with what has happened since its last step."""

    def __init__(self, number: int, optimizer: Any, file: RecordFile):
        self.number, self._reference, self._file = number, weakref.ref(optimizer), file
        self.schedulers = Schedulers()
        self.num_backward = 0
        self.num_steps = 0
        self.position: int | None = None  # of its scheduler after its last step
        self.num_hooks = 0  # steps that the hooks have seen
        self.is_unseen = False  # the coming record is of a step that no hook has seen
        self._early: dict[int, tuple[int, Any, Any]] = {}  # schedulers stepped before the first update: position and rates
        self._described: Any = None
        self._lr: list[Any] = []
        self._momentum: list[Any] = []
        self._position: int | None = None
        self._first: dict[str, Any] = {}  # of the first row
        self._version: int | None = None
        self._weight: weakref.ref[Any] | None = None

    @property
    def optimizer(self) -> Any:
        return self._reference()

    def read_lr(self) -> list[Any]:
        """Reads the learning rates and momenta that the next step uses, and the position of the scheduler."""
        scheduler = self.schedulers.begin_update()
        self._describe(scheduler)
        self._position = None if scheduler is None else position(scheduler)
        self._first = {} if self.num_steps else self._read_first(scheduler)
        groups = getattr(self.optimizer, "param_groups", [])
        self._lr = _readable_all([group.get("lr") for group in groups])
        betas = [group.get("betas") for group in groups]
        momenta = [beta[0] if beta else group.get("momentum") for beta, group in zip(betas, groups)]  # noqa: B905
        self._momentum = _readable_all(momenta)
        return self._lr

    def _read_first(self, scheduler: Any) -> dict[str, Any]:
        """Steps of the optimizer and of the scheduler before the first update, and the rates that no update had."""
        start, first, last = self._early.get(id(scheduler), (self._position, None, None))
        early = 0 if start is None or self._position is None else max(self._position - start, 0)
        return {"count": _own_count(self.optimizer), "early": early, "from": first, "to": last}

    def read_peaks(self) -> list[Any]:
        """Reads the learning rates of all groups before any scheduler, which keeps them beside its own."""
        groups = getattr(self.optimizer, "param_groups", [])
        return [readable(group.get("initial_lr", group.get("lr"))) for group in groups]

    def record(self, extra: dict[str, Any]) -> None:
        """Writes a step."""
        lrs, momenta = _shortened(self._lr), _shortened(self._momentum)
        row: dict[str, Any] = {"o": self.number, "b": self.num_backward, **self._first, **extra}
        row["x"] = "unseen" if self.is_unseen else None
        for key, values in (("lr", lrs), ("m", momenta)):
            if len(values) == 1:
                row[key] = values[0]
            elif {*map(type, values)} == {float}:
                row[key] = array("d", values).tobytes().hex()  # as decimal numbers, they would take time
            else:
                row[key] = [value.item() if isinstance(value, torch.Tensor) else value for value in values]
        row["s"] = self._position
        self._file.write({key: value for key, value in row.items() if value is not None})
        self.num_backward = 0
        self.num_steps += 1
        self.num_hooks += not self.is_unseen
        self.is_unseen = False
        self._version = self._weight_version()

    def _describe(self, scheduler: Any) -> None:
        groups = getattr(self.optimizer, "param_groups", [])
        weights = [id(weights[0]) if (weights := group["params"]) else None for group in groups]
        state = (self.schedulers.number, weights)
        if state == self._described:
            return
        self._described = state
        self._weight = None
        described = {
            "optimizer": self.number,
            "name": type(self.optimizer).__name__,
            "groups": [sum(parameter.numel() for parameter in group["params"]) for group in groups],
            "dtypes": [str(lr.dtype) if isinstance(lr := group.get("lr"), torch.Tensor) else None for group in groups],
            "weights": type(self.first_weight()).__name__,
            "adapts": any(map(_adapts, groups)),
            "scheduler": None if scheduler is None else {"number": self.schedulers.number, **describe_scheduler(scheduler)},
        }
        self._file.write(described)

    def has_new_weights(self) -> bool:
        """Whether a weight was changed in place since the last call."""
        before, self._version = self._version, self._weight_version()
        return before is not None and before != self._version

    def _weight_version(self) -> int | None:
        weight = self.first_weight()
        return None if weight is None or weight.is_inference() else int(weight._version)

    def first_weight(self) -> Any:
        """A trained parameter."""
        weight = None if self._weight is None else self._weight()
        if weight is None:
            groups = getattr(self.optimizer, "param_groups", [])
            weight = next((weight for group in groups for weight in group["params"] if weight.requires_grad), None)
            self._weight = None if weight is None else weakref.ref(weight)
        return weight

    def note_scheduler(self, scheduler: Any) -> None:
        """A scheduler has been made, whose constructor may have stepped it and others."""
        self.schedulers.add(scheduler)
        self._early, self.position = {}, None

    def before_scheduler_step(self, scheduler: Any) -> None:
        if not self.num_steps:
            lr = next((readable(group.get("lr")) for group in self.optimizer.param_groups), None)
            self._early[id(scheduler)] = (*self._early.get(id(scheduler), (position(scheduler), lr))[:2], lr)

    def after_scheduler_step(self, scheduler: Any) -> None:
        if not is_replaced(scheduler):
            self.schedulers.note_step(scheduler)
            self.position = position(self.schedulers.current())

    def count_backward(self) -> None:
        self.num_backward += 1
        if self._version is None:
            self._version = self._weight_version()


class Optimizers:
    """All optimizers of a program that torch's constructor has made."""

    def __init__(self, file: RecordFile, steps: RealSteps):
        self._file, self._steps = file, steps
        self._all: list[Watched] = []

    def __iter__(self) -> Iterator[Watched]:
        return iter([each for each in self._all if each.optimizer is not None])

    def find(self, optimizer: Any) -> Watched:
        for each in self._all:
            if each.optimizer is optimizer:
                return each
        watched = Watched(len(self._all), optimizer, self._file)
        self._all.append(watched)
        self._file.write({"made": watched.number, "name": type(optimizer).__name__})
        return watched

    def without_hooks(self) -> list[Watched]:
        """Optimizers whose steps no hook has seen, and whose weights no other optimizer updates."""
        if all(each.num_hooks for each in self._all):  # the usual case, before every backward pass
            return []
        unseen = [each for each in self if not each.num_hooks and not self._steps.is_wrapper(each.optimizer)]
        updated = [each.first_weight() for each in self if each.num_hooks]
        return [each for each in unseen if not any(each.first_weight() is weight for weight in updated)]

    def count_backward(self) -> None:
        is_only = len(self._all) == 1
        for each in self._all:
            groups = getattr(each.optimizer, "param_groups", [])
            # A generator has none of its discriminator's backward passes.
            if is_only or any(weight.grad is not None for group in groups for weight in group["params"]):
                each.count_backward()

    def reset_backward(self, module: Any) -> None:
        """Restarts the count for optimizers of a module whose gradients are deleted."""
        counted = [each for each in self if each.num_backward]
        if counted:
            weights = {id(weight) for weight in module.parameters()}
            for each in counted:
                if id(each.first_weight()) in weights:
                    each.num_backward = 0

    def positions(self) -> dict[int, int]:
        """The last positions of the schedulers by the number of the optimizer."""
        return {each.number: each.position for each in self._all if each.position is not None}


def _adapts(group: dict[str, Any]) -> bool:
    """Whether an optimizer like Prodigy or a schedule-free one multiplies the rate of a group by its own estimate."""
    return ("d" in group and "k" in group) or "scheduled_lr" in group


def _own_count(optimizer: Any) -> Any:
    """The steps that an optimizer has taken, as it counts them, also those before a resume; `None` if it counts none."""
    for group in optimizer.param_groups:
        count = group.get("step", group.get("k") if _adapts(group) else None)
        if count is not None:
            return readable(count)
    states = [state for state in getattr(optimizer, "state", {}).values() if isinstance(state, dict)]
    return next((readable(state["step"]) for state in states if "step" in state), None) if states else 0


def _readable_all(values: list[Any]) -> list[Any]:
    return values if {*map(type, values)} == {float} else [readable(value) for value in values]


def _shortened(values: list[Any]) -> list[Any]:
    """A single value if all groups have the same number."""
    is_same = len(values) > 1 and {*map(type, values)} == {float} and len({*values}) == 1
    return values[:1] if is_same else values
