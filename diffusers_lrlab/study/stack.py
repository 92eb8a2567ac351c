"""The training loop over a stack of runs: one computation for all of their networks, and each run's own everything else."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..data.batches import iterate_batches
from ..data.loading import TrainingData
from ..loss import prediction_losses
from ..schedules.feedback import FeedbackSchedule
from ..timesteps.bands import scaled_lr
from ..training.core import RunCore
from ..training.objective import Objective
from ..training.plan import Plan
from .curves import Curves
from .stacked_mlp import StackedMLP, take_out

# What decides which points, timesteps and noise an update has. Members that agree in all of it share the draws.
_DRAWN_BY = (
    *("seed", "timestep_sampler", "timestep_sampler_kwargs", "loss_weighting", "loss_weighting_kwargs", "timestep_lr"),
    *("timestep_lr_kwargs", "noise", "noise_kwargs"),
)


class Member(RunCore):
    """
    A run whose network is part of a stack; model, optimizer, schedules and EMA are the real ones.

    Args:
        plan ([`Plan`]): What to do.
        data ([`TrainingData`]): What to train on.
        device (`torch.device`): Where.
    """

    def __init__(self, plan: Plan, data: TrainingData, device: torch.device):
        super().__init__(plan, data)
        self.model = self.model.to(device).train()
        self.curves = Curves(plan.num_updates)
        self.error: str | None = None
        self.last_lr = 0.0
        self.last_momentum: float | None = None

    def start(self, objective: Objective, device: torch.device) -> None:
        """Makes the rest, once the network is in its stack."""
        self.objective = objective
        self.make_parts(device)

    @property
    def is_done(self) -> bool:
        """Whether it has come to its end, whichever that is."""
        return self.error is not None or self.update == self.plan.num_updates

    def take_step(self) -> None:
        """The optimizer's step with the gradients that are there, and one tick of the clock."""
        started = time.perf_counter()
        with scaled_lr(self.optimizer, self.lr_factor):
            self.check_schedules()
            self.last_lr, self.last_momentum = self.current_lr, self.current_momentum
            self.optimizer.step()
        self.advance()
        self.training_seconds += time.perf_counter() - started

    def state_dict(self, sums: torch.Tensor) -> dict[str, Any]:
        """Everything that an exact continuation needs; `sums` are what the stack holds for it."""
        return {
            "update": self.update,
            "error": self.error,
            "sums": sums,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedules": [scheduler.state_dict() for scheduler in self.schedulers],
            "ema": self.ema.state_dict() if self.ema is not None else {},
            "objective": self.objective.state_dict(),
            "audit": self.audit.state_dict(),
            "curves": self.curves.state_dict(),
            "seconds": [self.training_seconds, self.evaluation_seconds],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to a state; the network stays in its stack."""
        self.update, self.error = state["update"], state["error"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for scheduler, saved in zip(self.schedulers, state["schedules"], strict=True):
            scheduler.load_state_dict(saved)
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
            self.ema.to(self.model.device)
        self.objective.load_state_dict(state["objective"])
        self.audit.load_state_dict(state["audit"])
        self.curves.load_state_dict(state["curves"])
        self.training_seconds, self.evaluation_seconds = state["seconds"]

    def diverge(self) -> None:
        """Notes that the loss is no longer finite."""
        self.error = f"The loss was not finite at update {self.update}, at learning rate {self.current_lr:.3g}."

    def validate(self) -> None:
        """Adds validation losses to the curves, and shows them to a schedule that follows them."""
        losses = {name: float(values.mean()) for name, values in self.validation_losses().items()}
        if not all(map(math.isfinite, losses.values())):
            self.diverge()
            return
        self.curves.add_quality(self.update, losses)
        if isinstance(self.schedulers[0], FeedbackSchedule):
            self.schedulers[0].step(losses["validation_loss"])  # type: ignore[arg-type]  # a metric, not torch's old epoch


class _Inputs:
    """What members with the same draws learn from at each update."""

    def __init__(self, member: Member, updates: range, device: torch.device):
        plan, data, self.device = member.plan, member.data, device
        self.objective = Objective(
            member.config, member.noise_scheduler, plan.layout, plan.num_updates, device, lambda values: values
        )
        self.batches = iterate_batches(data, plan.layout, member.config.seed, updates)

    def draw(self, update: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Points, timesteps, noise and weights of the losses."""
        points = next(self.batches).to(self.device)
        timesteps = self.objective.draw(update)
        noise = torch.cat(list(self.objective.noise(update, points)))
        return points, timesteps, noise, self.objective.weights(timesteps, update)


class Stack:
    """
    Runs side by side.

    Args:
        members (`list` of [`Member`]): Of one architecture, batch size and diffusion process; those that are not done, at
            one update.
        device (`torch.device`): Where.
        ways (`dict`, *optional*): See [`StackedMLP`].
    """

    def __init__(self, members: list[Member], device: torch.device, ways: dict[str, str] | None = None):
        self.device, self.ways = device, ways
        self.update = next((member.update for member in members if not member.is_done), members[0].update)
        self.sums = torch.zeros(3, len(members), device=device)
        self._gather(members)
        self._inputs_of: dict[int, _Inputs] = {}
        shared: dict[Any, _Inputs] = {}
        for member in members:
            key = _draws_key(member)
            inputs = shared.get(key) or _Inputs(member, range(self.update, member.plan.num_updates), device)
            if not inputs.objective.follows_losses:  # which are each member's own
                shared[key] = inputs
            self._inputs_of[id(member)] = inputs
            member.start(inputs.objective, device)

    def load(self, states: dict[Member, dict[str, Any]]) -> None:
        """Puts members back into states that were saved, and lets those go that are done."""
        for member, state in states.items():
            member.load_state_dict(state)
            self.sums[:, self.members.index(member)] = state["sums"].to(self.device)
        self._let_go()

    def sums_of(self, member: Member) -> torch.Tensor:
        """What was summed since the last logging point; zeros for members that are done."""
        if member not in self.members:
            return torch.zeros(3)
        return self.sums[:, self.members.index(member)].cpu()

    def _let_go(self) -> None:
        """The stack goes on without the members that are done."""
        members = [member for member in self.members if not member.is_done]
        if len(members) == len(self.members):
            return
        for member in self.members:
            if member.is_done:
                take_out(member.model)
        places = [self.members.index(member) for member in members]
        self.sums = self.sums[:, places]
        self._gather(members)

    def _gather(self, members: list[Member]) -> None:
        """Puts the networks of these members, and of no others, into the stack."""
        self.members = members
        if not members:
            return
        layout = members[0].plan.layout
        self.mlp = StackedMLP([member.model for member in members], layout.global_batch, self.ways)
        norms = [member.config.max_grad_norm or math.inf for member in members]
        self.max_norms = torch.tensor(norms, device=self.device, dtype=self.mlp.weights[0].dtype)

    def do_update(self) -> None:
        """One update of all members."""
        update, members = self.update, self.members
        inputs = [self._inputs_of[id(member)] for member in members]
        drawn = {source: source.draw(update) for source in dict.fromkeys(inputs)}
        points, timesteps, noise = (
            torch.stack([drawn[source][part] for source in inputs])  # type: ignore[misc]  # only the weights may be None
            for part in range(3)
        )
        scheduler, flat = members[0].noise_scheduler, (points.flatten(0, 1), noise.flatten(0, 1), timesteps.flatten())
        noisy = scheduler.add_noise(*flat).view_as(points)
        prediction = self.mlp.forward(noisy, timesteps).requires_grad_()
        losses = prediction_losses(prediction.flatten(0, 1), scheduler, *flat).view(len(members), -1)
        weights = [drawn[source][3] for source in inputs]
        if all(weight is None for weight in weights):
            weighted = losses
        else:
            ones = torch.ones_like(losses[0])
            weighted = losses * torch.stack([ones if weight is None else weight for weight in weights])
        means = weighted.mean(1)
        (gradient,) = torch.autograd.grad(means.sum(), prediction)
        prediction.requires_grad_(False)
        with torch.no_grad():
            self.mlp.backward(gradient)
            norms = self.mlp.clip(self.max_norms)
        self.sums += torch.stack([means.detach(), norms.to(means), torch.ones_like(means)])
        unweighted = losses.detach()
        for index, member in enumerate(members):
            member.objective.observe(timesteps[index], unweighted[index])
            member.take_step()
        self.update += 1

    def updates(self) -> Iterator[int]:
        """Trains until every member is done, and yields the number of members that were advanced after each update."""
        while self.members:
            started = time.perf_counter()
            own = sum(member.training_seconds for member in self.members)
            self.do_update()
            self._read_sums()
            own = sum(member.training_seconds for member in self.members) - own
            share = (time.perf_counter() - started - own) / len(self.members)
            for member in self.members:
                member.training_seconds += share
            self._validate()
            num_advanced = len(self.members)
            self._let_go()  # of those that are done
            yield num_advanced

    def _read_sums(self) -> None:
        """Losses into the curves at logging points, which is also when divergence is noticed."""
        due = [index for index, member in enumerate(self.members) if _is_due(member, self.update)]
        if not due:
            return
        losses, norms, counts = self.sums[:, due].double().cpu().numpy()
        for index, loss, norm in zip(due, losses / counts, norms / counts, strict=True):
            member = self.members[index]
            member.curves.add_loss(self.update - 1, float(loss), member.last_lr, member.last_momentum)
            if not np.isfinite(loss + norm):
                member.diverge()
        self.sums[:, due] = 0.0

    def _validate(self) -> None:
        for member in self.members:
            if member.validation is None or member.error:
                continue
            if self.update % member.plan.validation_updates == 0 or self.update == member.plan.num_updates:
                started = time.perf_counter()
                member.validate()
                member.evaluation_seconds += time.perf_counter() - started


def _is_due(member: Member, update: int) -> bool:
    return update % member.config.logging_steps == 0 or update == member.plan.num_updates


def _draws_key(member: Member) -> Any:
    """Equal for members with the same draws."""
    drawn_by = tuple(repr(getattr(member.config, name)) for name in _DRAWN_BY)
    return (id(member.data), member.plan.num_updates, *drawn_by)
