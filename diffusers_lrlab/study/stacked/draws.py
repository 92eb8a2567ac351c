"""Points, timesteps and noise of the members of a stack, drawn once for members with equal draws."""

from typing import Any

import numpy as np
import torch

from ...core.options import names_where
from ...data.batch import Batch, to_device
from ...data.batches import RowOrder
from ...objective.objective import Objective
from ...training.config import TrainingConfig
from ...training.resolve_timesteps import objective_spec
from .member import Member


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

    def draw(self, update: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Points, timesteps, noise, and weights of the losses if there are any."""
        rows = self._order.rows(np.arange(update * self.batch, (update + 1) * self.batch))
        points = self.points[to_device(Batch(torch.from_numpy(rows)), self.device).data]
        timesteps = self.objective.draw(update)
        noise = torch.cat(list(self.objective.noise(update, points)))
        return points, timesteps, noise, self.objective.weights(timesteps, update)


def draws_of(members: list[Member], device: torch.device) -> dict[Member, Draws]:
    """The draws of each member; members whose draws follow their losses share none."""
    found: dict[Member, Draws] = {}
    shared: dict[Any, Draws] = {}
    points: dict[int, torch.Tensor] = {}
    for member in members:
        key = _draws_key(member)
        assert member.run.data.in_memory is not None  # see `not_stackable`
        data = points.setdefault(id(member.run.data), member.run.data.in_memory.data.to(device))
        draws = shared.get(key) or Draws(member, data, device)
        if not draws.objective.follows_losses:
            shared[key] = draws
        found[member] = draws
    return found


def _draws_key(member: Member) -> Any:
    drawn_by = tuple(repr(getattr(member.run.config, name)) for name in names_where(TrainingConfig, decides_draws=True))
    return (id(member.run.data), member.run.plan.num_updates, *drawn_by)
