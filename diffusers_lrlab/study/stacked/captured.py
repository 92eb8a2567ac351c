"""An update of a stack as one CUDA graph: it is launched at once, where its thousands of kernels take the host longer to
launch than the device to compute.

A graph does again what was recorded, in the memory it was recorded in, with every number that Python put in. What changes
from update to update is therefore copied to where it was: points, timesteps, noise, weights, learning rates, momenta.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from .member import Member

# From work to what does it again. The work is not done while it is recorded.
Recorder = Callable[[Callable[[], None]], Callable[[], None]]


class Inputs(NamedTuple):
    """What a stack trains on in an update: `(members, batch, ...)` each; `weights` of the losses only if there are any."""

    points: torch.Tensor
    timesteps: torch.Tensor
    noise: torch.Tensor
    weights: torch.Tensor | None


def record_graph(work: Callable[[], None]) -> Callable[[], None]:
    """A [`Recorder`] for NVIDIA GPUs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay  # which keeps the graph


class CapturedUpdate:
    """
    What the device does in an update, recorded: the losses, their gradients, and the steps of all optimizers that allow it.

    `compute` makes the losses `(members, batch)` of [`Inputs`], and leaves the gradients to their owners. Each member has
    done at least one step, so that its optimizer has its state; `inputs` have the shapes that all updates have.
    """

    def __init__(self, compute: Callable[[Inputs], torch.Tensor], members: list[Member], inputs: Inputs, record: Recorder):
        self.members = [member for member in members if can_be_captured(member)]
        points, timesteps, noise, weights = inputs
        self._inputs = Inputs(points.clone(), timesteps.clone(), noise.clone(), None if weights is None else weights.clone())
        self._rates = next(members[0].model.parameters()).new_zeros(2, len(self.members))
        self._losses = inputs.points.new_zeros(inputs.points.shape[:2])

        for member in self.members:  # RMSprop counts its steps on the host
            for state in member.optimizer.state.values():
                if "step" in state:
                    state["step"] = state["step"].to(self._rates.device)

        def work() -> None:
            self._losses.copy_(compute(self._inputs))
            for member, lr, beta1 in zip(self.members, *self._rates, strict=True):
                with _read_from_device(member, lr, beta1):
                    member.optimizer.step()

        self._replay = record(work)

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """Does an update at the rates that the members noted; the losses are valid until the next one."""
        for place, part in zip(self._inputs, inputs, strict=True):
            if place is not None and part is not None:
                place.copy_(part)
        noted = [[member.last_lr for member in self.members], [member.last_momentum or 0.0 for member in self.members]]
        rates = torch.tensor(noted, dtype=self._rates.dtype, pin_memory=self._rates.is_cuda)
        self._rates.copy_(rates, non_blocking=True)  # from pinned memory the host does not wait
        self._replay()
        return self._losses


def can_be_captured(member: Member) -> bool:
    """Whether the optimizer's step reads from the device whatever a schedule changes. Others step outside the graph."""
    with_fixed_momentum = () if member.plan.schedule.sets_momentum else (torch.optim.RMSprop, torch.optim.SGD)
    return type(member.optimizer) in (torch.optim.Adam, torch.optim.AdamW, *with_fixed_momentum)


@contextmanager
def _read_from_device(member: Member, lr: torch.Tensor, beta1: torch.Tensor) -> Iterator[None]:
    """The optimizer takes its learning rate, and a momentum that is scheduled, from tensors inside this block."""
    (group,) = member.optimizer.param_groups
    before = dict(group)
    group["lr"] = lr
    if "capturable" in group:
        group["capturable"] = True
    # Of torch's implementations, those that do not read these tensors back.
    if member.plan.schedule.sets_momentum:
        group.update(betas=(beta1, group["betas"][1]), fused=False, foreach=False)
    elif not group.get("fused"):
        group["foreach"] = True
    try:
        yield
    finally:
        group.update(before)
