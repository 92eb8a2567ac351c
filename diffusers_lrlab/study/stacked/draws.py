"""Points, timesteps and noise of the members of a stack, drawn once for members with equal draws."""

from typing import Any, NamedTuple

import numpy as np
import torch

from ...core.options import names_where
from ...data.batch import Batch, to_device
from ...data.batches import RowOrder
from ...objective.objective import Objective
from ...training.config import TrainingConfig
from ...training.resolve_timesteps import objective_spec
from .member import Member


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
        plan.layout.check_fits(len(points))
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
