"""A run whose network is part of a stack."""

import math
import pkgutil
import time
from typing import Any

import torch

from ...data.loading import TrainingData
from ...optimizers.elementwise import Rule
from ...optimizers.entries import OPTIMIZERS
from ...schedules.feedback import FeedbackSchedule
from ...schedules.scheduler import CurveLR
from ...timesteps.bands import scaled_lr
from ...training.base_run import BaseRun
from ...training.plan import Plan
from ..runs.curves import Curves


class Member(BaseRun):
    """
    A run whose network is part of a stack; model, optimizer, schedules and average are the real ones.

    The stack does what is the same for all: it takes the steps of optimizers that have a `rule`, at the rates of the plan,
    and keeps the averages. The objects here know of it when they are asked, by [`catch_up`]; their numbers are views.
    """

    def __init__(self, plan: Plan, data: TrainingData, device: torch.device):
        super().__init__(plan, data)
        self.model = self.model.to(device).train()
        self.curves = Curves(plan.num_updates)
        self.error: str | None = None
        path = OPTIMIZERS[plan.config.optimizer].facts.get("elementwise")
        self.rule: Rule | None = pkgutil.resolve_name(path) if path else None

    def make_parts(self, device: torch.device, has_average: bool = True) -> None:
        super().make_parts(device, has_average)
        self.feedback = [scheduler for scheduler in self.schedulers if isinstance(scheduler, FeedbackSchedule)]

    @property
    def is_done(self) -> bool:
        """Whether it has finished or diverged."""
        return self.error is not None or self.update == self.plan.num_updates

    @property
    def step_lr(self) -> float:
        """The learning rate of the next step, for a schedule that follows a metric."""
        return self.current_lr * (1.0 if self.lr_factor is None else self.lr_factor)

    def catch_up(self) -> None:
        """Moves schedules of the clock, the audit's count and the average's clock to this update."""
        for scheduler in self.schedulers:
            if isinstance(scheduler, CurveLR) and scheduler.last_epoch != self.update:
                scheduler.move_to(self.update)
        self.audit.num_updates = self.update
        if self.average is not None:
            self.average.move_to(self.update)

    def check_rates(self) -> None:
        """Compares the learning rate and the momentum of the next step with what is expected."""
        self.catch_up()
        with scaled_lr(self.optimizer, self.lr_factor):
            self.check_schedules()

    def take_step(self) -> None:
        """The optimizer's own step with the present gradients."""
        started = time.perf_counter()
        self.check_rates()
        with scaled_lr(self.optimizer, self.lr_factor):
            self.optimizer.step()
        self.training_seconds += time.perf_counter() - started

    def advance_feedback(self) -> None:
        """One tick of the clock for schedules that follow a metric."""
        for scheduler in self.feedback:
            scheduler.advance()

    def take_out(self) -> None:
        """Gives it numbers of its own again: views of them would keep, and save, the whole stack."""
        self.catch_up()
        for parameter in self.model.parameters():
            parameter.data, parameter.grad = parameter.data.clone(), None
        names = () if self.rule is None else self.rule.state(self.optimizer.defaults)
        for state in self.optimizer.state.values():
            state.update({name: state[name].clone() for name in names})
        if self.average is not None:
            self.average.ema.shadow_params = [value.clone() for value in self.average.ema.shadow_params]

    def state_dict(self) -> dict[str, Any]:
        """Everything that an exact continuation needs, but for the sums that the stack holds for it."""
        self.catch_up()
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
        self.catch_up()
        self.error = f"The loss was not finite at update {self.update}, at learning rate {self.current_lr:.3g}."

    def add_validation(self, losses: dict[str, float]) -> None:
        """Adds validation losses to the curves, and passes them to a schedule that follows them."""
        if not all(map(math.isfinite, losses.values())):
            self.diverge()
            return
        self.curves.add_quality(self.update, losses)
        self.follow_loss(losses["validation_loss"])
