"""Training at another width than the learning rate was found at (`--width_base`); `models/width.py` has the rules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.errors import LabError, must_be
from ..core.words import counted
from ..models.width import OPTION, ROLES, SCALED, Width, width_of, width_rule
from ..optimizers.build import LR_GROUP, split_group
from ..optimizers.entries import OPTIMIZERS
from ..schedules.registries import SCHEDULERS
from .model import model_class_of

if TYPE_CHECKING:
    from .config import ResolvedConfig

TRAIT = "width_rule"  # of optimizers
GROUP = "hidden"  # the group of hidden and output matrices, in the log: `lr_hidden`

# Why optimizers of this package have no rule.
_REASONS = {
    **dict.fromkeys(
        ("adam", "rmsprop"), "its weight decay is an L2 penalty, whose share of the gradient depends on the width"
    ),
    **dict.fromkeys(("sgd", "nesterov"), "its steps grow with the gradient, whose size follows the width by other rules"),
    "muon": "it orthogonalises the steps of matrices, whose size follows the width by another rule",
    "prodigy": "it finds one rate for all parameters by itself",
}


def check_width(config: ResolvedConfig) -> None:
    """Raises a `LabError` for a model, an optimizer or a schedule that `--width_base` has no rule for; reads no data."""
    if config.width_base is None:
        return
    if TRAIT not in OPTIMIZERS[config.optimizer].traits:
        reason = _REASONS.get(config.optimizer, f"it does not declare the trait {TRAIT!r}")
        *names, last = (name for name, entry in OPTIMIZERS.items() if TRAIT in entry.traits)
        raise must_be("--optimizer", config.optimizer, f"{', '.join(names)} or {last} with {OPTION}", reason)
    traits, kwargs = SCHEDULERS[config.lr_scheduler].traits, config.lr_scheduler_kwargs
    floor = kwargs.get("min_lr", 0.0)
    if (floor and {"floor_of_all", "feedback"} & traits) or (floor is None and "feedback" in traits):
        raise LabError(
            f"{OPTION} gives groups of parameters their own rates, and --lr_scheduler {config.lr_scheduler} has one floor "
            "for all of them. Hint: give it min_lr=0, or use another schedule, such as cosine with min_lr_ratio."
        )
    width_rule(model_class_of(config))


def planned_width(config: ResolvedConfig, arguments: dict[str, Any]) -> Width | None:
    """The width of the model with these arguments, and the roles of its parameters; `None` without `--width_base`."""
    if config.width_base is None:
        return None
    import torch

    with torch.device("meta"):
        return width_of(model_class_of(config)(**arguments), config.width_base)


def width_groups(named: Mapping[str, Any], width: Width, learning_rate: float) -> list[dict[str, Any]]:
    """Parameter groups of a model by their factor on the learning rate; equal factors share a group."""
    names = {id(parameter): name for name, parameter in named.items()}
    factors = {width.factor(role) for role in ROLES}

    def factor_of(parameter: Any) -> float:
        return width.factor(width.roles[names[id(parameter)]])

    groups = split_group({"params": [*named.values()]}, learning_rate, factor_of, {each: each for each in factors})
    groups.sort(key=lambda group: group["lr"] != learning_rate)  # the log has the rate of the first group
    for group in groups[1:]:
        group[LR_GROUP] = GROUP
    return groups


def keep_weight_decay(optimizer: Any, width: Width) -> None:
    """
    Divides the weight decay of the groups whose learning rate has a factor by this factor.

    Decoupled weight decay shrinks a weight by the learning rate times `weight_decay` at each update. This product stays, as
    a part of muP.
    """
    for group in optimizer.param_groups:
        if group.get(LR_GROUP) == GROUP and "weight_decay" in group:
            group["weight_decay"] = group["weight_decay"] * width.width / width.base


def width_in_words(width: Width | None, weight_decay: float, indent: str) -> str:
    """The factors and the parameters that have them, with `*` for the index of a block."""
    if width is None:
        return ""
    lines = [f"{width.width}, of a base of {width.base} (muP)"]
    for role, title in ROLES.items():
        if names := width.names(role):
            shown = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name, count=1) for name in names)
            factor = f"learning rate x {width.factor(role):.4g}"
            if role in SCALED and weight_decay:
                factor += f", weight decay x {1 / width.factor(role):.4g}"
            some = ", ".join(shown) if role != "vector" else counted(len(names), "parameter")
            lines.append(f"{factor}: {title} ({some})")
    return f"\n{indent}".join(lines)
