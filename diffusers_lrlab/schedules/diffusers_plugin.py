"""Registration into `diffusers.optimization`: the only place that touches diffusers' internals.

New names become members of `SchedulerType` in place, with functions in `TYPE_TO_SCHEDULER_FUNCTION`. Both are looked up
when `diffusers.optimization.get_scheduler` is called, so code that imported it before us sees the names too.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ..errors import LabError
from .catalogue import SCHEDULERS
from .resolve import merge_spec

HOST = "diffusers.optimization"


def register() -> None:
    """Registers every schedule with diffusers: at once if it is imported, else as soon as it is. Idempotent."""
    if HOST in sys.modules:
        _register_into(sys.modules[HOST])
    elif not any(isinstance(finder, _RegisterOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterOnImport())


class _RegisterOnImport(importlib.abc.MetaPathFinder):
    """Importing `diffusers.optimization` costs seconds (it pulls in torch._dynamo); `--help` should not pay for it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != HOST:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register_into(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register_into(optimization: Any) -> None:
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
    """A member as `enum` itself makes it, found by value from now on."""
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
    from .lr import build_for_host

    return functools.partial(build_for_host, spec)


def _missing(optimization: Any, kinds: Any, value: object) -> Any:
    """Understands spec strings: the member is made once and kept, so identity, pickling and `in` hold for it."""
    if not isinstance(value, str):
        return None
    name, kwargs = merge_spec(value, None)
    if "no_warmup" in SCHEDULERS[name].traits and not kwargs:
        raise LabError(f"Write {name!r} instead of {value!r}.")
    member = _new_member(kinds, value)
    optimization.TYPE_TO_SCHEDULER_FUNCTION[member] = schedule_function(value)
    return member
