"""Allowed values: types by annotation, intervals in one notation for checks, help and errors, and parameters of entries.

Typeguard, beartype and pydantic are no replacement: they accept `True` for an `int` and NaN for a `float`, or refuse an
`int` for a `float`, and their errors name no remedy.
"""

import builtins
import functools
import importlib
import inspect
import math
import re
from collections import ChainMap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from types import GenericAlias, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from .errors import LabError, must_be, shown

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])
REFUSED = object()  # in place of a value of another type

_LARGEST_EXACT = 2**53  # a larger float stands for many integers


def read_as(value: Any, hint: Any) -> Any:
    """
    A value as the annotated type, or `REFUSED` if it is of another type.

    NumPy numbers become Python numbers, whole floats become `int` where that is annotated, and members of string enums
    become strings. Items of containers are checked but not converted. `True` and NaN are not numbers.
    """
    if hint in (int, float):
        return _number(value, hint)
    if hint is str:
        value = value.value if isinstance(value, Enum) else value
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        hints = [each for each in inner if each is not str] if str in inner and any(map(_is_device, inner)) else inner
        return next((found for each in hints if (found := read_as(value, each)) is not REFUSED), REFUSED)
    if origin is Literal:
        return next((each for each in inner if type(each) is type(value) and each == value), REFUSED)
    if origin in (list, tuple, dict) and inner:
        return _container(value, origin, inner)
    if hint in (Any, inspect.Parameter.empty):
        return value
    if _is_device(hint):
        return _device(value)
    if hint is np.ndarray:
        return _array(value)
    wanted = NoneType if hint is None else origin or hint
    # A string is iterable, but passing one is a mistake.
    is_letters = wanted is Iterable and isinstance(value, (str, bytes))
    return value if isinstance(value, wanted) and not is_letters else REFUSED


def _number(value: Any, wanted: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real):
        return REFUSED
    if wanted is int and isinstance(value, Integral):
        return int(value)
    try:
        number = float(value)
    except OverflowError:  # more digits than a float has
        return REFUSED
    if wanted is int:
        return int(number) if number.is_integer() and abs(number) < _LARGEST_EXACT else REFUSED
    if math.isnan(number):
        return REFUSED
    return value if isinstance(value, (int, float)) else number


def _container(value: Any, origin: Any, inner: tuple[Any, ...]) -> Any:
    if origin is not dict and isinstance(value, (list, tuple)):
        value = origin(value)
    if not isinstance(value, origin):
        return REFUSED
    if origin is dict:
        items = [pair for key, each in value.items() for pair in ((key, inner[0]), (each, inner[1]))]
    elif origin is tuple and inner[-1] is not Ellipsis:
        if len(value) != len(inner):
            return REFUSED
        items = [*zip(value, inner, strict=True)]
    else:
        items = [(each, inner[0]) for each in value]
    return value if all(read_as(*item) is not REFUSED for item in items) else REFUSED


def _array(value: Any) -> Any:
    try:
        array = np.asarray(value)
    except Exception:  # of any object
        return REFUSED
    return array if array.dtype.kind in "biuf" and array.ndim else REFUSED


def _is_device(hint: Any) -> bool:
    return getattr(hint, "__module__", None) == "torch" and getattr(hint, "__name__", None) == "device"


def _device(value: Any) -> Any:
    """A torch device that this machine has; a text is its name."""
    import torch

    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except Exception:  # torch has many
        return REFUSED
    return device


def in_words(hint: Any) -> str:
    """An annotation in words, for errors."""
    origin, inner = get_origin(hint), get_args(hint)
    if any(map(_is_device, (hint, *inner))):
        return "a torch device of this machine, such as 'cpu'"
    if origin in (Union, UnionType):
        return " or ".join(map(in_words, inner))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if hint is NoneType or hint is None:
        return "None"
    if isinstance(hint, GenericAlias) or origin is not None:
        return str(hint).replace("typing.", "").replace("collections.abc.", "")
    return {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}.get(
        hint, f"a{'n' * (hint.__name__[0] in 'AEIOU')} {hint.__name__}"
    )


def refusal(what: str, name: str, value: Any, hint: Any) -> LabError:
    """The error for an argument of another type than its annotation."""
    got, text = type(value).__name__, shown(value)
    of_type = "" if text.startswith(got) or value is None else f" ({got})"
    return must_be(name, value, in_words(hint), f"help({what}) describes the arguments", of=f"{what}()", got=text + of_type)


class _Names(dict[str, Any]):
    """Imports modules by name: an annotation may refer to one that is only imported under TYPE_CHECKING."""

    def __missing__(self, name: str) -> Any:
        return importlib.import_module(name)


def checked(function: _Decorated) -> _Decorated:
    """
    A decorator for public functions and methods: a [`LabError`] for an argument of another type than annotated.

    Arguments are converted by [`read_as`]. Too many or too few arguments are a `TypeError`, as usual. Signature and
    docstring are preserved. It costs some microseconds per call.
    """
    signature = inspect.signature(function)
    positional = [each.name for each in signature.parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]

    @functools.cache
    def hints() -> dict[str, Any]:
        """By name; found at the first call, when modules that annotations refer to can be imported."""
        names = ChainMap(inspect.unwrap(function).__globals__, vars(builtins), _Names())
        given = {each.name: each.annotation for each in signature.parameters.values()}
        return {name: eval(hint, {}, names) if isinstance(hint, str) else hint for name, hint in given.items()}

    def read(name: str, value: Any) -> Any:
        hint = hints().get(name, Any)
        if (found := read_as(value, hint)) is REFUSED:
            raise refusal(function.__name__, name, value, hint)
        return found

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        given = map(read, positional, args)
        return function(*given, *args[len(positional) :], **{name: read(name, value) for name, value in kwargs.items()})

    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


