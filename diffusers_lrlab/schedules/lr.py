"""Learning-rate schedulers by name, in diffusers' and transformers' form."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, cast

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ..errors import LabError
from ..progress import Progress, resolve_warmup_updates
from .curves import SCHEDULERS, lr_at, merge_spec


def list_schedulers() -> list[str]:
    """The names `get_scheduler` and `--lr_scheduler` take."""
    return list(SCHEDULERS)


class CurveLR(LRScheduler):
    """Any registered curve as a torch scheduler: the learning rate is a pure function of the number of updates.

    Call `step()` once after each optimizer update. The state is one integer, kept with the plan it belongs to.

    Args:
        optimizer (`torch.optim.Optimizer`): Its groups' learning rates are the base of the curve.
        name (`str`): A name in the registry.
        num_warmup_steps (`int`): Updates of linear warm-up.
        num_training_steps (`int`): Updates of the whole run.
        kwargs (`dict`): The curve's parameters, resolved.
        last_epoch (`int`, *optional*, defaults to -1): Updates already done, as for every torch scheduler.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        name: str,
        num_warmup_steps: int,
        num_training_steps: int,
        kwargs: dict[str, Any],
        last_epoch: int = -1,
    ):
        self.plan: dict[str, Any] = {
            "name": name,
            "num_warmup_steps": num_warmup_steps,
            "num_training_steps": num_training_steps,
            "kwargs": kwargs,
        }
        super().__init__(optimizer, last_epoch)

    def lrs(self, updates: Any, base_lr: float) -> Any:
        """The learning rate at `updates` (an `int` or an integer array), from the formula alone."""
        progress = Progress(updates, self.plan["num_training_steps"], self.plan["num_warmup_steps"])
        return lr_at(self.plan["name"], progress, base_lr, self.plan["kwargs"])

    def get_lr(self) -> list[float | torch.Tensor]:
        """The learning rate of each group at the current update; torch calls this, users read `get_last_lr()`."""
        return [float(self.lrs(self.last_epoch, float(base))) for base in self.base_lrs]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues at the saved update.

        Raises:
            LabError: if the state belongs to another schedule or another length of run, whose curve would break here.
        """
        saved = state_dict["plan"]
        differing = [f"{key} {saved[key]!r} -> {self.plan[key]!r}" for key in saved if saved[key] != self.plan[key]]
        if differing:
            raise LabError(
                f"The saved schedule is another one: {', '.join(differing)}. Resume with the arguments of the "
                "checkpoint, or build the optimizer and schedule anew and load only the model."
            )
        super().load_state_dict(state_dict)


def get_scheduler(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: float = 0,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
    last_epoch: int = -1,
) -> LRScheduler:
    """
    A learning-rate scheduler by name; every parameter of every schedule is reachable.

    Args:
        name (`str`):
            A name of [`list_schedulers`] or a spec string such as `"step:step_size=100,gamma=0.5"`.
        optimizer (`torch.optim.Optimizer`):
            The optimizer whose learning rates are scheduled.
        num_warmup_steps (`float`, *optional*, defaults to 0):
            Optimizer updates of linear warm-up from 0, or a fraction of the run in (0, 1).
        num_training_steps (`int`, *optional*):
            Optimizer updates of the whole run. Required by all but `constant` and `piecewise_constant`.
        scheduler_specific_kwargs (`dict`, *optional*):
            The schedule's own parameters, as transformers spells it.
        last_epoch (`int`, *optional*, defaults to -1):
            Updates already done.

    Returns:
        `torch.optim.lr_scheduler.LRScheduler`: call `step()` once after each optimizer update. For
        `reduce_lr_on_plateau`, call `advance()` after each update and `step(metric)` after each validation.

    Raises:
        LabError: for an unknown name or parameter, a value out of range, or warm-up that does not fit the run.
    """
    name, kwargs = merge_spec(name, scheduler_specific_kwargs)
    if num_training_steps is None and "no_warmup" not in SCHEDULERS[name].traits:
        raise LabError(f"The schedule {name!r} needs num_training_steps, the optimizer updates of the whole run.")
    return build(name, optimizer, num_warmup_steps, num_training_steps or 1, last_epoch, **kwargs)


def build(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: float,
    num_training_steps: int,
    last_epoch: int = -1,
    **kwargs: Any,
) -> LRScheduler:
    """The scheduler `name` in the form diffusers calls its schedule functions; `get_scheduler` is for users."""
    entry = SCHEDULERS[name]
    arguments = entry.resolve(kwargs)
    if "no_warmup" in entry.traits:
        if num_warmup_steps:
            raise LabError(
                f"{name!r} has no warm-up, but {num_warmup_steps} warm-up steps were asked for. Use 0"
                + (", or 'constant_with_warmup'." if name == "constant" else ".")
            )
        warmup = 0
    else:
        warmup = resolve_warmup_updates(num_warmup_steps, num_training_steps)
    if "host" in entry.traits:
        return _build_host(entry.factory, optimizer, warmup, num_training_steps, last_epoch, arguments)
    if "feedback" in entry.traits:
        if last_epoch != -1:
            raise LabError(f"{name!r} has more state than a count of updates: restore it by load_state_dict.")
        return cast(LRScheduler, pkgutil.resolve_name(entry.factory)(optimizer, warmup, **arguments))
    return CurveLR(optimizer, name, warmup, num_training_steps, arguments, last_epoch)


def _build_host(
    function: str, optimizer: Optimizer, warmup: int, total: int, last_epoch: int, arguments: dict[str, Any]
) -> LambdaLR:
    """Calls diffusers' own function with those of our arguments that it takes."""
    host = getattr(importlib.import_module("diffusers.optimization"), function)
    code = host.__code__
    accepted = code.co_varnames[: code.co_argcount]
    clock = {"num_warmup_steps": warmup, "num_training_steps": total, "last_epoch": last_epoch}
    try:
        return host(optimizer, **{key: value for key, value in clock.items() if key in accepted}, **arguments)
    except ValueError as error:
        raise LabError(f"diffusers refused the schedule ({function}): {error}") from None


def lr_curve(
    name: str,
    base_lr: float,
    num_warmup_steps: float,
    num_training_steps: int,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
) -> np.ndarray:
    """The learning rate that a schedule promises for each update of a run, without a model or a training step.

    Returns:
        `np.ndarray`: float64 of shape `(num_training_steps,)`. A feedback schedule promises its warm-up and, after
        that, only an upper bound: the peak, as if no reduction happened.
    """
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=base_lr)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps, num_training_steps, scheduler_specific_kwargs)
    updates = np.arange(num_training_steps)
    if isinstance(scheduler, CurveLR):
        return np.asarray(scheduler.lrs(updates, base_lr), dtype=np.float64)
    if isinstance(scheduler, LambdaLR):
        return np.array([base_lr * scheduler.lr_lambdas[0](int(update)) for update in updates])
    warmup = resolve_warmup_updates(num_warmup_steps, num_training_steps)
    return base_lr * np.minimum(updates / warmup, 1.0) if warmup else np.full(num_training_steps, base_lr)
