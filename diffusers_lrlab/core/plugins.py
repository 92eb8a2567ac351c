"""Plug-ins: users' code that registers names, in a file, a module or an installed package; its calls and its errors.

Registered functions are called by [`call_registered`]. Methods of the objects that they return (a denoiser, an optimizer, a
kind of data) are called in blocks of [`registered_code_located`], as is a whole run.
"""

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import numbers
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np

from .errors import LabError, is_out_of_memory, shown

ENTRY_POINTS = "diffusers_lrlab.plugins"
"""The entry point group of packages that register names wherever they are installed."""

_PACKAGE = __name__.partition(".")[0]
_loaded: dict[str, dict[str, str]] = {}  # by path or module, as given to --import
_packages: dict[str, str] = {}
_registering: set[str] = set()  # top-level names of foreign modules that register something
_titles: dict[type, str | None] = {}  # by class: what errors call objects that registered code made; None if not foreign
_installed = False


# --- loading ---------------------------------------------------------------------------------------------------------


def load_plugins(names: str | None) -> None:
    """
    Runs code that registers schedules, samplers, optimizers or other entries, once per process: Python files or modules,
    with commas. Raises a `LabError` if one of them cannot be found, or fails.
    """
    load_installed_plugins()
    for name in filter(None, (part.strip() for part in (names or "").split(","))):
        is_file = name.endswith(".py") or "/" in name
        key = str(Path(name).resolve()) if is_file else name
        if key not in _loaded:
            with failures_located(f"--import {name}"):
                module = _run_file(Path(name)) if is_file else _run_module(name)
            source = Path(module.__file__).read_bytes() if module.__file__ else b""
            _loaded[key] = {"name": name, "sha256": hashlib.sha256(source).hexdigest()}


def loaded_plugins() -> list[dict[str, str]]:
    """Name and SHA-256 of each file or module that [`load_plugins`] has run; for a package, of its `__init__.py`."""
    return list(_loaded.values())


def plugin_packages() -> dict[str, str]:
    """Versions of the packages that [`load_installed_plugins`] has loaded."""
    return dict(_packages)


def load_installed_plugins() -> None:
    """Loads the plug-ins of installed packages, once; one that fails is skipped with a warning."""
    global _installed
    if _installed:
        return
    _installed = True  # first, since plug-ins may look names up
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
            if entry.dist is not None:
                _packages[entry.dist.name] = entry.dist.version
        except FAILURES as error:
            what = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"warning: the installed plug-in {entry.name!r} ({entry.value}) was skipped: {what}\n")


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise LabError(f"--import {path}: there is no such file. Give a Python file, or the name of a module.")
    # A name that no other module has. Processes that unpickle objects of this file cannot import it by that name.
    spec = importlib.util.spec_from_file_location(f"lrlab_plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise LabError(f"--import {path} is not a Python file. Its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _run_module(name: str) -> ModuleType:
    sys.path.insert(0, "")  # the current folder, as for `python -m` and unlike for a command such as `lrlab`
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] and error.name != name:
            raise
        raise LabError(
            f"--import {name}: there is no such module. Give the name of a module, or a Python file, such as {name}.py."
        ) from None
    finally:
        sys.path.remove("")


# --- calls and their results -----------------------------------------------------------------------------------------


class Unusable(Exception):
    """A registered function returned something that cannot be used; the text begins with "must return"."""


def unusable(wanted: str, value: Any) -> Unusable:
    return Unusable(f"must return {wanted}, not {described(value)}")


def note_registered(noun: str, name: str, function: Any) -> bool:
    """Notes the code that registers a function, and returns whether it is foreign, that is, not in this package."""
    frame: Any = sys._getframe(1)
    while _package_of(frame) == _PACKAGE and frame.f_code.co_name != "<module>":  # out of decorators of this package
        frame = frame.f_back
    if (module := _package_of(frame)) == _PACKAGE:
        return False
    _registering.add(module)
    if inspect.isclass(function):
        _note_class(f"The {noun} {name!r}", function)
    return True


