"""Calls of registered functions: their errors are located and their results checked, in every registry.

Entries and metrics are called by [`call_registered`]. Methods of the objects that they return (a denoiser, an optimizer, a
kind of data) are called from everywhere, so [`registered_code_located`] locates their errors where a run ends.
"""

import functools
import inspect
import numbers
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from .errors import FAILURES, LabError, is_out_of_memory, located, shortened, shown

_PACKAGE = __name__.partition(".")[0]
_modules: set[str] = set()  # top-level names of foreign modules that register something
_classes: dict[type, tuple[str, str]] = {}  # classes in these modules, with the noun and name of their registration
_PLAIN = {float, int, tuple, np.float64, np.ndarray}  # types seen so far that are not in these modules
_REAL = "biuf"  # numpy's kinds of real numbers


class Unusable(Exception):
    """A registered function returned something that cannot be used; the text begins with "must return"."""


def unusable(wanted: str, value: Any) -> Unusable:
    return Unusable(f"must return {wanted}, not {described(value)}")


def note_registered(noun: str, name: str, function: Any) -> bool:
    """Notes the code that registers a function, and returns whether it is foreign, that is, not in this package."""
    module = _registering_module(sys._getframe(1))
    if module == _PACKAGE:
        return False
    _modules.add(module)
    if inspect.isclass(function):
        _note_class(noun, name, function)
    return True


def _registering_module(frame: FrameType | None) -> str:
    """The top-level name of the module that registers something, through this package's decorators or not."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module != _PACKAGE or frame.f_code.co_name == "<module>":
            return module
        frame = frame.f_back
    return _PACKAGE


def _note_class(noun: str, name: str, made: type) -> None:
    if made.__module__.partition(".")[0] in _modules:
        _classes.setdefault(made, (noun, name))
    else:
        _PLAIN.add(made)


def call_registered(
    noun: str, name: str, function: Any, returns: Callable[..., Any] | None, hint: str, args: Any, kwargs: Any
) -> Any:
    """
    The value of a registered function; `returns(value, *args)` converts it, or raises [`Unusable`].

    A function that fails or returns an unusable value is a `LabError` with its name, file and line, and `hint`.
    """
    try:
        value = function(*args, **kwargs)
        if type(value) not in _PLAIN:
            _note_class(noun, name, type(value))
        return value if returns is None else returns(value, *args)
    except LabError:
        raise
    except Unusable as error:
        raise LabError(f"The {noun} {name!r} {error}.{where(function)}") from None
    except FAILURES as error:
        if is_out_of_memory(error):
            raise
        raise located(error, f"The {noun} {name!r}", hint, file_of(function)) from error


@contextmanager
def registered_code_located() -> Iterator[None]:
    """Turns errors of foreign registered code in this block into a `LabError` that names it, its file and the line."""
    try:
        yield
    except LabError:
        raise
    except FAILURES as error:
        if (failure := registered_failure(error)) is None:
            raise
        raise failure from error


def registered_failure(error: BaseException) -> LabError | None:
    """The error of foreign registered code, which names it, its file and the line; `None` for an error of other code."""
    found = None if is_out_of_memory(error) else _foreign_frame(error.__traceback__)
    return found and located(error, *found)


def _foreign_frame(trace: TracebackType | None) -> tuple[str, str, str] | None:
    """Name, remedy (none) and file of the innermost foreign registered code in a traceback, if there is any."""
    title, found = "", None
    while trace is not None:
        frame = trace.tb_frame
        title = titled(frame.f_locals.get("self")) or title
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module in _modules:
            found = title or f"Code of the plug-in {module.removeprefix('lrlab_plugin_')!r}", "", frame.f_code.co_filename
        trace = trace.tb_next
    return found


def titled(made: Any) -> str | None:
    """The name in errors of an object of a foreign registered class; `None` for other objects."""
    found = next((_classes[each] for each in type(made).__mro__ if each in _classes), None)
    return found and f"The {found[0]} {found[1]!r}"


def file_of(function: Any) -> str | None:
    """The file of a function or class, if it is known."""
    location = location_of(function)
    return location and location.rpartition(":")[0]


def location_of(function: Any) -> str | None:
    """File and first line of a function or class, as "FILE:LINE", if they are known."""
    function = function.func if isinstance(function, functools.partial) else function
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    methods = [value for value in vars(function).values() if inspect.isfunction(value)] if inspect.isclass(function) else []
    return location_of(methods[0]) if methods else None


def where(function: Any) -> str:
    """The sentence " It is at FILE:LINE."; an empty string if that is not known."""
    location = location_of(function)
    return f" It is at {location}." if location else ""


def described(value: Any) -> str:
    """A value in words, for errors: its type, dtype and shape, or a short text."""
    name = type(value).__name__
    if value is None or isinstance(value, (bool, int, float, complex)):
        return shown(value)
    if isinstance(value, str):
        return f"the text {shortened(value)}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        article = "an array" if isinstance(value, (np.ndarray, np.generic)) else "a tensor"
        return f"{article} of {value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple, dict)):
        return f"a {name} of {len(value)}"
    return f"an object of {type(value).__module__}.{name}"


def real_values(value: Any, wanted: str, *shapes: tuple[int, ...]) -> Any:
    """
    Real numbers of one of these shapes. Numbers and arrays stay as they are; tensors and lists become arrays.

    Raises [`Unusable`] for anything else; `wanted` describes the allowed values.
    """
    array: Any
    if isinstance(value, (np.ndarray, np.generic)):
        array = value
    else:
        try:
            array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, RuntimeError):  # ragged lists, tensors without a counterpart
            raise unusable(wanted, value) from None
    if array.dtype.kind not in _REAL or array.shape not in shapes:
        raise unusable(wanted, value)
    return value if isinstance(value, (int, float, np.ndarray, np.generic)) else array[()]


def python_number(value: Any, wanted: str = "a number") -> int | float:
    """An `int` or a `float` from a number, or from an array or a tensor of one; raises [`Unusable`] for anything else."""
    number = value
    if hasattr(value, "dtype") and hasattr(value, "item") and np.prod(value.shape) == 1:
        number = value.item()
    if isinstance(number, numbers.Real) and not isinstance(number, bool):
        try:
            as_float = float(number)
        except OverflowError:
            raise unusable(f"{wanted} within the range of a float", value) from None
        # Records hold no longer integers.
        return int(number) if isinstance(number, numbers.Integral) and abs(as_float) < 2**63 else as_float
    raise unusable(wanted, value)
