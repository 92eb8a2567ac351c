"""Schedules that follow a metric, the only ones with state beyond the clock."""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from diffusers_lrlab.core.environment import require_version

from ..core.errors import LabError
from .momentum import initial_lrs, write_lrs


class FeedbackSchedule:
    """
    A scheduler that follows a metric after linear warm-up.

    Call `advance()` after each optimizer update and `step(validation_loss)` after each validation. Validations during
    warm-up are ignored, since they say little about the peak rate.
    """

    optimizer: Optimizer
    _last_lr: list[Any]

    def _start_warmup(self, num_warmup_steps: int, min_lr: float = 0.0, max_lr: float = math.inf) -> None:
        groups = self.optimizer.param_groups
        for lr in initial_lrs(self.optimizer):
            if not min_lr <= lr <= max_lr:
                raise LabError(
                    f"The learning rate {lr:g} is {'above' if lr > max_lr else 'below'} what {type(self).__name__} may set: "
                    f"[{min_lr:g}, {max_lr:g}]. Change it, or min_lr and max_lr."
                )
        self.num_warmup_steps = num_warmup_steps
        self.num_updates = 0
        self.peak_lrs = [float(group.setdefault("initial_lr", group["lr"])) for group in groups]
        self._set_lrs([float(group["lr"]) for group in groups])
        self._set_warmup_lrs()

    def _set_warmup_lrs(self) -> None:
        if self.num_updates <= self.num_warmup_steps and self.num_warmup_steps:
            share = self.num_updates / self.num_warmup_steps
            self._set_lrs([peak * share for peak in self.peak_lrs])

    def _set_lrs(self, lrs: list[float]) -> None:
        write_lrs(self.optimizer.param_groups, lrs)
        self._last_lr = lrs

    def advance(self) -> None:
        """Counts one optimizer update, and sets the learning rate during warm-up."""
        self.num_updates += 1
        self._set_warmup_lrs()

    def _counts(self, metrics: Any) -> bool:
        """Whether a validation counts. A call without a metric, as for schedules of the clock, is an error."""
        if metrics is None:
            raise LabError(
                f"{type(self).__name__} needs a metric: call advance() after each update and step(validation_loss) after "
                "each validation, as `lrlab train` does. A script that has no validation loss needs a schedule of the clock "
                "instead, such as 'cosine'."
            )
        return self.num_updates >= self.num_warmup_steps

    @contextmanager
    def _numbers_for_tensors(self) -> Iterator[None]:
        """Shows torch's or transformers' rule numbers, and fills tensors with the new rates instead of replacing them."""
        held = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = float(group["lr"])
        yield
        lrs = [group["lr"] for group in self.optimizer.param_groups]
        for group, lr in zip(self.optimizer.param_groups, held, strict=True):
            group["lr"] = lr
        self._set_lrs(lrs)


# The initial best metric is infinite, which JSON cannot represent.
_MAY_BE_INFINITE = ("best", "mode_worse")


class HostFeedback(FeedbackSchedule):
    """Adapter for a rule of torch or transformers, the next base class."""

    def step(self, metrics: Any = None, epoch: None = None) -> None:
        """Shows the schedule a validation loss."""
        if self._counts(metrics):
            with self._numbers_for_tensors():
                super().step(metrics)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()  # type: ignore[misc]
        return {**state, **{key: str(state[key]) for key in _MAY_BE_INFINITE if not math.isfinite(state.get(key, 0))}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        numbers = {key: float(state_dict[key]) for key in _MAY_BE_INFINITE if key in state_dict}
        with self._numbers_for_tensors():
            super().load_state_dict({**state_dict, **numbers})  # type: ignore[misc]


class PlateauWithWarmup(HostFeedback, ReduceLROnPlateau):  # type: ignore[misc]
    """torch's `ReduceLROnPlateau` after a linear warm-up to the optimizer's learning rates."""

    def __init__(self, optimizer: Optimizer, num_warmup_steps: int = 0, **kwargs: Any):
        super().__init__(optimizer, **kwargs)
        self._start_warmup(num_warmup_steps, kwargs.get("min_lr", 0.0))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._set_lrs(list(state_dict["_last_lr"]))


@functools.cache
def _greedy_class() -> Any:
    """Made on use: only this schedule needs transformers."""
    require_version("The schedule 'greedy'", "transformers", "5.4")
    from transformers.optimization import GreedyLR

    class GreedyWithWarmup(HostFeedback, GreedyLR):  # type: ignore[misc]
        """transformers' `GreedyLR` after a linear warm-up to the optimizer's learning rates."""

        _OWN_STATE = ("num_updates", "num_warmup_steps", "peak_lrs")  # the rest is GreedyLR's

        def __init__(self, optimizer: Optimizer, num_warmup_steps: int, min_lr: float, **kwargs: Any):
            super().__init__(optimizer, min_lr=min_lr, **kwargs)
            self._init_lrs = initial_lrs(optimizer)
            self._start_warmup(num_warmup_steps, min_lr, kwargs.get("max_lr", 1.0))

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), **{name: getattr(self, name) for name in self._OWN_STATE}}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            for name in self._OWN_STATE:
                setattr(self, name, state_dict[name])

    return GreedyWithWarmup


def greedy(optimizer: Optimizer, num_warmup_steps: int = 0, min_lr: float | None = None, **kwargs: Any) -> Any:
    """`min_lr` is 1e-3 as in transformers, or a hundredth of the learning rate if that is lower."""
    if min_lr is None:
        min_lr = min(1e-3, *(lr / 100 for lr in initial_lrs(optimizer)))
    return _greedy_class()(optimizer, num_warmup_steps, min_lr, **kwargs)


class BoldDriver(FeedbackSchedule, LRScheduler):
    r"""
    Raises the learning rate after each validation that improved on the one before, and lowers it after one that is worse.

    With \(r = (L_k - L_{k-1}) / |L_{k-1}|\): times `increase` if \(r < -\)`threshold`, times `decrease` if \(r >\)
    `threshold`, else unchanged; held between `min_lr_ratio` and `max_lr_ratio` of the peak. This is the bold driver of
    Vogl et al. (1988) and Battiti (1989) on validation losses, without its rollback of a step that made things worse.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_warmup_steps: int,
        mode: str,
        increase: float,
        decrease: float,
        threshold: float,
        min_lr_ratio: float,
        max_lr_ratio: float,
    ):
        # Not torch's __init__, which steps once by the clock.
        self.optimizer = optimizer
        self.mode, self.increase, self.decrease, self.threshold = mode, increase, decrease, threshold
        self.min_lr_ratio, self.max_lr_ratio = min_lr_ratio, max_lr_ratio
        self.scale = 1.0
        self.last_metric: float | None = None
        self._start_warmup(num_warmup_steps)

    def step(self, metrics: Any = None, epoch: None = None) -> None:  # type: ignore[override]  # a metric, no epoch
        """Shows the schedule a validation loss."""
        if not self._counts(metrics):
            return
        current, last = float(metrics), self.last_metric
        self.last_metric = current
        if last is None:
            return
        change = (current - last) / max(abs(last), 1e-30) * (1 if self.mode == "min" else -1)
        if change < -self.threshold:
            self.scale = min(self.scale * self.increase, self.max_lr_ratio)
        elif change > self.threshold:
            self.scale = max(self.scale * self.decrease, self.min_lr_ratio)
        self._set_lrs([peak * self.scale for peak in self.peak_lrs])

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.__dict__.update(state_dict)
        self._set_lrs(list(state_dict["_last_lr"]))
