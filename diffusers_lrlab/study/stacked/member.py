"""A member of a stack: a run whose network is computed there, and the points, timesteps and noise that it draws."""

import math
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from ...core.options import names_where
from ...data.batch import Batch, to_device
from ...data.batches import RowOrder
from ...data.loading import TrainingData
from ...objective.objective import Objective
from ...timesteps.bands import scaled_lr
from ...training.config import TrainingConfig
from ...training.plan import Plan
from ...training.resolve import objective_spec
from ...training.run_state import RunState
from ..measure import Curves


class Member:
    """
    A run whose network is computed in a stack; it has its own model, optimizer, schedules and average.

    Its weights, its average and its sums are views of the stack's, which updates them; [`catch_up`] updates its counters.
    """

    def __init__(self, plan: Plan, data: TrainingData, device: torch.device):
        self.run = RunState(plan, data, device)
        self.run.model.to(device).train()
        self.curves = Curves(plan.num_updates)
        self.sums = torch.zeros(3)  # of loss, gradient norm and updates since the last logging point
        self.error: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has finished or diverged."""
        return self.error is not None or self.run.update == self.run.plan.num_updates

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
            self.run.check_rates()

    def take_step(self, gradients: list[torch.Tensor]) -> None:
        """A step of the optimizer at the rates of this update."""
        started = time.perf_counter()
        self.run.write_rates()
        for parameter, gradient in zip(self.run.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        with scaled_lr(self.run.optimizer, self.run.lr_factor):
            self.run.optimizer.step()
        self.run.training_seconds += time.perf_counter() - started

    def take_out(self) -> None:
        """Copies its tensors out of the stack: views would keep, and save, the tensors of all members."""
        self.catch_up()
        run, self.sums = self.run, torch.zeros(3)
        for parameter in run.model.parameters():
            parameter.data, parameter.grad = parameter.data.clone(), None
        for state in run.optimizer.state.values():
            state.update({name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)})
        if run.average is not None:
            run.average.shadow_params = [value.clone() for value in run.average.shadow_params]

    def state_dict(self) -> dict[str, Any]:
        """The state for an exact resume."""
        self.catch_up()
        run = self.run
        return run.state_dict() | {
            "data_fingerprint": run.data.fingerprint,
            "error": self.error,
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "ema": run.average.state_dict() if run.average is not None else {},
            "curves": self.curves.state_dict(),
            "sums": self.sums.cpu().clone(),
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
        self.sums.copy_(state["sums"])

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


class Inputs(NamedTuple):
    """The inputs of an update, `(batch, ...)` or `(members, batch, ...)` each; `weights` are those of the losses, if any."""

    points: torch.Tensor
    timesteps: torch.Tensor
    noise: torch.Tensor
    weights: torch.Tensor | None


class Draws:
    """Points, timesteps and noise at each update, for members with equal draws; the data are on the device."""

    def __init__(self, member: Member, points: torch.Tensor, device: torch.device):
        run, plan = member.run, member.run.plan
        self.objective = Objective.of(
            objective_spec(run.config), run.process, plan.layout, plan.num_updates, device, lambda values: values
        )
        self.points, self.batch, self.device = points, plan.layout.global_batch, device
        self._order = RowOrder(len(points), run.config.seed)

    def draw(self, update: int) -> Inputs:
        rows = self._order.rows(np.arange(update * self.batch, (update + 1) * self.batch))
        points = self.points[to_device(Batch(torch.from_numpy(rows)), self.device).data]
        timesteps = self.objective.draw(update)
        noise = torch.cat(list(self.objective.noise(update, points)))
        return Inputs(points, timesteps, noise, self.objective.weights(timesteps, update))


def draws_of(members: list[Member], device: torch.device) -> dict[Member, Draws]:
    """The draws of each member; members whose draws follow their losses share none."""
    names = names_where(TrainingConfig, decides_draws=True)
    found: dict[Member, Draws] = {}
    shared: dict[Any, Draws] = {}
    points: dict[int, torch.Tensor] = {}
    for member in members:
        run = member.run
        key = (id(run.data), run.plan.num_updates, *(repr(getattr(run.config, name)) for name in names))
        assert run.data.in_memory is not None  # see `not_stackable`
        data = points.setdefault(id(run.data), run.data.in_memory.data.to(device))
        draws = shared.get(key) or Draws(member, data, device)
        if not draws.objective.follows_losses:
            shared[key] = draws
        found[member] = draws
    return found
