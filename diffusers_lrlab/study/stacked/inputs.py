"""Inputs of the updates of a stack: drawn once for members with equal draws, and copied into the memory of a CUDA graph."""

from collections.abc import Callable
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

# Takes work and returns a function that repeats it. Recording alone does not execute the work.
Recorder = Callable[[Callable[[], None]], Callable[[], None]]


class Inputs(NamedTuple):
    """
    The inputs of one update of a stack, `(members, batch, ...)` each. `weights` are those of the losses, if any; `rates` is
    the row of [`rates_of`] for the update.
    """

    points: torch.Tensor
    timesteps: torch.Tensor
    noise: torch.Tensor
    weights: torch.Tensor | None
    rates: torch.Tensor


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


def record_graph(work: Callable[[], None]) -> Callable[[], None]:
    """A [`Recorder`] for NVIDIA GPUs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay  # a bound method, which keeps the graph alive


class CapturedUpdate:
    """
    The recorded work of the device in an update, for models so small that launching it takes longest: losses
    `(members, batch)`, gradients and batched optimizer steps.

    A graph replays the recorded kernels in the recorded memory, with every number that Python passed then. All inputs,
    whose shapes stay those of `inputs`, are therefore copied into that memory.
    """

    def __init__(self, compute: Callable[[Inputs], torch.Tensor], inputs: Inputs, record: Recorder):
        self._inputs = Inputs(*(None if part is None else part.clone() for part in inputs))  # type: ignore[arg-type]
        self._losses = inputs.points.new_zeros(inputs.points.shape[:2])

        def work() -> None:
            self._losses.copy_(compute(self._inputs))

        self._replay = record(work)

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """Runs an update; the losses are valid until the next one."""
        for recorded, part in zip(self._inputs, inputs, strict=True):
            if recorded is not None and part is not None:
                recorded.copy_(part)
        self._replay()
        return self._losses
