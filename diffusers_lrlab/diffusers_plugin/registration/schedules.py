"""Registration into `diffusers.optimization`.

New names become members of `SchedulerType`, with functions in `TYPE_TO_SCHEDULER_FUNCTION`. Both are read when
`diffusers.optimization.get_scheduler` is called, so code that imported it earlier knows the names too.
"""

import functools
from typing import Any

from ...core.errors import LabError
from ...schedules.registries import SCHEDULERS
from ...schedules.resolve import merge_spec


def register_schedules(optimization: Any) -> None:
    """Registers every schedule with `diffusers.optimization`. Idempotent."""
    scheduler_type = optimization.SchedulerType
    for name in (*SCHEDULERS, *SCHEDULERS.aliases):
        if "host" not in SCHEDULERS[name].traits and name not in scheduler_type._value2member_map_:
            member = _new_member(scheduler_type, name)
            scheduler_type._member_names_.append(member.name)
            scheduler_type._member_map_[member.name] = member
            type.__setattr__(scheduler_type, member.name, member)
            optimization.TYPE_TO_SCHEDULER_FUNCTION[member] = schedule_function(name)
    scheduler_type._missing_ = classmethod(functools.partial(_missing, optimization))


def _new_member(scheduler_type: Any, value: str) -> Any:
    """A new enum member, as `enum` makes it, that is found by its value."""
    member = object.__new__(scheduler_type)
    member._name_, member._value_ = value.upper(), value
    member.__objclass__ = scheduler_type
    member._sort_order_ = len(scheduler_type._member_names_)
    scheduler_type._value2member_map_[value] = member
    # Since Python 3.13 `value in SchedulerType` reads this list.
    if hasattr(scheduler_type, "_hashable_values_"):
        scheduler_type._hashable_values_.append(value)
    return member


def schedule_function(spec: str) -> Any:
    """The function that diffusers calls for a name or spec string; the launcher replaces it by a recorded one."""
    from ...schedules.scheduler import get_scheduler

    return functools.partial(get_scheduler, spec)


def _missing(optimization: Any, scheduler_type: Any, value: object) -> Any:
    """The member for a spec string, made once and stored, so that identity, pickling and `in` work."""
    if not isinstance(value, str):
        return None
    name, kwargs = merge_spec(value, None)
    if "no_warmup" in SCHEDULERS[name].traits and not kwargs and name != value:
        raise LabError(f"Write {name!r} instead of {value!r}.")
    member = _new_member(scheduler_type, value)
    optimization.TYPE_TO_SCHEDULER_FUNCTION[member] = schedule_function(value)
    return member
