"""Arguments of public functions, checked by the annotations of their signatures.

Typeguard, beartype and pydantic do this too, and none of them fits: in annotations of numbers they take `True` for an
`int` and NaN for a `float`, or refuse an `int` for a `float`, and their errors name no remedy. None is worth a dependency.
"""

import functools
import importlib
import inspect
import math
import reprlib
from collections import ChainMap
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from enum import Enum
from numbers import Integral, Real
from types import GenericAlias, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np

from .errors import LabError

REFUSED = object()  # in place of a value of another type
_Reader = Callable[[Any], Any]
_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])

_LARGEST_EXACT = 2**53  # a larger float stands for many integers


@functools.cache
def reader(hint: Any) -> _Reader:
    """
    A function from a value to the same as the annotation has it, or to `REFUSED`.

    NumPy numbers become Python numbers, whole floats become `int` where that is annotated, and members of string enums
    become strings; items of containers are checked and stay as they are. `True` and NaN are not numbers.
    """
    if hint in (Any, object, inspect.Parameter.empty):
        return lambda value: value
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        # A text beside a device is its name.
        readers: list[_Reader] = [_device, _nothing] if any(map(_is_device, inner)) else [reader(each) for each in inner]
        return _first_of(readers)
    if origin is Literal:
        return lambda value: next((each for each in inner if type(each) is type(value) and each == value), REFUSED)
    if origin in (list, tuple, dict) and inner:
        return functools.partial(_container, origin, _of_items(origin, inner))
    if _is_device(hint):
        return _device
    if hint is np.ndarray:
        return _array
    return functools.partial(_instance, origin or hint)


def _integer(value: Any) -> Any:
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        return REFUSED
    if isinstance(value, Integral):
        return int(value)
    number = float(value)
    return int(number) if number.is_integer() and abs(number) < _LARGEST_EXACT else REFUSED


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real):
        return REFUSED
    try:
        if math.isnan(value):
            return REFUSED
    except OverflowError:  # more digits than a float has
        return REFUSED
    return value if isinstance(value, (int, float)) else float(value)


def _text(value: Any) -> Any:
    value = value.value if isinstance(value, Enum) else value
    return value if isinstance(value, str) else REFUSED


def _truth(value: Any) -> Any:
    return value if isinstance(value, bool) else REFUSED


def _nothing(value: Any) -> Any:
    return value if value is None else REFUSED


_PLAIN: dict[Any, _Reader] = {int: _integer, float: _number, str: _text, bool: _truth, None: _nothing, NoneType: _nothing}


def _first_of(readers: list[_Reader]) -> _Reader:
    def read(value: Any) -> Any:
        for each in readers:
            if (found := each(value)) is not REFUSED:
                return found
        return REFUSED

    return read


def _instance(wanted: Any, value: Any) -> Any:
    # A string is iterable, but passing one is a mistake.
    is_letters = wanted is Iterable and isinstance(value, (str, bytes))
    return value if isinstance(value, wanted) and not is_letters else REFUSED


def _of_items(origin: Any, inner: tuple[Any, ...]) -> Callable[[Any], bool]:
    """Whether the items of a list, tuple or dictionary are of their types."""
    if origin is dict:
        key, value = (reader(each) for each in inner)
        return lambda items: all(key(k) is not REFUSED and value(v) is not REFUSED for k, v in items.items())
    if origin is tuple and (len(inner) != 2 or inner[1] is not Ellipsis):
        readers = [reader(each) for each in inner]
        return lambda items: (
            len(items) == len(readers) and all(read(item) is not REFUSED for read, item in zip(readers, items, strict=True))
        )
    item = reader(inner[0])
    return lambda items: all(item(each) is not REFUSED for each in items)


def _container(origin: Any, items_fit: Callable[[Any], bool], value: Any) -> Any:
    if origin is not dict and isinstance(value, (list, tuple)):
        value = origin(value)
    return value if isinstance(value, origin) and items_fit(value) else REFUSED


def _array(value: Any) -> Any:
    try:
        array = np.asarray(value)
    except Exception:  # of any object
        return REFUSED
    return array if array.dtype.kind in "biuf" and array.ndim else REFUSED


def _is_device(hint: Any) -> bool:
    return getattr(hint, "__module__", None) == "torch" and getattr(hint, "__name__", None) == "device"


