"""An option says everything about itself, once: in the field of the dataclass that declares it.

Flags, help, checks, what a resumed run may change, what a study's results are named after and what the finder looks at are
all derived from here.
"""

import dataclasses
import functools
import math
import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, get_args, get_type_hints

from .annotations import REFUSED, reader
from .errors import Interrupted, LabError
from .ranges import Range
from .registry import Registry
from .signatures import refusal


@dataclass(frozen=True, kw_only=True)
class Role:
    """What an option means to everything but its own use."""

    decides_result: bool  # runs that differ in it are different runs: it is part of the identity of a study's run
    may_change_on_resume: bool
    # What the learning-rate finder does with it. It "compares" it: a result found with another value is of another run; and
    # it says what it "ignores".
    finder: Literal["compares", "uses", "ignores", "refuses"]
    study: Literal["arm", "data set", "no"] = "arm"  # where a study's specification may have it, if at all
    is_repeated: bool = True  # a rerun takes it from the record, and is compared by it
    decides_draws: bool = False  # it decides which samples, timesteps and noise an update gets
    defines_loss: bool = False  # losses of runs that differ in it are different quantities


_decisive = functools.partial(Role, decides_result=True, may_change_on_resume=False)

SOURCE = _decisive(finder="compares", study="data set")  # which data
DATA = _decisive(finder="uses")  # how the data are prepared
OBJECTIVE = _decisive(finder="compares", defines_loss=True)  # what is predicted, at which noise levels
DRAWS = _decisive(finder="compares", decides_draws=True)  # timesteps, weights and noise
UPDATE = _decisive(finder="compares")  # what one update does with a gradient
# How updates differ over the run, and what is made of them: schedules, length, averages of the weights.
WHOLE_RUN = _decisive(finder="ignores")
EVALUATION = replace(WHOLE_RUN, may_change_on_resume=True)  # what is measured at the end
SPEED = Role(decides_result=False, may_change_on_resume=True, finder="uses")  # how fast, and with how much memory
# What is logged of each bin of noise levels, in a file that a resumed run goes on with.
BIN_LOG = Role(decides_result=False, may_change_on_resume=False, finder="ignores", study="no")
OUTPUT = replace(BIN_LOG, may_change_on_resume=True)  # what is written during the run
DESTINATION = replace(OUTPUT, is_repeated=False)  # where it goes, and who is shown it
THIS_START = replace(DESTINATION, finder="refuses")  # what this start of the run is to do


@dataclass(frozen=True)
class Need:
    """Something without which an option would have no effect."""

    text: str  # what is needed, as an error says it
    is_met: Callable[[Any], bool]  # of a resolved configuration
    is_absence: bool = False  # that of the option that `text` names


@dataclass(frozen=True, kw_only=True)
class Option:
    """What is known of an option besides its type and default."""

    help: str
    role: Role
    range: Range | None = None  # of numbers that make sense
    needs: tuple[Need, ...] = ()  # what it has no effect without
    kinds: tuple[str, ...] = ()  # the kinds of data that it is about; all if empty
    registry: str = ""  # "module:NAME" of that whose names it takes; its help shows them in the place of `{names}`
    is_path: bool = False  # it may name a file, which a study looks for beside its specification

    @property
    def entries(self) -> Registry:
        """The registry, which is imported now."""
        return pkgutil.resolve_name(f"diffusers_lrlab.{self.registry}")


def option(default: Any, help: str, role: Role, *, repr: bool = True, aliases: tuple[str, ...] = (), **known: Any) -> Any:
    """
    A field of a configuration.

    Args:
        default: What it is if nobody gives it; `None` if that depends on something else, as `help` says.
        help (`str`): Of the flag.
        role ([`Role`]): See there.
        repr (`bool`): Whether it is shown.
        aliases (`tuple` of `str`): Other flags that set it.
        known: Arguments of [`Option`] (the range as text), and facets of the role that are different for this option.
    """
    facets = {key: known.pop(key) for key in tuple(known) if key in Role.__dataclass_fields__}
    if "range" in known:
        known["range"] = Range(known["range"])
    described = Option(help=help, role=replace(role, **facets), **known)
    return field(default=default, metadata={"help": _Help(help, described), "aliases": list(aliases)}, repr=repr)


