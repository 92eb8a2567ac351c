"""An update of a stack as one CUDA graph: it is launched at once, where its kernels take the host longer to launch than the
device to compute.

A graph does again what was recorded, in the memory it was recorded in, with every number that Python put in. What changes
from update to update is therefore copied to where it was: points, timesteps, noise, weights, learning rates, momenta.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

# From work to what does it again. The work is not done while it is recorded.
Recorder = Callable[[Callable[[], None]], Callable[[], None]]


class Inputs(NamedTuple):
    """
    What a stack trains on in an update: `(members, batch, ...)` each, `weights` of the losses only if there are any; `rates`
    are those of the update, see `rates_of`.
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
    return graph.replay  # which keeps the graph


class CapturedUpdate:
    """
    What the device does in an update, recorded: the losses `(members, batch)` of [`Inputs`], their gradients, and the steps
    that the stack takes. `inputs` have the shapes that all updates have.
    """

    def __init__(self, compute: Callable[[Inputs], torch.Tensor], inputs: Inputs, record: Recorder):
        self._inputs = Inputs(*(None if part is None else part.clone() for part in inputs))  # type: ignore[arg-type]
        self._losses = inputs.points.new_zeros(inputs.points.shape[:2])

        def work() -> None:
            self._losses.copy_(compute(self._inputs))

        self._replay = record(work)

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """Does an update; the losses are valid until the next one."""
        for place, part in zip(self._inputs, inputs, strict=True):
            if place is not None and part is not None:
                place.copy_(part)
        self._replay()
        return self._losses