def _device(value: Any) -> Any:
    """A torch device that this machine has."""
    try:
        return _available_device(value)
    except Exception:  # torch has many
        return REFUSED


@functools.lru_cache(maxsize=64)
def _available_device(value: Any) -> Any:
    import torch

    device = torch.device(value)
    torch.empty(0, device=device)
    return device


def described(hint: Any) -> str:
    """An annotation in words, for errors."""
    origin, inner = get_origin(hint), get_args(hint)
    if any(map(_is_device, (hint, *inner))):
        return "a torch device of this machine, such as 'cpu'"
    if origin in (Union, UnionType):
        return " or ".join(described(each) for each in inner)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if hint is NoneType or hint is None:
        return "None"
    if isinstance(hint, GenericAlias) or origin is not None:
        return str(hint).replace("typing.", "").replace("collections.abc.", "")
    return {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}.get(
        hint, f"a{'n' * (hint.__name__[0] in 'AEIOU')} {hint.__name__}"
    )


def refusal(what: str, name: str, value: Any, hint: Any, remedy: str) -> LabError:
    """The error for an argument of another type than its annotation."""
    got = type(value).__name__
    if isinstance(value, (list, tuple)) and len(value) == 1 and reader(hint)(value[0]) is not REFUSED:
        remedy = f"give its item instead of the {got}"
    if isinstance(value, dict) and (config := next((each for each in (hint, *get_args(hint)) if is_dataclass(each)), None)):
        remedy = f"write {described(config).split()[-1]}(**options)"
    shown = reprlib.repr(value)
    of_type = "" if shown.startswith(got) or value is None else f" ({got})"
    return LabError(f"{what}: {name} must be {described(hint)}, got {shown}{of_type}. Hint: {remedy}.")


class _Names(dict[str, Any]):
    """Modules by name: an annotation may name one that its own module imports for type checkers alone."""

    def __missing__(self, name: str) -> Any:
        return importlib.import_module(name)


def annotation_of(parameter: inspect.Parameter, function: Any) -> Any:
    """The annotation of a parameter as a type; `None` is allowed wherever it is the default."""
    hint = parameter.annotation
    if isinstance(hint, str):
        namespace = getattr(inspect.unwrap(function), "__globals__", {})
        hint = eval(hint, {}, ChainMap(namespace, vars(importlib.import_module("builtins")), _Names()))
    return Union[hint, None] if parameter.default is None else hint  # noqa: UP007 - of any annotation


def checked(function: _Decorated) -> _Decorated:
    """
    A decorator for public functions, methods and classes: a [`LabError`] for an argument of another type than annotated.

    Arguments are passed on as [`reader`] has them. A call with an argument too many or too few is a `TypeError`, as
    everywhere in Python. Signature and documentation stay as they are. It costs about a microsecond a call.
    """
    if inspect.isclass(function):
        function.__init__ = _checked(function.__init__, function.__name__)  # type: ignore[method-assign]
        return function
    return _checked(function, function.__name__)


def _checked(function: Any, shown: str) -> Any:
    signature = inspect.signature(function)

    # By name and by place; made at the first call, since annotations may name modules that are not imported yet.
    @functools.cache
    def readers() -> tuple[dict[str, _Reader], list[tuple[Any, _Reader]]]:
        by_name: dict[str, _Reader] = {}
        by_place: list[tuple[Any, _Reader]] = []
        for each in signature.parameters.values():
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
                hint = annotation_of(each, function)
                by_name[each.name] = reader(hint)
                if each.kind is not each.KEYWORD_ONLY:
                    by_place.append((hint if hint in (int, str, bool) else None, by_name[each.name]))
        return by_name, by_place

    def refused(name: str, value: Any) -> LabError:
        hint = annotation_of(signature.parameters[name], function)
        return refusal(f"{shown}()", name, value, hint, f"help({shown}) describes the arguments")

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        by_name, by_place = readers()
        # Most arguments are of the very type, which is seen without a call.
        pairs = zip(by_place, args, strict=False)
        given = [value if type(value) is exact else read(value) for (exact, read), value in pairs]
        for place, value in enumerate(given):
            if value is REFUSED:
                raise refused([*by_name][place], args[place])
        for name, value in kwargs.items():
            if name in by_name and (found := by_name[name](value)) is not value:
                if found is REFUSED:
                    raise refused(name, value)
                kwargs[name] = found
        return function(*given, *args[len(given) :], **kwargs)

    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    return wrapper
