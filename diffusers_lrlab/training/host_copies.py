"""Copies of the state of a run in host memory, which a thread writes during training."""

import copy
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def on_host(state: Any) -> Any:
    """A deep copy of nested containers; GPU tensors are copied to pinned memory with one synchronization."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    copies: dict[int, Any] = {id(tensor): _copied(tensor.detach()) for tensor in tensors}
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
    return copy.deepcopy(state, copies)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def with_weights(model: Any, weights: dict[str, torch.Tensor]) -> Any:
    """A copy of a model for `save_pretrained`, with a copy of other weights."""
    held, weights = copy.copy(model), on_host(weights)
    held.state_dict = lambda: weights
    return held
