"""Optimizers by name, their groups of parameters with factors on the learning rate, and the size of their state."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..core.environment import require_version
from ..core.errors import LabError
from ..core.plugins import FAILURES
from ..core.registry import Entry
from ..core.spec import choose
from ..core.values import checked
from ..core.words import counted
from .entries import OPTIMIZERS
from .timescales import IMAGES, per_update

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

LR_FACTOR = "lab_lr_factor"  # a key of parameter groups, saved with the optimizer's state
LR_GROUP = "lab_lr_group"  # likewise: the name of the group in the log; missing in groups without one


def list_optimizers() -> list[str]:
    """The names that `get_optimizer` and `--optimizer` take."""
    return [*OPTIMIZERS, *OPTIMIZERS.aliases]


@checked
def get_optimizer(
    name: str,
    params: Iterable[torch.nn.Parameter] | Iterable[tuple[str, torch.nn.Parameter]] | Iterable[dict[str, Any]],
    lr: float,
    images_per_update: int | None = None,
    **kwargs: Any,
) -> Optimizer:
    """
    An optimizer by name.

    Args:
        name (`str`): A name of [`list_optimizers`] or a spec string such as `"sgd:momentum=0.95"`.
        params (`Iterable` of `torch.nn.Parameter`, of `tuple[str, torch.nn.Parameter]` or of `dict`): Parameters,
            `model.named_parameters()`, or parameter groups as in torch, which may hold either. Optimizers that treat
            parameters by their names, such as `"muon"`, need the names.
        lr (`float`): The learning rate, for groups without one of their own.
        images_per_update (`int`, *optional*): Over all micro-batches and processes, for parameters that count images, such
            as `beta2_half_life` and `tau`.
        **kwargs: The optimizer's own parameters.
    """
    choice = choose(name, kwargs, OPTIMIZERS)
    entry = choice.entry
    check_installed(entry)
    resolved = per_update(entry, choice.kwargs, lr, images_per_update)
    groups = [_with_a_list(each, "named" in entry.traits) for each in params]
    if entry.is_foreign:
        _check_step(entry, lr, resolved)
    return entry(groups, lr, **resolved)


def _check_step(entry: Entry, lr: float, kwargs: dict[str, Any]) -> None:
    """
    Raises a `LabError` if a step of an optimizer changes no parameter, or works only with a closure. It tries matrices and
    vectors of zeros, which show the smallest step, and of ones, for steps in proportion to the parameters. Other exceptions
    are ignored here: they will come again with the parameters of the run.
    """
    import torch

    from ..core.streams import random_states_kept

    begun = [torch.full(size, value) for value in (0.0, 1.0) for size in ((4, 4), (4,))]

    def stepped(*closure: Any) -> list[Any] | None:
        """Parameters after a step; `None` if it failed."""
        generator, tried = torch.Generator().manual_seed(0), [torch.nn.Parameter(values.clone()) for values in begun]
        for parameter in tried:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        with random_states_kept(with_devices=False), contextlib.suppress(*FAILURES):
            entry(tried, lr if lr > 0 else 1e-3, **kwargs).step(*closure)
            return tried
        return None

    after = stepped()
    if after is None and stepped(lambda: torch.tensor(1.0)) is not None:
        raise LabError(
            f"{entry.title} needs a closure: its step() computes the loss again, and is called without one here, after the "
            f"gradients are computed. Hint: choose an optimizer whose step() needs no closure.{entry.where}"
        )
    if after is not None and all(map(torch.equal, after, begun)):
        raise LabError(
            f"{entry.title} changes nothing: a step with nonzero gradients leaves all parameters unchanged. Pass the given "
            f"parameters to the optimizer, and change them in step().{entry.where}"
        )


def untrained_in_words(optimizer: Any, parameters: Iterable[Any]) -> str | None:
    """A warning if an optimizer got only some of the trainable parameters, with the numbers."""
    held, given = {id(each) for group in optimizer.param_groups for each in group["params"]}, list(parameters)
    trained = [each for each in given if id(each) in held]
    if len(trained) == len(given):
        return None
    values, of = (sum(each.numel() for each in some) for some in (trained, given))
    return (
        f"the optimizer trains {len(trained)} of {counted(len(given), 'tensor')} of the model ({values:,} of "
        f"{counted(of, 'parameter', ',')}); the others keep their values."
    )


def _with_a_list(each: Any, named: bool) -> Any:
    """
    A parameter, or a group with its parameters as a list, since factories iterate over them repeatedly. Parameters given as
    `(name, parameter)` lose their names unless they are to be `named`.
    """
    if isinstance(each, dict):
        params = each["params"]
        return {**each, "params": [_with_a_list(one, named) for one in ([params] if hasattr(params, "grad") else params)]}
    return each[1] if isinstance(each, tuple) and not named else each


def optimizer_parts(optimizer: Any) -> dict[str, Any] | None:
    """The parameters that `muon` orthogonalises and the others, for records; `None` for optimizers that treat all alike."""
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper
        optimizer = optimizer.optimizer
    return getattr(optimizer, "parts", None)


def tried_optimizer(
    name: str, kwargs: Mapping[str, Any], shapes: Iterable[tuple[int, ...]], lr: float, images_per_update: int
) -> Optimizer:
    """
    An optimizer of zeros of these shapes, which have no names: lists of patterns among its arguments are left out.
    """
    import torch

    entry = OPTIMIZERS[name]
    lists = {each.name for each in entry.parameters if each.kind is list and "named" in entry.traits}
    given = {key: value for key, value in kwargs.items() if key not in lists}
    return get_optimizer(
        name, [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes], lr, **{IMAGES.name: images_per_update, **given}
    )


def check_installed(entry: Entry) -> None:
    if "torch" in entry.facts:
        require_version(f"The optimizer {entry.name!r}", "torch", entry.facts["torch"])
    package = entry.facts.get("package")
    if package and importlib.util.find_spec(package.replace("-", "_")) is None:
        raise LabError(f"The optimizer {entry.name!r} needs the package {package!r}: pip install {package}.")


def optimizer_state_bytes(optimizer: Optimizer) -> int:
    """Bytes of the tensors in an optimizer's state; call it after a step."""

    def total(value: Any) -> int:
        if isinstance(value, dict):
            return sum(map(total, value.values()))
        if isinstance(value, (list, tuple)):
            return sum(map(total, value))
        return value.numel() * value.element_size() if hasattr(value, "element_size") else 0

    return total(optimizer.state_dict())


# --- groups of parameters, of `--width_base` -------------------------------------------------------------------------


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
