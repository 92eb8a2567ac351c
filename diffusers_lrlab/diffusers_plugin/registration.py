"""Registration of the lab with diffusers and transformers: at once with imported modules, with others on their import.

Importing these libraries takes seconds, so `import diffusers_lrlab` does not import them.

New schedules become members of a library's `SchedulerType`, with functions in its `TYPE_TO_SCHEDULER_FUNCTION`. Both are
read when the library's `get_scheduler` is called, so code that imported it earlier knows the names too. Our pipelines are
put where `from_pretrained` looks, so that code in a repository is neither needed nor run for them.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..core.errors import LabError
from ..core.spec import choose
from ..schedules.registries import SCHEDULERS

PACKAGE = "diffusers_lrlab"
PIPELINES = {
    f"{PACKAGE}.pipelines.point_ddpm": ("PointDDPMPipeline",),
    f"{PACKAGE}.pipelines.image": ("ImagePipeline", "LabelledImagePipeline", "LatentImagePipeline", "DiTImagePipeline"),
}
"""The classes by their modules; after each the names that it has in pipelines of version 0.1.0."""


def register() -> None:
    """Registers schedules with diffusers and transformers, and pipelines with diffusers. Idempotent."""
    for library in LIBRARIES:
        for module in dict.fromkeys((library.names, library.functions)):
            when_imported(module, library.register)
    for name in PIPELINES:
        when_imported(name, register_pipeline)
    when_imported("diffusers.pipelines.pipeline_utils", register_pipelines)


def when_imported(host: str, action: Callable[[Any], None]) -> None:
    """Calls an action with a module, now or when it is imported. The same action for the same module is called once."""
    if host in sys.modules:
        action(sys.modules[host])
        return
    finder = next((each for each in sys.meta_path if isinstance(each, _ActOnImport)), None)
    if finder is None:
        finder = _ActOnImport()
        sys.meta_path.insert(0, finder)
    actions = finder.actions.setdefault(host, [])
    if action not in actions:
        actions.append(action)


class _ActOnImport(importlib.abc.MetaPathFinder):
    """Calls functions with modules once these are imported."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Callable[[Any], None]]] = {}  # by the name of a module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.actions:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                for action in self.actions.pop(fullname, []):
                    action(module)

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


# --- schedules ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Library:
    """
    A library with schedules by name: the modules of its `SchedulerType` and of its `TYPE_TO_SCHEDULER_FUNCTION`.

    Only libraries whose programs step a schedule themselves take those that follow a loss: transformers' `Trainer` gives a
    loss to its own ones alone.
    """

    names: str
    functions: str
    takes_feedback: bool = False

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
        scheduler_type.__reduce_ex__ = lambda member, protocol: (type(member), (member.value,))
        for value, member in scheduler_type._value2member_map_.items():
            self.add_function(member, value)

    def takes(self, name: str) -> bool:
        return self.takes_feedback or "feedback" not in SCHEDULERS[name].traits

    def add_function(self, member: Any, spec: str) -> None:
        """Adds the function of a member that has none, unless the module of the functions is yet to be imported."""
        functions = getattr(sys.modules.get(self.functions), "TYPE_TO_SCHEDULER_FUNCTION", None)
        if functions is not None and member not in functions:
            functions[member] = functools.partial(build_for_library, spec)


LIBRARIES = (
    Library("diffusers.optimization", "diffusers.optimization", takes_feedback=True),
    # `TrainingArguments` reads its names before the functions are imported.
    Library("transformers.trainer_utils", "transformers.optimization"),
)


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
    from ..schedules.scheduler import get_scheduler

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
    choice = choose(value, None, SCHEDULERS)
    name, is_plain = choice.name, not choice.given
    if "no_warmup" in choice.entry.traits and is_plain and name != value:
        raise LabError(f"Write {name!r} instead of {value!r}.")
    if not library.takes(name):
        raise LabError(
            f"{value!r} follows a loss, which programs give only to transformers' own 'reduce_lr_on_plateau'. Use that "
            "name, with lr_scheduler_kwargs, or a schedule that follows no loss, such as 'cosine'."
        )
    member = _new_member(scheduler_type, value)
    library.add_function(member, value)
    return member


# --- pipelines ----------------------------------------------------------------------------------------------------------


def register_pipelines(_: Any) -> None:
    """Registers with `diffusers.pipelines`, whose `pipeline_utils` is imported by now. Idempotent."""
    from diffusers import pipelines
    from diffusers.pipelines.pipeline_loading_utils import LOADABLE_CLASSES

    # Components are saved as [package, class], not by their full module.
    LOADABLE_CLASSES.setdefault(PACKAGE, {"ModelMixin": ["save_pretrained", "from_pretrained"]})
    # diffusers searches here before it looks at code in the repository.
    setattr(pipelines, PACKAGE, sys.modules[PACKAGE])
    # While that module is being imported, it is already in sys.modules but incomplete.
    for name in PIPELINES:
        importlib.import_module(name)


def register_pipeline(module: Any) -> None:
    """Adds the class where `DiffusionPipeline.from_pretrained` looks up the name in a model_index.json."""
    import diffusers

    names = PIPELINES[module.__name__]
    for name in names:
        setattr(diffusers, name, getattr(module, names[0]))
