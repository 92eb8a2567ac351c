"""The number by which a loss was divided before its backward pass."""

from __future__ import annotations

from typing import Any

import torch

_PASSED_THROUGH = ("ToCopy", "Alias", "View", "Squeeze", "Reshape", "Clone")


def loss_divisor(tensors: Any, is_scaled: bool) -> float | None:
    """
    The product of the divisors at the end of the loss's graph; 1 if there is none, `None` if it is unknown.

    `is_scaled` leaves out one factor, the scale of a gradient scaler.
    """
    root = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
    node = getattr(root, "grad_fn", None)
    if node is None:
        return None
    divisor = 1.0
    for _ in range(8):
        name = node.name()
        if name.startswith(("DivBackward", "MulBackward")):
            factor = _constant(node)
            if name.startswith("Mul") and is_scaled:
                is_scaled, factor = False, 1.0
            if factor is None:
                return None
            divisor *= factor if name.startswith("Div") else 1 / (factor or 1.0)
        elif not name.startswith(_PASSED_THROUGH):
            break
        node = node.next_functions[0][0]
        if node is None:
            break
    return divisor


def _constant(node: Any) -> float | None:
    """The number by which a node divides or multiplies."""
    if len(node.next_functions) > 1 and node.next_functions[1][0] is not None:
        return None
    value = getattr(node, "_saved_other", None)
    if type(value) is torch.Tensor and value.numel() == 1 and value.device.type == "cpu":
        return float(value)
    return None