_NUMBER = r"\s*(-?(?:inf|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))\s*"
_NOTATION = re.compile(rf"[\[(]{_NUMBER},{_NUMBER}[\])]")


@dataclass(frozen=True)
class Range:
    """
    An interval: a square bracket includes its bound, a round one does not.

    ```python
    >>> [value in Range("(0, 1]") for value in (0, 0.5, 1, float("nan"), "1")]
    [False, True, True, False, False]
    >>> print(Range("[1, inf)", whole=True))
    a whole number in [1, inf)

    ```

    Args:
        text (`str`): The interval as it is shown, such as `"(0, 1]"` or `"[1, inf)"`.
        whole (`bool`, *optional*, defaults to `False`): Whether it contains whole numbers only.
    """

    text: str
    whole: bool = False

    @functools.cached_property
    def bounds(self) -> tuple[float, float]:
        """Whole ones are exact: 2**63 - 1 is no float."""
        found = _NOTATION.fullmatch(self.text)
        bounds = [int(text) if text.lstrip("-").isdecimal() else float(text) for text in (found.groups() if found else ())]
        if not found or bounds[0] > bounds[1]:
            raise must_be("range", self.text, "an interval", "write '(0, 1]' or '[1, inf)'")
        return bounds[0], bounds[1]

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            return False
        low, high = self.bounds
        number: Any = value
        above = number >= low if self.text[0] == "[" else number > low
        return bool(above and (number <= high if self.text[-1] == "]" else number < high))

    def __str__(self) -> str:
        return f"a {'whole ' * self.whole}number in {self.text}"

    def check(self, name: str, value: Any, hint: str) -> None:
        """Raises a `LabError` if the value of a flag (`--name`) or an argument is outside; `None` stands for not given."""
        if value is not None and value not in self:
            raise must_be(name, value, str(self), hint)


COUNT = Range("[1, 1e9]", whole=True)  # of updates or samples; larger numbers are mistakes
POSITIVE = Range("(0, inf)")
SEED = Range(f"[0, {2**63 - 1}]", whole=True)

_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


@dataclass(frozen=True)
class Parameter:
    """One keyword argument of a registered entry."""

    name: str
    kind: type  # int, float, bool, str or list; an int is accepted for a float, never the reverse
    default: Any  # None means "derived from the run", as `help` explains
    help: str  # with its unit
    range: str | None = None  # allowed values (of a list: of its items), such as "(0, 1]" or "[1, inf)"
    choices: tuple[Any, ...] | None = None
    items: type = float  # of a list
    same_as: str | None = None  # the common parameter that this is another name for
    only_with: tuple[str, Any] | None = None  # another parameter, and the value it must have for this one to have an effect
    is_added: bool = False  # left out of resolved parameters at its default, as in records that are older than it
    instead_of: str | None = None  # the parameter that it replaces, if it is given; else it is left out, too

    @functools.cached_property
    def interval(self) -> Range | None:
        """`range` as an interval of numbers."""
        return None if self.range is None else Range(self.range)

    def check_fields(self) -> None:
        """Raises a `LabError` for a field of another type than annotated, and for a range that is no interval."""
        for name, hint in get_type_hints(Parameter).items():
            if read_as(getattr(self, name), hint) is REFUSED:
                raise refusal("Parameter", name, getattr(self, name), hint)
        if self.interval is not None:
            _ = self.interval.bounds  # read, which raises the error

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        if self.choices is not None:
            return "one of " + ", ".join(map(repr, self.choices))
        words = f"a list of {_PLURALS[self.items]}" if self.kind is list else in_words(self.kind)
        return f"{words} in {self.range}" if self.range else words

    @property
    def shown_default(self) -> str:
        """The default, for tables."""
        if self.default is None:
            return "derived" if "derived" in self.help else "none"
        return repr(list(self.default) if isinstance(self.default, tuple) else self.default)

    def check(self, value: Any, owner: str) -> Any:
        """`value` as `kind`; a `LabError` that names `owner` and the range if it is not allowed."""
        if value is None and self.default is None:
            return None
        is_list, allowed = self.kind is list, self.interval if self.choices is None else self.choices
        wanted = self.items if is_list else self.kind
        read = []
        for item in value if is_list and isinstance(value, (list, tuple)) else [value]:
            found = read_as(item, wanted)
            is_huge = type(found) is int and abs(found) >= _LARGEST_EXACT  # no number of updates comes near it
            fits = found is not REFUSED and not is_huge and (allowed is None or found in allowed)
            if not fits or (is_list and item is value):
                raise must_be(self.name, value, self.allowed, self.help, of=owner)
            read.append(wanted(found))
        return read if is_list else read[0]
