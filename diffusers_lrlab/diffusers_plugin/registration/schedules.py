"""Registration into `diffusers.optimization` and `transformers.optimization`.

New names become members of the library's `SchedulerType`, with functions in its `TYPE_TO_SCHEDULER_FUNCTION`. Both are read
when the library's `get_scheduler` is called, so code that imported it earlier knows the names too.
"""

import functools
import sys
from dataclasses import dataclass
from typing import Any

from ...core.errors import LabError
from ...core.spec import merge_spec
from ...schedules.registries import SCHEDULERS


@dataclass(frozen=True)
class Library:
    """
    A library with schedules by name: the modules of its `SchedulerType` and of its `TYPE_TO_SCHEDULER_FUNCTION`.

    The launcher records the schedules that `recorded` functions build, and can give them a loss to follow. Other libraries
    refuse schedules that follow a loss: transformers' `Trainer` steps only its own ones with a loss.
    """

    names: str
    functions: str
    recorded: bool = False

    def register(self, _: Any = None) -> None:
        """Registers every schedule that the library lacks, as far as its modules are imported. Idempotent."""
        scheduler_type = sys.modules[self.names].SchedulerType
        for name in (*SCHEDULERS, *SCHEDULERS.aliases):
            if name not in scheduler_type._value2member_map_ and self.takes(name):
                member = _new_member(scheduler_type, name)
                scheduler_type._member_names_.append(member.name)
                scheduler_type._member_map_[member.name] = member
                type.__setattr__(scheduler_type, member.name, member)
        scheduler_type._missing_ = classmethod(functools.partial(_missing, self))
        # Some versions of Python, such as 3.11.2, pickle members by their names, by which a spec string is not found.
        scheduler_type.__reduce_ex__ = _pickled_by_value
        for value, member in scheduler_type._value2member_map_.items():
            self.add_function(member, value)

    def takes(self, name: str) -> bool:
        return self.recorded or "feedback" not in SCHEDULERS[name].traits

    def add_function(self, member: Any, spec: str) -> None:
        """Adds the function of a member that has none, unless the module of the functions is yet to be imported."""
        functions = getattr(sys.modules.get(self.functions), "TYPE_TO_SCHEDULER_FUNCTION", None)
        if functions is not None and member not in functions:
            functions[member] = schedule_function(spec) if self.recorded else functools.partial(build_for_library, spec)


LIBRARIES = (
    Library("diffusers.optimization", "diffusers.optimization", recorded=True),
    # `TrainingArguments` reads its names before the functions are imported.
    Library("transformers.trainer_utils", "transformers.optimization"),
)


def _pickled_by_value(member: Any, protocol: int) -> tuple[Any, ...]:
    return type(member), (member.value,)


def _new_member(scheduler_type: Any, value: str) -> Any:
    """A new enum member, as `enum` makes it, that is found by its value."""
    is_text = issubclass(scheduler_type, str)  # as in transformers
    member = str.__new__(scheduler_type, value) if is_text else object.__new__(scheduler_type)
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
    return functools.partial(build_for_library, spec)


def build_for_library(
    spec: str,
    /,
    optimizer: Any,
    num_warmup_steps: float = 0,
    num_training_steps: int | None = None,
    last_epoch: int = -1,
    **kwargs: Any,
) -> Any:
    """A scheduler, from the arguments that diffusers, transformers and trainers built on them give."""
    from ...schedules.scheduler import get_scheduler

    num_training_steps, own = read_call(spec, num_training_steps, kwargs)
    return get_scheduler(spec, optimizer, num_warmup_steps, num_training_steps, own, last_epoch)


def read_call(spec: str, num_training_steps: int | None, kwargs: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """
    The length of the run and the schedule's own parameters, from a trainer's call.

    sd-scripts and musubi-tuner always give `num_decay_steps`, 0 if it was not requested. ai-toolkit gives the length as
    `total_iters`.
    """
    own = {key: value for key, value in kwargs.items() if value is not None}
    if own.get("num_decay_steps") == 0:
        del own["num_decay_steps"]
    length = own.pop("total_iters", num_training_steps)
    if num_training_steps not in (None, length):
        raise LabError(
            f"{spec!r} got num_training_steps={num_training_steps!r} and total_iters={length!r}, two names of the same "
            "parameter. Drop one."
        )
    return length, own


def _missing(library: Library, scheduler_type: Any, value: object) -> Any:
    """The member for a spec string, made once and stored, so that identity, pickling and `in` work."""
    if not isinstance(value, str):
        return None
    name, kwargs = merge_spec(value, None, SCHEDULERS)
    if "no_warmup" in SCHEDULERS[name].traits and not kwargs and name != value:
        raise LabError(f"Write {name!r} instead of {value!r}.")
    if not library.takes(name):
        raise LabError(
            f"{value!r} follows a loss, which programs give only to transformers' own 'reduce_lr_on_plateau'. Use that "
            "name, with lr_scheduler_kwargs, or a schedule that follows no loss, such as 'cosine'."
        )
    member = _new_member(scheduler_type, value)
    library.add_function(member, value)
    return member
