"""Momentum schedules, which are also learning-rate schedules of the same names, so that diffusers' scripts can use them.

When momentum decays, a new gradient gets a larger weight. In Adam's update, m <- b m + (1 - b) g, this weight is 1 - b, and
rises tenfold when b falls from 0.9 to 0. MDLRC lowers the learning rate by the same factor:

    b(n)  = b0 (1 - p) / ((1 - b0) + b0 (1 - p))             Demon, arXiv 1910.04952, eq. 4
    lr(n) = lr0 (1 - b0) / (1 - b(n)) = lr0 (1 - b0 p)       arXiv 2404.07946

The paper's equations were not accessible: MDLRC follows an implementation that cites the paper, and agrees with the
abstract. The compensation alone is a linear decay of the learning rate to 1 - b0; `mdlrc_lr_only` isolates it as an
ablation. Adam's bias correction assumes a constant momentum; the error is below 1e-3 after about 100 updates.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.progress import Progress
from ..core.registry import Entry, Parameter
from .registries import MOMENTUM_SCHEDULERS, SCHEDULERS
from .torch_curves import ONE_CYCLE_MOMENTA, ONE_CYCLE_PHASES, ONE_CYCLE_RISE, ONE_CYCLE_STRATEGY, TORCH, one_cycle_curve

_DEMON, _MDLRC = "Demon, arXiv 1910.04952, eq. 4", "arXiv 2404.07946, as read by an implementation that cites it"
_FLOOR = Parameter("min_momentum", float, 0.0, "lower bound of the momentum", "[0, 1)")
_FORM = Parameter(
    "momentum_form",
    str,
    "ema",
    "weight of a new gradient in the optimizer: 1 - momentum (Adam) or 1 (SGD), where the compensation raises the rate",
    choices=("ema", "heavy_ball"),
)


@MOMENTUM_SCHEDULERS.register("constant", description="constant momentum", source="–")
def constant(progress: Progress, momentum: float) -> tuple[Any, Any]:
    return np.full_like(progress.update, momentum, dtype=float), 1.0


@MOMENTUM_SCHEDULERS.register(
    "demon", description="momentum that decays from the optimizer's own value to 0", source=_DEMON, parameters=(_FLOOR,)
)
def demon(progress: Progress, momentum: float, min_momentum: float) -> tuple[Any, Any]:
    r"""\(b = b_0 (1 - p) / ((1 - b_0) + b_0 (1 - p))\)."""
    rest = momentum * (1 - progress.fraction)
    return np.maximum(rest / ((1 - momentum) + rest), min(min_momentum, momentum)), 1.0


def _compensation(start: float, momentum: Any, form: str) -> Any:
    """The factor on the learning rate that keeps lr (1 - b) (EMA) or lr / (1 - b) (heavy ball) constant."""
    return (1 - start) / (1 - momentum) if form == "ema" else (1 - momentum) / (1 - start)


@MOMENTUM_SCHEDULERS.register(
    "mdlrc",
    description="demon, with the learning rate lowered by the factor by which new gradients gain weight",
    source=_MDLRC,
    parameters=(_FLOOR, _FORM),
    traits=("compensates",),
)
def mdlrc(progress: Progress, momentum: float, min_momentum: float, momentum_form: str) -> tuple[Any, Any]:
    r"""`demon`, and \(lr = lr_0 (1 - b_0) / (1 - b)\), so that \(lr (1 - b)\) is constant."""
    beta, _ = demon(progress, momentum, min_momentum)
    return beta, _compensation(momentum, beta, momentum_form)


@MOMENTUM_SCHEDULERS.register(
    "mdlrc_lr_only",
    description="the control for mdlrc: its change of the learning rate, with constant momentum",
    source=_MDLRC,
    parameters=(_FLOOR, _FORM),
    traits=("compensates",),
)
def mdlrc_lr_only(progress: Progress, momentum: float, min_momentum: float, momentum_form: str) -> tuple[Any, Any]:
    r"""\(lr = lr_0 (1 - b_0 p)\) in the EMA form."""
    _, factor = mdlrc(progress, momentum, min_momentum, momentum_form)
    return constant(progress, momentum)[0], factor


@MOMENTUM_SCHEDULERS.register(
    "mdlrc_linear",
    description="momentum and learning rate both decay linearly to 0",
    source="a later variant of the same implementation",
    parameters=(_FLOOR,),
    traits=("compensates",),
)
def mdlrc_linear(progress: Progress, momentum: float, min_momentum: float) -> tuple[Any, Any]:
    r"""\(b = b_0 (1 - p)\), \(lr = lr_0 (1 - p)\)."""
    left = 1 - progress.fraction
    return np.maximum(momentum * left, min(min_momentum, momentum)), left


@MOMENTUM_SCHEDULERS.register(
    "one_cycle",
    description="from high down to low and back: the momentum of the one-cycle policy",
    source=f"{TORCH}.OneCycleLR; arXiv 1803.09820",
    parameters=(ONE_CYCLE_RISE, ONE_CYCLE_STRATEGY, *ONE_CYCLE_MOMENTA, ONE_CYCLE_PHASES),
)
def one_cycle(
    progress: Progress,
    momentum: float,
    base_momentum: float,
    max_momentum: float,
    pct_start: float | None,
    anneal_strategy: str,
    three_phase: bool,
    **learning_rate: Any,
) -> tuple[Any, Any]:
    if base_momentum > max_momentum:
        raise LabError(f"one_cycle got base_momentum={base_momentum} above max_momentum={max_momentum}. Swap them.")
    levels = (max_momentum, base_momentum, max_momentum)
    return one_cycle_curve(progress, levels, pct_start, anneal_strategy, three_phase), 1.0


def _flat(progress: Progress, **momentum: Any) -> Any:
    """The shape of the learning rate of a momentum schedule, without warm-up, floor and compensation."""
    return 1.0


_RATES = set(SCHEDULERS)
for _entry in MOMENTUM_SCHEDULERS.values():
    if _entry.name in _RATES:  # a schedule of the rate has this name already
        continue
    SCHEDULERS.register(
        _entry.name,
        description=_entry.description + "; otherwise constant",
        source=_entry.source,
        parameters=_entry.parameters,
        traits=("momentum",),
    )(_flat)


# Optimizers, by a part of the class name, whose beta1 is not the decay of a running mean of gradients.
_OTHER_BETA1 = {
    "Lion": "weighs the gradient against its running mean inside a sign, so there is no size to compensate",
    "ScheduleFree": "interpolates between two sequences of weights",
}


def momentum_groups(optimizer: Any, schedule: Entry, kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """
    The parameter groups of an optimizer, after unwrapping it, for a momentum schedule to drive.

    Raises a `LabError` for an optimizer whose momentum is missing or is not the decay of a running mean of gradients, and
    for a compensation that is wrong or meaningless for it.
    """
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper
        optimizer = optimizer.optimizer
    driven, groups = type(optimizer).__name__, optimizer.param_groups
    for name, meaning in _OTHER_BETA1.items():
        if name in driven:
            raise LabError(f"A momentum schedule cannot drive {driven}: its beta1 {meaning}. Use another optimizer.")
    for group in groups:
        # Momentum of a resumed optimizer may have decayed to 0.
        if not group.get("initial_momentum", read_momentum(group)):
            raise LabError(
                f"A momentum schedule needs an optimizer with momentum, and this {driven} has none: give it one, such as "
                f"{'momentum' if _key(group) == 'momentum' else 'beta1'}=0.9, or use AdamW."
            )
    if "compensates" not in schedule.traits:
        return groups
    if "Muon" in driven:
        raise LabError(
            f"{schedule.name!r} compensates what momentum does to the size of an update, which {driven} normalises away. "
            "Use 'demon'."
        )
    # RMSprop's momentum is SGD's, applied after scaling.
    form = "heavy_ball" if _key(groups[0]) == "momentum" else "ema"
    asked = kwargs.get("momentum_form", form)
    if asked != form:
        raise LabError(
            f"{schedule.name!r} with momentum_form={asked!r} does not suit {driven}, whose momentum has the form {form!r}: "
            f"the compensation would have the wrong sign. Give momentum_form={form}."
        )
    return groups


def _key(group: dict[str, Any]) -> str:
    """The key of the momentum in a parameter group; an empty string if it has none."""
    return next((key for key in ("betas", "beta1", "momentum") if key in group), "")


def _held_momentum(group: dict[str, Any]) -> Any:
    """The momentum of a parameter group as a number or a tensor; `None` if it has none."""
    key = _key(group)
    return group["betas"][0] if key == "betas" else group.get(key)


def read_momentum(group: dict[str, Any]) -> float | None:
    """The momentum of a parameter group; `None` if it has none."""
    value = _held_momentum(group)
    return None if value is None else float(value)


def rounding_of(groups: Sequence[dict[str, Any]]) -> float:
    """The relative rounding of learning rates and momenta that parameter groups keep in tensors; 0 for numbers."""
    held = [value for group in groups for value in (group["lr"], _held_momentum(group)) if hasattr(value, "fill_")]
    if not held:
        return 0.0
    import torch

    return max(torch.finfo(value.dtype).eps for value in held)


def initial_lrs(optimizer: Any) -> list[float]:
    """The initial learning rates of the parameter groups of an optimizer."""
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


def default_lr(optimizer: Any) -> float | None:
    """The learning rate of an optimizer for groups that have none."""
    lr = optimizer.defaults.get("lr")
    return None if lr is None else float(lr)


def _written(held: Any, value: Any) -> Any:
    """`value`, filled into the tensor that holds the old one, if it is a tensor; it does not wait for the device."""
    return held.fill_(value) if hasattr(held, "fill_") else value


def write_lrs(groups: list[dict[str, Any]], lrs: Sequence[Any]) -> None:
    for group, lr in zip(groups, lrs, strict=True):
        group["lr"] = _written(group["lr"], lr)


def write_momentum(group: dict[str, Any], value: float) -> None:
    if (key := _key(group)) == "betas":
        first, *others = group["betas"]
        group["betas"] = (_written(first, value), *others)
    else:
        group[key] = _written(group[key], value)
