"""A run whose network is part of a stack."""

import math
import time
from typing import Any

import torch

from ...data.loading import TrainingData
from ...timesteps.bands import scaled_lr
from ...training.base_run import BaseRun
from ...training.plan import Plan
from ..runs.curves import Curves


class Member(BaseRun):
    """A run whose network is part of a stack; model, optimizer, schedules and average are the real ones."""

    def __init__(self, plan: Plan, data: TrainingData, device: torch.device):
        super().__init__(plan, data)
        self.model = self.model.to(device).train()
        self.curves = Curves(plan.num_updates)
        self.error: str | None = None
        self.last_lr = 0.0
        self.last_momentum: float | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has finished or diverged."""
        return self.error is not None or self.update == self.plan.num_updates

    def note_rates(self) -> None:
        """Notes the learning rate and the momentum of the next step, and compares them with what is expected."""
        with scaled_lr(self.optimizer, self.lr_factor):
            self.check_schedules()
            self.last_lr, self.last_momentum = self.current_lr, self.current_momentum

    def take_step(self, stepped: bool) -> None:
        """The optimizer's step with the present gradients, unless it is done already, and one tick of the clock."""
        started = time.perf_counter()
        if not stepped:
            with scaled_lr(self.optimizer, self.lr_factor):
                self.optimizer.step()
        self.advance()
        self.training_seconds += time.perf_counter() - started

    def state_dict(self) -> dict[str, Any]:
        """Everything that an exact continuation needs, but for the sums that the stack holds for it."""
        return super().state_dict() | {
            "data_fingerprint": self.data.fingerprint,
            "error": self.error,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ema": self.average.state_dict() if self.average is not None else {},
            "curves": self.curves.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state; the network stays in its stack."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(state["ema"])
        super().load_state_dict(state)
        self.error = state["error"]
        self.curves.load_state_dict(state["curves"])

    def diverge(self) -> None:
        self.error = f"The loss was not finite at update {self.update}, at learning rate {self.current_lr:.3g}."

    def validate(self) -> None:
        """Adds validation losses to the curves, and passes them to a schedule that follows them."""
        losses = {name: float(values.mean()) for name, values in self.validation_losses().items()}
        if not all(map(math.isfinite, losses.values())):
            self.diverge()
            return
        self.curves.add_quality(self.update, losses)
        self.follow_loss(losses["validation_loss"])
