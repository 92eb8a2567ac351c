"""Each schedule as a function like those of `diffusers.optimization`, generated from its registration.

scheduler = get_rex_schedule(optimizer, num_warmup_steps=500, num_training_steps=10_000, d=0.9)
"""

import inspect
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..core.errors import did_you_mean
from ..core.registry import Entry
from ..core.values import checked
from .registries import SCHEDULERS
from .scheduler import get_scheduler, list_schedulers

_DOCUMENTATION = """\
A scheduler: {description}.

Args:
    optimizer ([`~torch.optim.Optimizer`]):
        The optimizer for which to schedule the learning rate.
    num_warmup_steps (`float`, *optional*, defaults to 0):
        Optimizer updates of warm-up, or a fraction of the run in (0, 1).
    num_training_steps (`int`):
        Optimizer updates of the whole run.
{parameters}    last_epoch (`int`, *optional*, defaults to -1):
        As for every torch scheduler.

Source: {source}"""


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def _signature(entry: Entry) -> inspect.Signature:
    length = _parameter("num_training_steps", int | None if "endless" in entry.traits else int, None)
    parameters = [_parameter("optimizer", Optimizer), _parameter("num_warmup_steps", float, 0), length]
    for own in (*entry.parameters, *entry.common):
        default = list(own.default) if isinstance(own.default, tuple) else own.default
        parameters.append(_parameter(own.name, own.kind | None if default is None else own.kind, default))
    return inspect.Signature([*parameters, _parameter("last_epoch", int, -1)], return_annotation=LRScheduler)


def _documentation(entry: Entry) -> str:
    parameters = ""
    for own in (*entry.parameters, *entry.common):
        default = "" if own.default is None else f", defaults to `{own.default!r}`"
        parameters += f"    {own.name} (`{own.kind.__name__}`, *optional*{default}):\n"
        parameters += f"        {own.help[0].upper()}{own.help[1:]}. Allowed: {own.allowed}.\n"
    return _DOCUMENTATION.format(description=entry.description, parameters=parameters, source=entry.source)


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
    return checked(schedule)


def __getattr__(name: str) -> Any:
    schedule = name.removeprefix("get_").removesuffix("_schedule")
    if name != f"get_{schedule}_schedule" or schedule not in SCHEDULERS:
        names = [f"get_{known}_schedule" for known in list_schedulers()]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, names)}")
    # Stored, so that pickle finds the same function again.
    globals()[name] = _make(schedule)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *(f"get_{name}_schedule" for name in list_schedulers())])
