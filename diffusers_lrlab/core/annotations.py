"""Checks and conversions of values by type annotations.

Typeguard, beartype and pydantic are no replacement: they accept `True` for an `int` and NaN for a `float`, or refuse an
`int` for a `float`, and their errors name no remedy.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from enum import Enum
from numbers import Integral, Real
from types import GenericAlias, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np

REFUSED = object()  # in place of a value of another type
Reader = Callable[[Any], Any]

_LARGEST_EXACT = 2**53  # a larger float stands for many integers


@functools.cache
def reader(hint: Any) -> Reader:
    """
    A function that returns a value as the annotated type, or `REFUSED` if it is of another type.

    NumPy numbers become Python numbers, whole floats become `int` where that is annotated, and members of string enums
    become strings. Items of containers are checked but not converted. `True` and NaN are not numbers.
    """
    if hint in (Any, object, inspect.Parameter.empty):
        return lambda value: value
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        is_device = any(map(_is_device, inner))  # a text beside a device is its name
        return functools.partial(_first, [reader(each) for each in inner if not (is_device and each is str)])
    if origin is Literal:
        return lambda value: next((each for each in inner if type(each) is type(value) and each == value), REFUSED)
    if origin in (list, tuple, dict) and inner:
        return functools.partial(_container, origin, _of_items(origin, inner))
    if _is_device(hint):
        return _device
    if hint is np.ndarray:
        return _array
    return functools.partial(_instance, NoneType if hint is None else origin or hint)


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


_PLAIN: dict[Any, Reader] = {int: _integer, float: _number, str: _text}


def _first(readers: list[Reader], value: Any) -> Any:
    return next((found for read in readers if (found := read(value)) is not REFUSED), REFUSED)


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
