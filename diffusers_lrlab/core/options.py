"""Options, each described once, in the dataclass field that declares it; and the parser of every command line.

Flags, help, checks, what a resumed run may change, the identity of a study's runs and what the finder compares are derived
from these descriptions.
"""

import argparse
import dataclasses
import functools
import math
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal, NoReturn, get_args, get_type_hints

from .errors import LabError, cut, did_you_mean, given, must_be, shown
from .registry import Registry
from .values import REFUSED, Range, read_as, refusal


@dataclass(frozen=True, kw_only=True)
class Role:
    """Properties of an option that other parts of the lab act on."""

    decides_result: bool  # it is part of the identity of a study's run
    may_change_on_resume: bool
    # The learning-rate finder. "compares": a stored result is reused only for an equal value. "ignores": it does not apply,
    # and the report says so.
    finder: Literal["compares", "uses", "ignores", "refuses"]
    study: Literal["arm", "data set", "no"] = "arm"  # the part of a study's specification that may set it
    is_repeated: bool = True  # a run that repeats another takes it from the record
    decides_draws: bool = False  # it decides which samples, timesteps and noise an update gets
    defines_loss: bool = False  # losses of runs with different values are different quantities


_decisive = functools.partial(Role, decides_result=True, may_change_on_resume=False)

SOURCE = _decisive(finder="compares", study="data set")  # which data
DATA = _decisive(finder="uses")  # preparation of the data
OBJECTIVE = _decisive(finder="compares", defines_loss=True)  # what is predicted, at which noise levels
DRAWS = _decisive(finder="compares", decides_draws=True)  # timesteps, weights and noise
UPDATE = _decisive(finder="compares")  # what one update does with a gradient
# How updates differ over the run, and what is made of them: schedules, length, averages of the weights.
WHOLE_RUN = _decisive(finder="ignores")
EVALUATION = replace(WHOLE_RUN, may_change_on_resume=True)  # what is measured at the end
SPEED = Role(decides_result=False, may_change_on_resume=True, finder="uses")  # speed and memory
# What is logged of each bin of noise levels, in a file that a resumed run goes on with.
BIN_LOG = Role(decides_result=False, may_change_on_resume=False, finder="ignores", study="no")
OUTPUT = replace(BIN_LOG, may_change_on_resume=True)  # what is written during the run
DESTINATION = replace(OUTPUT, is_repeated=False)  # where it goes and who can see it
THIS_START = replace(DESTINATION, finder="refuses")  # only for this start of the run


@dataclass(frozen=True)
class Need:
    """A condition without which an option has no effect."""

    text: str  # for errors
    is_met: Callable[[Any], bool]  # in a resolved configuration
    is_absence: bool = False  # the option that `text` names must be absent


@dataclass(frozen=True, kw_only=True)
class Option:
    """The description of an option, besides its type and default."""

    help: str
    role: Role
    range: Range | None = None
    needs: tuple[Need, ...] = ()
    kinds: tuple[str, ...] = ()  # the kinds of data that it applies to; all if empty
    registry: str = ""  # "module:NAME" of a registry whose names it takes; the help shows them for `{names}`
    is_path: bool = False  # a study resolves it relative to its specification
    is_internal: bool = False  # programs set it, so that the help leaves it out
    is_first: bool = False  # `--help` shows it before the other options
    spelling: str = ""  # the flag in the help; that of the field's name if empty
    aliases: tuple[str, ...] = ()  # other flags that set it

    @property
    def entries(self) -> Registry:
        """The registry, imported on first use."""
        return pkgutil.resolve_name(f"diffusers_lrlab.{self.registry}")


def option(default: Any, help: str, role: Role, *, repr: bool = True, **known: Any) -> Any:
    """
    A field of a configuration. A default of `None` depends on something else, as `help` explains; `known` are arguments of
    [`Option`] (the range as text) and facets of the role that differ for this option.
    """
    facets = {key: known.pop(key) for key in tuple(known) if key in Role.__dataclass_fields__}
    if "range" in known:
        known["range"] = Range(known["range"])
    described = Option(help=help, role=replace(role, **facets), **known)
    return field(default=default, metadata={"option": described}, repr=repr)


@functools.cache
def options_of(config_class: Any) -> dict[str, Option]:
    """Every option of a dataclass, by name."""
    found: dict[str, Option] = {}
    for base in reversed(config_class.__mro__):  # a field that only narrows a type has no description
        fields = getattr(base, "__dataclass_fields__", {}).values()
        found |= {field.name: field.metadata["option"] for field in fields if "option" in field.metadata}
    return {field.name: found[field.name] for field in dataclasses.fields(config_class) if field.name in found}


@functools.cache
def defaults_of(config_class: Any) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(config_class)}


