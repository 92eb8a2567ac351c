"""A member of a stack: a run whose network is computed there."""

import math
import pkgutil
import time
from typing import Any

import torch

from ...data.loading import TrainingData
from ...optimizers.elementwise import Rule
from ...optimizers.entries import OPTIMIZERS
from ...timesteps.bands import scaled_lr
from ...training.plan import Plan
from ...training.run_state import RunState
from ..runs.curves import Curves


class Member:
    """
    A run whose network is computed in a stack; it has its own model, optimizer, schedules and average.

    The stack takes the steps of optimizers that have a `rule`, at the rates of the plan, and updates the average. The
    tensors of this run are views of the stack's; [`catch_up`] updates its counters.
    """

    def __init__(self, plan: Plan, data: TrainingData, device: torch.device):
        self.run = RunState(plan, data, device)
        self.run.model.to(device).train()
        self.curves = Curves(plan.num_updates)
        self.error: str | None = None
        path = OPTIMIZERS[plan.config.optimizer].facts.get("elementwise")
        if plan.optimizer_kwargs.get("cautious"):
            path = None  # rules know plain weight decay only
        self.rule: Rule | None = pkgutil.resolve_name(path) if path else None

    @property
    def is_done(self) -> bool:
        """Whether it has finished or diverged."""
        return self.error is not None or self.run.update == self.run.plan.num_updates

    @property
    def step_lr(self) -> float:
        """The learning rate of the next step, for a schedule that follows a metric."""
        factor = self.run.lr_factor
        return self.run.current_lr * (1.0 if factor is None else factor)

    def catch_up(self) -> None:
        """Moves the rates, the count of the audit and the clock of the average to this update."""
        run = self.run
        run.write_rates()
        run.audit.num_updates = run.update
        if run.average is not None:
            run.average.move_to(run.update)

    def check_rates(self) -> None:
        """Compares the learning rate and the momentum of the next step with what is expected."""
        self.catch_up()
        with scaled_lr(self.run.optimizer, self.run.lr_factor):
            self.run.check_schedules()

    def take_step(self) -> None:
        """A step of the optimizer itself with the current gradients."""
        started = time.perf_counter()
        self.check_rates()
        with scaled_lr(self.run.optimizer, self.run.lr_factor):
            self.run.optimizer.step()
        self.run.training_seconds += time.perf_counter() - started

    def advance_feedback(self) -> None:
        """Advances schedules that follow a metric by one update."""
        if self.run.feedback is not None:
            self.run.feedback.advance()

    def take_out(self) -> None:
        """Copies its tensors out of the stack: views would keep, and save, the tensors of all members."""
        self.catch_up()
        run = self.run
        for parameter in run.model.parameters():
            parameter.data, parameter.grad = parameter.data.clone(), None
        names = () if self.rule is None else self.rule.state(run.optimizer.defaults)
        for state in run.optimizer.state.values():
            state.update({name: state[name].clone() for name in names})
        if run.average is not None:
            run.average.shadow_params = [value.clone() for value in run.average.shadow_params]

    def state_dict(self) -> dict[str, Any]:
        """The state for an exact resume, without the sums that the stack keeps."""
        self.catch_up()
        run = self.run
        return run.state_dict() | {
            "data_fingerprint": run.data.fingerprint,
            "error": self.error,
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "ema": run.average.state_dict() if run.average is not None else {},
            "curves": self.curves.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state in place, so that the network stays in its stack."""
        run = self.run
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        if run.average is not None:
            run.average.load_state_dict(state["ema"])
        run.load_state_dict(state)
        self.error = state["error"]
        self.curves.load_state_dict(state["curves"])

    def diverge(self) -> None:
        self.catch_up()
        self.error = f"The loss was not finite at update {self.run.update}, at learning rate {self.run.current_lr:.3g}."

    def add_validation(self, losses: dict[str, float]) -> None:
        """Adds validation losses to the curves and passes them to schedules that follow them."""
        if not all(map(math.isfinite, losses.values())):
            self.diverge()
            return
        self.curves.add_quality(self.run.update, losses)
        self.run.follow_loss(losses["validation_loss"])
