"""Parameter groups with factors on the learning rate, of `--width_base`."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

LR_FACTOR = "lab_lr_factor"  # a key of parameter groups, saved with the optimizer's state
LR_GROUP = "lab_lr_group"  # likewise: the name of the group in the log; missing in groups without one


def split_group(
    group: dict[str, Any], lr: float, label_of: Callable[[Any], Hashable], factors: Mapping[Any, float]
) -> list[dict[str, Any]]:
    """Splits a group with the learning rate `lr` by the labels of its parameters, which have these factors."""
    parts: dict[Hashable, list[Any]] = {}
    for parameter in group["params"]:
        parts.setdefault(label_of(parameter), []).append(parameter)
    return [
        {**group, "params": parameters, "lr": lr * factors[label], LR_FACTOR: factors[label]}
        for label, parameters in parts.items()
    ]


def lr_factor_of(group: Mapping[str, Any]) -> float:
    """The factor of a group, 1 without one."""
    return group.get(LR_FACTOR, 1.0)


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Sets the learning rate of all groups, each times its factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * lr_factor_of(group)