hints_of = functools.cache(get_type_hints)


def names_where(config_class: Any, **facets: Any) -> tuple[str, ...]:
    """Names of the options whose roles have these facets, such as `decides_draws=True`."""
    roles = {name: known.role for name, known in options_of(config_class).items()}
    return tuple(name for name, role in roles.items() if facets.items() <= vars(role).items())


def check_types(config: Any) -> None:
    """Raises a `LabError` for a value of another type than its field, which the parser checks on the command line."""
    for name, hint in hints_of(config.__class__).items():
        value = getattr(config, name)
        is_nan = isinstance(value, float) and math.isnan(value) and float in (hint, *get_args(hint))
        if value is None or is_nan:  # NaN is checked with the ranges
            continue
        read = read_as(value, hint)
        # A record would not keep a NumPy number, or a float for a count, as given.
        if read is REFUSED or type(read) is not type(value):
            raise refusal(config.__class__.__name__, name, value, hint)


def check_ranges(config: Any, config_class: Any) -> None:
    """Raises a `LabError` for the first number out of range."""
    for name, known in options_of(config_class).items():
        value = getattr(config, name)
        if value is not None and not isinstance(value, str) and known.range is not None:
            hint = hints_of(config_class)[name]
            Range(known.range.text, whole=float not in (hint, *get_args(hint))).check(f"--{name}", value, known.help)


def check_needs(config: Any, config_class: Any, kind: str) -> None:
    """Raises a `LabError` for an option of `config_class` that is not at its default and has no effect."""
    defaults = defaults_of(config_class)
    for name, known in options_of(config_class).items():
        if getattr(config, name) == defaults[name]:
            continue
        missing = [need for need in known.needs if not need.is_met(config)]
        if known.kinds and kind not in known.kinds:
            missing.insert(0, Need(f"a data set of {' or '.join(known.kinds)}", lambda _: False))
        if missing:
            is_secret = not config_class.__dataclass_fields__[name].repr
            asked = given(f"--{name}", "***" if is_secret else getattr(config, name))
            how, remedy = (
                ("with", "leave one of them out") if missing[0].is_absence else ("without", "add that, or leave it out")
            )
            raise LabError(f"{asked} has no effect {how} {missing[0].text}. Hint: {remedy}.")


# --- the command line ------------------------------------------------------------------------------------------


class TextParser(argparse.ArgumentParser):
    """A parser that takes negative numbers for values, and refuses bytes that are not text."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # As in Python 3.14: earlier versions take -1e-4 for a flag.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = words = sys.argv[1:] if args is None else args
        options, unknown = super().parse_known_args(args, namespace)
        of_others = (action.dest for action in self._actions if action.nargs == argparse.REMAINDER)
        num_passed_on = sum(len(getattr(options, dest, None) or ()) for dest in of_others)
        for word in words[: len(words) - num_passed_on] if not self._subparsers else ():  # which check their own
            if re.search("[\udc80-\udcff]", word):  # bytes that are not UTF-8, as Python passes them on
                hint = "rename a file or folder that has such a name, or give a link to it whose name is UTF-8"
                raise must_be("an argument", word.encode(errors="surrogateescape"), "UTF-8 text", hint)
        return options, unknown

    def refuse(self, unknown: Sequence[str], where: str = "", otherwise: str = "") -> None:
        """Raises a `LabError` for the first unknown argument, if any; `otherwise` is the hint if no flag is like it."""
        if unknown:
            hint = did_you_mean(unknown[0].split("=")[0], self._option_string_actions) or otherwise
            raise LabError(f"Unknown argument {shown(unknown[0])}{where}.{hint} See --help.")

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required"):  # one of which may be misspelt
            flags = (word for word in takewhile(lambda word: word != "--", self._words) if word.startswith("--"))
            self.refuse([flag for flag in flags if flag.partition("=")[0] not in self._option_string_actions])
        raise LabError(f"{_in_form(message)} See --help.")


def _in_form(message: str) -> str:
    """A message of argparse in the form of other errors, cut where it repeats something long."""
    message = re.sub(r"^argument (--\w+)/\S+: ", r"\1: ", message)  # a flag's other spellings
    for kind, number in (("int", "a whole number, such as 10000"), ("(?:float|number)", "a number, such as 0.001")):
        message = re.sub(f"invalid {kind} value: (.*)", rf"must be {number}, got \1", message)
    if choice := re.search(r"invalid choice: (.*) \(choose from (.*)\)", message):
        given, known = choice.groups()
        hint = did_you_mean(given.strip("'"), re.findall(r"[\w-]+", known))
        return f"{message[: choice.start()]}must be one of {known}, got {cut(given)}.{hint}"
    return f"{cut(message)}."
