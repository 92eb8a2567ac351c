"""Captures an update of a stack as a CUDA graph, for models so small that launch overhead dominates.

A graph replays the recorded kernels in the recorded memory, with every number that Python passed then. Whatever changes
between updates is therefore copied into that memory: points, timesteps, noise, weights, learning rates, momenta.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

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


def record_graph(work: Callable[[], None]) -> Callable[[], None]:
    """A [`Recorder`] for NVIDIA GPUs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay  # a bound method, which keeps the graph alive


class CapturedUpdate:
    """
    The recorded work of the device in an update: losses `(members, batch)`, gradients and optimizer steps. All updates have
    inputs of the shapes of `inputs`.
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
