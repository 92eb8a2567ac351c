"""The training loop over a stack of runs: one computation for all of their networks, and each run's own everything else."""

import math
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ...core.options import names_where
from ...data.batches import iterate_batches, to_device
from ...objective.objective import Objective
from ...training.config import TrainingConfig
from .captured import CapturedUpdate, Inputs, Recorder, record_graph
from .member import Member
from .stacked_mlp import StackedMLP, take_out


class _Draws:
    """What members with the same draws train on at each update."""

    def __init__(self, member: Member, updates: range, device: torch.device):
        plan, data, self.device = member.plan, member.data, device
        self.objective = Objective.of(
            member.objective_spec, member.process, plan.layout, plan.num_updates, device, lambda values: values
        )
        self.batches = iterate_batches(data, plan.layout, member.config.seed, updates)

    def draw(self, update: int) -> Inputs:
        points = to_device(next(self.batches), self.device)
        timesteps = self.objective.draw(update)
        noise = torch.cat(list(self.objective.noise(update, points)))
        return Inputs(points, timesteps, noise, self.objective.weights(timesteps, update))


class Stack:
    """
    Runs side by side.

    Members have one architecture, batch size and diffusion process; those that are not done are at one update. `backends`
    are those of [`StackedMLP`]. `recorder` says how the device's part of an update is recorded, see [`CapturedUpdate`]: as
    a CUDA graph on a GPU if not given, and elsewhere not at all.
    """

    def __init__(
        self,
        members: list[Member],
        device: torch.device,
        backends: dict[str, str] | None = None,
        recorder: Recorder | None = None,
    ):
        self.device, self.backends = device, backends
        self.recorder = record_graph if recorder is None and device.type == "cuda" else recorder
        self.update = next((member.update for member in members if not member.is_done), members[0].update)
        self.sums = torch.zeros(3, len(members), device=device)
        self._gather(members)
        self._draws_of: dict[int, _Draws] = {}
        shared: dict[Any, _Draws] = {}
        for member in members:
            key = _draws_key(member)
            inputs = shared.get(key) or _Draws(member, range(self.update, member.plan.num_updates), device)
            if not inputs.objective.follows_losses:  # which are each member's own
                shared[key] = inputs
            self._draws_of[id(member)] = inputs
            member.objective = inputs.objective
            member.make_parts(device)

    def load(self, states: dict[Member, dict[str, Any]]) -> None:
        """Restores saved states of its members, and drops members that are done."""
        for place, member in enumerate(self.members):
            if member in states:
                member.load_state_dict(states[member])
                self.sums[:, place] = states[member]["sums"].to(self.device)
        self._release_done()

    def sums_of(self, member: Member) -> torch.Tensor:
        """What was summed since the last logging point; zeros for members that are done."""
        if member not in self.members:
            return torch.zeros(3)
        return self.sums[:, self.members.index(member)].cpu()

    def _release_done(self) -> None:
        """Goes on without the members that are done."""
        done = [member for member in self.members if member.is_done]
        if done:
            for member in done:
                take_out(member.model)
            places = [place for place, member in enumerate(self.members) if member not in done]
            self.sums = self.sums[:, places]
            self._gather([self.members[place] for place in places])

    def _gather(self, members: list[Member]) -> None:
        self.members = members
        if not members:
            return
        layout = members[0].plan.layout
        self.mlp = StackedMLP([member.model for member in members], layout.global_batch, self.backends)
        self._captured: CapturedUpdate | None = None
        self._can_record = False
        norms = [member.config.max_grad_norm or math.inf for member in members]
        self.max_norms = torch.tensor(norms, device=self.device, dtype=self.mlp.weights[0].dtype)

    def do_update(self) -> None:
        members, inputs = self.members, self._draw()
        for member in members:
            member.note_rates()
        if self.recorder is not None and self._can_record and self._captured is None:
            self._record(inputs, self.recorder)
        losses = self._compute(inputs) if self._captured is None else self._captured(inputs)
        stepped = set() if self._captured is None else set(self._captured.members)
        for index, member in enumerate(members):
            member.objective.observe(inputs.timesteps[index], losses[index])
            member.take_step(member in stepped)
        self._can_record = True  # every optimizer has its state now
        self.update += 1

    def _record(self, inputs: Inputs, recorder: Recorder) -> None:
        try:
            self._captured = CapturedUpdate(self._compute, self.members, inputs, recorder)
        except RuntimeError as error:  # what a device refuses
            reason = str(error).partition("\n")[0]
            warnings.warn(f"Updates cannot be recorded, and are launched kernel by kernel: {reason}", stacklevel=2)
            self.recorder = None

    def _draw(self) -> Inputs:
        sources = [self._draws_of[id(member)] for member in self.members]
        drawn = {source: source.draw(self.update) for source in dict.fromkeys(sources)}
        points, timesteps, noise = (
            torch.stack([drawn[source][part] for source in sources])  # type: ignore[misc]  # only the weights may be None
            for part in range(3)
        )
        if not any(source.objective.is_weighted for source in sources):
            return Inputs(points, timesteps, noise, None)
        ones = torch.ones(points.shape[1], device=self.device)
        weights = [drawn[source].weights for source in sources]
        return Inputs(points, timesteps, noise, torch.stack([ones if weight is None else weight for weight in weights]))

    def _compute(self, inputs: Inputs) -> torch.Tensor:
        """The unweighted losses `(members, batch)`; leaves the clipped gradients of their weighted means."""
        points, timesteps, noise, weights = inputs
        process, flat = self.members[0].process, (points.flatten(0, 1), noise.flatten(0, 1), timesteps.flatten())
        noisy = process.add_noise(*flat).view_as(points)
        prediction = self.mlp.forward(noisy, timesteps).requires_grad_()
        losses = process.prediction_losses(prediction.flatten(0, 1), *flat).view(len(points), -1)
        means = (losses if weights is None else losses * weights).mean(1)
        (gradient,) = torch.autograd.grad(means.sum(), prediction)
        prediction.requires_grad_(False)
        with torch.no_grad():
            self.mlp.backward(gradient)
            norms = self.mlp.clip(self.max_norms)
        self.sums += torch.stack([means.detach(), norms.to(means), torch.ones_like(means)])
        return losses.detach()

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
            self._release_done()
            yield num_advanced

    def _read_sums(self) -> None:
        """Losses into the curves at logging points, which is also when divergence is noticed."""
        logging = [index for index, member in enumerate(self.members) if member.at_interval(member.config.logging_steps)]
        if not logging:
            return
        losses, norms, counts = self.sums[:, logging].double().cpu().numpy()
        for index, loss, norm in zip(logging, losses / counts, norms / counts, strict=True):
            member = self.members[index]
            member.curves.add_loss(self.update - 1, float(loss), member.last_lr, member.last_momentum)
            if not np.isfinite(loss + norm):
                member.diverge()
        self.sums[:, logging] = 0.0

    def _validate(self) -> None:
        for member in self.members:
            if member.validation is not None and not member.error and member.at_interval(member.plan.validation_updates):
                started = time.perf_counter()
                member.validate()
                member.evaluation_seconds += time.perf_counter() - started


def _draws_key(member: Member) -> Any:
    drawn_by = tuple(repr(getattr(member.config, name)) for name in names_where(TrainingConfig, decides_draws=True))
    return (id(member.data), member.plan.num_updates, *drawn_by)