def _package_of(frame: FrameType) -> str:
    """The top-level name of the module whose code runs in a frame."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _note_class(title: str, made: type) -> None:
    _titles[made] = title if made.__module__.partition(".")[0] in _registering else None


def unwrapped(model: Any) -> Any:
    """The model inside a compiled one, or one that is distributed over processes."""
    for name in ("_orig_mod", "module"):
        while hasattr(inner := getattr(model, name, None), "forward"):
            model = inner
    return model


def titled(made: Any) -> str | None:
    """What errors call an object of a foreign registered class, or a model that wraps one; `None` for other objects."""
    return next((title for each in type(unwrapped(made)).__mro__ if (title := _titles.get(each))), None)


def call_registered(
    noun: str, name: str, function: Any, returns: Callable[..., Any] | None, hint: str, args: Any, kwargs: Any
) -> Any:
    """
    The value of a registered function; `returns(value, *args)` converts it, or raises [`Unusable`].

    A function that fails or returns an unusable value is a `LabError` with its name, file and line, and `hint`.
    """
    title = f"The {noun} {name!r}"
    try:
        with failures_located(title, hint, function):
            value = function(*args, **kwargs)
            if type(value) not in _titles:
                _note_class(title, type(value))
            return value if returns is None else returns(value, *args)
    except Unusable as error:
        raise LabError(f"{title} {error}.{where(function)}") from None


def _location_of(function: Any) -> str | None:
    """File and first line of a function or class, as "FILE:LINE", if they are known."""
    function = function.func if isinstance(function, functools.partial) else function
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    methods = [value for value in vars(function).values() if inspect.isfunction(value)] if inspect.isclass(function) else []
    return _location_of(methods[0]) if methods else None


def where(function: Any) -> str:
    """The sentence " It is at FILE:LINE."; an empty string if that is not known."""
    location = _location_of(function)
    return f" It is at {location}." if location else ""


def described(value: Any) -> str:
    """A value in words, for errors: its type, dtype and shape, or a short text."""
    if value is None or isinstance(value, (bool, int, float, complex)):
        return shown(value)
    if isinstance(value, str):
        return f"the text {shown(value)}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        article = "an array" if isinstance(value, (np.ndarray, np.generic)) else "a tensor"
        return f"{article} of {value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"an object of {type(value).__module__}.{type(value).__name__}"


def real_values(value: Any, wanted: str, *shapes: tuple[int, ...]) -> Any:
    """
    Real numbers of one of these shapes. Numbers and arrays stay as they are; tensors and lists become arrays.

    Raises [`Unusable`] for anything else; `wanted` describes the allowed values.
    """
    try:
        array: Any = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):  # ragged lists, tensors without a counterpart
        raise unusable(wanted, value) from None
    if array.dtype.kind not in "biuf" or array.shape not in shapes:
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


# --- errors ----------------------------------------------------------------------------------------------------------

# A plug-in that ends the program has failed, with any status. Ctrl-C is the user's.
FAILURES = (Exception, SystemExit)


@contextmanager
def failures_located(what: str, remedy: str = "", function: Any = None) -> Iterator[None]:
    """
    Turns exceptions of a plug-in in this block into a [`LabError`] that names `what` failed, and the line: in the file of a
    `function` if it is given and that is there.
    """
    try:
        yield
    except (LabError, Unusable):
        raise
    except FAILURES as error:
        if is_out_of_memory(error):
            raise
        location = function and _location_of(function)
        raise located(error, what, remedy, location and location.rpartition(":")[0]) from error


def located(error: BaseException, what: str, remedy: str = "", file: str | None = None) -> LabError:
    """
    A plug-in's exception as an error that names `what` failed and where: the innermost line in `file` if there is one, else
    outside of Python's standard library.
    """
    frames, reason = traceback.extract_tb(error.__traceback__), f"{type(error).__name__}: {error}{remedy}"
    if isinstance(error, SystemExit):
        reason = f"it ended the program (SystemExit: {error.code}). Hint: raise an error instead; the main part of a script "
        reason += 'belongs under `if __name__ == "__main__":`.'
    in_file = [frame for frame in frames if frame.filename == file]
    last = (in_file or [frame for frame in frames if not _is_pythons(frame.filename)] or frames)[-1]
    return LabError(f"{what} failed at {last.filename}:{last.lineno}: {reason}")


def _is_pythons(file: str) -> bool:
    return file.startswith(("<frozen", os.path.dirname(os.__file__))) and "site-packages" not in file


@contextmanager
def registered_code_located(made: Any = None) -> Iterator[None]:
    """
    Turns errors of foreign registered code in this block into a `LabError` that names its file and the line; and `made`, the
    object whose methods the block calls, if it is of a registered class.
    """
    try:
        yield
    except LabError:
        raise
    except FAILURES as error:
        if (failure := registered_failure(error, titled(made))) is None:
            raise
        raise failure from error


def registered_failure(error: BaseException, title: str | None = None) -> LabError | None:
    """The error of foreign registered code, which names its file and the line; `None` for an error of other code."""
    if is_out_of_memory(error):
        return None
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):  # the innermost first
        if (module := _package_of(frame)) in _registering:
            what = title or f"Code of the plug-in {module.removeprefix('lrlab_plugin_')!r}"
            return located(error, what, file=frame.f_code.co_filename)
    return None
