"""Short measurements before long work: which matrix products are fastest here, and what an update will take."""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch

from .matmul_backends import CANDIDATES, STOCK
from .stacked_mlp import StackedMLP

_MEMBERS = 4  # more tell nothing new
_ROUNDS = 12


def fastest_products(model: Any, batch: int) -> dict[str, str]:
    """
    The fastest of `CANDIDATES` for stacks of such networks, by forward and backward passes in turn: about a second.

    Args:
        model ([`MLPDenoiser`]): One of the networks; it is not changed.
        batch (`int`): Points of each in an update.

    Returns:
        `dict`: from kinds of products to names of ways; torch's own wherever there is nothing to choose.
    """
    on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
    if not (on_cpu and torch.backends.mkldnn.is_available()):
        return STOCK
    networks = [copy.deepcopy(model) for _ in range(_MEMBERS)]
    shape = (len(networks), batch, model.config.dimension)
    points, timesteps = torch.zeros(shape), torch.zeros(shape[:2], dtype=torch.int64)
    stacks = {name: StackedMLP(copy.deepcopy(networks), batch, ways) for name, ways in CANDIDATES.items()}
    times: dict[str, list[float]] = {name: [] for name in stacks}
    for turn in range(_ROUNDS + 2):
        for name, stack in stacks.items():
            started = time.perf_counter()
            stack.backward(stack.forward(points, timesteps).clone())
            if turn >= 2:  # the first ones load code and memory
                times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return CANDIDATES[min(medians, key=medians.__getitem__)]
