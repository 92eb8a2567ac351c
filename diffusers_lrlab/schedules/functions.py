"""Each schedule as a function in the form of `diffusers.optimization`, made from its registration.

scheduler = get_rex_schedule(optimizer, num_warmup_steps=500, num_training_steps=10_000, d=0.9)
"""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..core.registry import Entry
from .registries import SCHEDULERS
from .scheduler import get_scheduler


def _signature(entry: Entry) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    optional = "endless" in entry.traits
    parameters = [
        inspect.Parameter("optimizer", kind, annotation=Optimizer),
        inspect.Parameter("num_warmup_steps", kind, default=0, annotation=float),
        inspect.Parameter("num_training_steps", kind, default=None, annotation=int | None if optional else int),
    ]
    for parameter in (*entry.parameters, *entry.common):
        annotation = parameter.kind | None if parameter.default is None else parameter.kind
        default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
        parameters.append(inspect.Parameter(parameter.name, kind, default=default, annotation=annotation))
    parameters.append(inspect.Parameter("last_epoch", kind, default=-1, annotation=int))
    return inspect.Signature(parameters, return_annotation=LRScheduler)


def _documentation(entry: Entry) -> str:
    lines = [
        f"A scheduler: {entry.description}.",
        "",
        "Args:",
        "    optimizer ([`~torch.optim.Optimizer`]):",
        "        The optimizer for which to schedule the learning rate.",
        "    num_warmup_steps (`float`, *optional*, defaults to 0):",
        "        Optimizer updates of warm-up, or a fraction of the run in (0, 1).",
        "    num_training_steps (`int`):",
        "        Optimizer updates of the whole run.",
    ]
    for parameter in (*entry.parameters, *entry.common):
        default = "" if parameter.default is None else f", defaults to `{parameter.default!r}`"
        lines += [f"    {parameter.name} (`{parameter.kind.__name__}`, *optional*{default}):"]
        lines += [f"        {parameter.help[0].upper()}{parameter.help[1:]}. Allowed: {parameter.allowed}."]
    lines += [
        "    last_epoch (`int`, *optional*, defaults to -1):",
        "        As for every torch scheduler.",
        "",
        f"Source: {entry.source}",
    ]
    return "\n".join(lines)


def _make(name: str) -> Any:
    entry = SCHEDULERS[name]
    signature = _signature(entry)

    def schedule(*args: Any, **kwargs: Any) -> LRScheduler:
        given = dict(signature.bind(*args, **kwargs).arguments)
        clock = {key: given.pop(key) for key in ("num_warmup_steps", "num_training_steps", "last_epoch") if key in given}
        return get_scheduler(name, given.pop("optimizer"), scheduler_specific_kwargs=given, **clock)

    schedule.__name__ = schedule.__qualname__ = f"get_{name}_schedule"
    schedule.__doc__ = _documentation(entry)
    schedule.__signature__ = signature  # type: ignore[attr-defined]
    return schedule


def __getattr__(name: str) -> Any:
    schedule = name.removeprefix("get_").removesuffix("_schedule")
    if name != f"get_{schedule}_schedule" or schedule not in SCHEDULERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Stored, so that pickle finds the same function again.
    globals()[name] = _make(schedule)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *(f"get_{name}_schedule" for name in (*SCHEDULERS, *SCHEDULERS.aliases))])
