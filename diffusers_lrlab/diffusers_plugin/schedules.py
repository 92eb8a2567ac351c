"""Registration into `diffusers.optimization`.

New names become members of `SchedulerType` in place, with functions in `TYPE_TO_SCHEDULER_FUNCTION`. Both are looked up
when `diffusers.optimization.get_scheduler` is called, so code that imported it before us sees the names too.
"""

import functools
from typing import Any

from ..core.errors import LabError
from ..schedules.registries import SCHEDULERS
from ..schedules.resolve import merge_spec


def register_schedules(optimization: Any) -> None:
    """Registers every schedule with `diffusers.optimization`. Idempotent."""
    kinds = optimization.SchedulerType
    for name in (*SCHEDULERS, *SCHEDULERS.aliases):
        if "host" not in SCHEDULERS[name].traits and name not in kinds._value2member_map_:
            member = _new_member(kinds, name)
            kinds._member_names_.append(member.name)
            kinds._member_map_[member.name] = member
            type.__setattr__(kinds, member.name, member)
            optimization.TYPE_TO_SCHEDULER_FUNCTION[member] = schedule_function(name)
    kinds._missing_ = classmethod(functools.partial(_missing, optimization))


def _new_member(kinds: Any, value: str) -> Any:
    """A member as `enum` itself makes it, which is found by its value from now on."""
    member = object.__new__(kinds)
    member._name_, member._value_ = value.upper(), value
    member.__objclass__ = kinds
    member._sort_order_ = len(kinds._member_names_)
    kinds._value2member_map_[value] = member
    # Since Python 3.13 `value in SchedulerType` reads this list.
    if hasattr(kinds, "_hashable_values_"):
        kinds._hashable_values_.append(value)
    return member


def schedule_function(spec: str) -> Any:
    """What diffusers calls for a name or spec string; `diffusers_lrlab.launch` puts its own in this place."""
    from ..schedules.scheduler import get_scheduler

    return functools.partial(get_scheduler, spec)


def _missing(optimization: Any, kinds: Any, value: object) -> Any:
    """Understands spec strings: the member is made once and stored, so identity, pickling and `in` hold for it."""
    if not isinstance(value, str):
        return None
    name, kwargs = merge_spec(value, None)
    if "no_warmup" in SCHEDULERS[name].traits and not kwargs and name != value:
        raise LabError(f"Write {name!r} instead of {value!r}.")
    member = _new_member(kinds, value)
    optimization.TYPE_TO_SCHEDULER_FUNCTION[member] = schedule_function(value)
    return member
