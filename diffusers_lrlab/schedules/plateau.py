"""Schedules that react to a metric. They alone have state beyond the clock, and their type says so."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..errors import LabError


class FeedbackSchedule:
    """Marks a scheduler with two inputs: the clock by `advance()`, a metric by `step(metrics)`."""

    def advance(self) -> None:
        """Counts one optimizer update."""
        raise NotImplementedError


class PlateauWithWarmup(FeedbackSchedule, ReduceLROnPlateau):
    """torch's `ReduceLROnPlateau` behind a linear warm-up.

    Call `advance()` after each optimizer update and `step(validation_loss)` after each validation. Validations during
    warm-up are not counted: the loss of a model that hardly moves says nothing about a plateau.

    Args:
        optimizer (`torch.optim.Optimizer`): Its groups' learning rates are the peak.
        num_warmup_steps (`int`): Updates of warm-up.
        **kwargs: Those of `torch.optim.lr_scheduler.ReduceLROnPlateau`.
    """

    def __init__(self, optimizer: Optimizer, num_warmup_steps: int = 0, **kwargs: Any):
        super().__init__(optimizer, **kwargs)
        self.num_warmup_steps = num_warmup_steps
        self.num_updates = 0
        self.peak_lrs = [group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups]
        self._set_warmup_lrs()

    def _set_warmup_lrs(self) -> None:
        if self.num_updates <= self.num_warmup_steps and self.num_warmup_steps:
            for group, peak in zip(self.optimizer.param_groups, self.peak_lrs, strict=True):
                group["lr"] = peak * self.num_updates / self.num_warmup_steps
            self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def advance(self) -> None:
        """Counts one optimizer update; inside warm-up it sets the next learning rate."""
        self.num_updates += 1
        self._set_warmup_lrs()

    def step(self, metrics: Any = None, epoch: None = None) -> None:  # type: ignore[override]  # as torch's own
        """Shows the schedule a validation loss.

        Raises:
            LabError: without a metric, which is how scripts call schedules that follow the clock alone.
        """
        if metrics is None:
            raise LabError(
                "reduce_lr_on_plateau needs a metric: call advance() after each update and step(validation_loss) after "
                "each validation, as training_scripts/train_ddpm.py does. A script that has no validation loss "
                "needs a schedule of the clock instead, such as 'cosine'."
            )
        if self.num_updates >= self.num_warmup_steps:
            super().step(metrics)
