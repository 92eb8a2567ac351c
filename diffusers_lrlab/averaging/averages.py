"""What an average of the weights can do, those that there are, and the one that some optimizers make themselves."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from ..core.registry import Registry

AVERAGES = Registry("average of the weights")
"""Entries are `"module:Class"` of a [`WeightAverage`], called as `Class(model, device, **parameters)`."""

AVERAGES.register(
    "ema",
    description="the decay n updates after the start is 1 - (1 + n / inv_gamma)^-power, max_decay at most",
    source="diffusers.training_utils.EMAModel",
)("diffusers_lrlab.averaging.ema:EMA")


class WeightAverage(Protocol):
    """A running average of a model's parameters."""

    @property
    def decay(self) -> float:
        """What the last step kept of the average."""

    def step(self, update: int) -> None:
        """Takes the weights in, after `update` updates."""

    def weights(self) -> AbstractContextManager[None]:
        """The model carries the average inside this block."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def save(self, folder: Path) -> None:
        """Writes weights and state as diffusers does; `load` reads them."""

    def load(self, folder: Path) -> None: ...


def make_average(name: str, model: Any, device: torch.device, **parameters: Any) -> WeightAverage:
    """An average in `AVERAGES` of a model's parameters, which must stay where they are."""
    return pkgutil.resolve_name(AVERAGES[name].factory)(model, device, **parameters)


def averages_itself(optimizer: Any) -> bool:
    """Whether the optimizer is one whose weights are to be evaluated only after its `eval()`."""
    return "train_mode" in optimizer.param_groups[0]


@contextmanager
def own_average(parameters: list[torch.nn.Parameter], optimizer: Any) -> Iterator[None]:
    """The parameters hold the average of an optimizer that makes one; afterwards they are back to the bit."""
    if not averages_itself(optimizer) or not optimizer.param_groups[0]["train_mode"]:
        yield
        return
    # There and back by its own arithmetic would round, and validating more often would change the run.
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        torch._foreach_copy_([parameter.data for parameter in parameters], before)