class _Help(str):
    """The help of a flag, which carries the option: `HfArgumentParser` hands all other metadata of a field to argparse."""

    option: Option

    def __new__(cls, text: str, option: Option) -> Self:
        help = super().__new__(cls, text)
        help.option = option
        return help

    def __reduce__(self) -> tuple[Any, ...]:
        return _Help, (str(self), self.option)


@functools.cache
def options_of(config_class: Any) -> dict[str, Option]:
    """Every option of a dataclass, by name."""
    found: dict[str, Option] = {}
    for base in reversed(config_class.__mro__):  # a field that only narrows a type has no description of its own
        fields = getattr(base, "__dataclass_fields__", {}).values()
        found |= {field.name: field.metadata["help"].option for field in fields if "help" in field.metadata}
    return {field.name: found[field.name] for field in dataclasses.fields(config_class)}


@functools.cache
def defaults_of(config_class: Any) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(config_class)}


def names_where(config_class: Any, **facets: Any) -> tuple[str, ...]:
    """The names of the options whose roles have these facets, such as `decides_draws=True`."""
    roles = {name: known.role for name, known in options_of(config_class).items()}
    return tuple(name for name, role in roles.items() if facets.items() <= vars(role).items())


def check_types(config: Any) -> None:
    """Raises a `LabError` for a value of another type than its field: what a parser makes sure of for the command line."""
    for name, hint in _type_hints(config.__class__).items():
        value = getattr(config, name)
        is_nan = isinstance(value, float) and math.isnan(value) and float in (hint, *get_args(hint))
        if value is None or is_nan:  # which is a matter of ranges, whose errors name flags
            continue
        read = reader(hint)(value)
        # A record would not have a number of numpy, or a float for a count, as it was given.
        if read is REFUSED or type(read) is not type(value):
            called = config.__class__.__name__
            raise refusal(f"{called}()", name, value, hint, f"help({called}) describes the arguments")


@contextmanager
def arguments_named(*config_classes: Any) -> Iterator[None]:
    """What ends this block names options of these dataclasses as a call has them: `seed=0` in the place of `--seed 0`."""
    names = "|".join(name for each in config_classes for name in options_of(each))
    flag = re.compile(rf"--({names})\b(?:[ =](-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf|nan)\b|'[^']*'|latest\b))?")
    try:
        yield
    except (LabError, Interrupted) as error:
        given = getattr(error, "as_argument", None) or str(error)
        text = flag.sub(lambda found: "=".join(filter(None, found.groups())).replace("=latest", "='latest'"), given)
        error.args = (text,)
        raise


_type_hints = functools.cache(get_type_hints)


def check_ranges(config: Any, config_class: Any) -> None:
    """Raises a `LabError` for the first number out of range."""
    for name, known in options_of(config_class).items():
        value = getattr(config, name)
        if value is not None and known.range is not None:
            hint = _type_hints(config_class)[name]
            Range(known.range.text, whole=float not in (hint, *get_args(hint))).check(f"--{name}", value, known.help)


def check_needs(config: Any, config_class: Any, kind: str) -> None:
    """Raises a `LabError` for an option of `config_class` that was changed and has no effect with this kind of data."""
    defaults = defaults_of(config_class)
    for name, known in options_of(config_class).items():
        if getattr(config, name) == defaults[name]:
            continue
        missing = [need for need in known.needs if not need.is_met(config)]
        if known.kinds and kind not in known.kinds:
            missing.insert(0, Need(f"a data set of {' or '.join(known.kinds)}", lambda _: False))
        if missing and missing[0].is_absence:
            raise LabError(f"--{name} has no effect with {missing[0].text}. Leave one of them out.")
        if missing:
            raise LabError(f"--{name} has no effect here; it needs {missing[0].text}. Add that or leave --{name} out.")
