"""Arguments of public functions, checked by the annotations of their signatures."""

import ast
import functools
import importlib
import inspect
from collections import ChainMap
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, TypeVar, Union, get_args

from .annotations import REFUSED, Reader, described, reader
from .errors import LabError, must_be, shown

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


def refusal(what: str, name: str, value: Any, hint: Any, remedy: str) -> LabError:
    """The error for an argument of another type than its annotation."""
    got = type(value).__name__
    if isinstance(value, (list, tuple)) and len(value) == 1 and reader(hint)(value[0]) is not REFUSED:
        remedy = f"give its item instead of the {got}"
    if isinstance(value, dict) and (config := next((each for each in (hint, *get_args(hint)) if is_dataclass(each)), None)):
        remedy = f"write {described(config).split()[-1]}(**options)"
    if isinstance(value, str) and reader(hint)(_literal(value)) is not REFUSED:
        remedy = f"leave out its quotes: {name}={value.strip()}"
    text = shown(value)
    of_type = "" if text.startswith(got) or value is None else f" ({got})"
    return must_be(name, value, described(hint), remedy, of=what, got=f"{text}{of_type}")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return REFUSED


class _Names(dict[str, Any]):
    """Imports modules by name: an annotation may refer to one that is only imported under TYPE_CHECKING."""

    def __missing__(self, name: str) -> Any:
        return importlib.import_module(name)


def annotation_of(parameter: inspect.Parameter, function: Any) -> Any:
    """The annotation of a parameter as a type; it includes `None` if that is the default."""
    hint = parameter.annotation
    if isinstance(hint, str):
        namespace = getattr(inspect.unwrap(function), "__globals__", {})
        hint = eval(hint, {}, ChainMap(namespace, vars(importlib.import_module("builtins")), _Names()))
    return Union[hint, None] if parameter.default is None else hint  # noqa: UP007 - of any annotation


def checked(function: _Decorated) -> _Decorated:
    """
    A decorator for public functions, methods and classes: a [`LabError`] for an argument of another type than annotated.

    Arguments are converted by [`reader`]. Too many or too few arguments are a `TypeError`, as usual. Signature and docstring
    are preserved. It costs about a microsecond per call.
    """
    if inspect.isclass(function):
        function.__init__ = _checked(function.__init__, function.__name__)  # type: ignore[method-assign]
        return function
    is_call = function.__name__ == "__call__"
    return _checked(function, function.__qualname__.partition(".")[0] if is_call else function.__name__)


def _checked(function: Any, called: str) -> Any:
    signature = inspect.signature(function)

    # By name and by position; made at the first call, when modules that annotations refer to can be imported.
    @functools.cache
    def readers() -> tuple[dict[str, Reader], list[tuple[Any, Reader]]]:
        by_name: dict[str, Reader] = {}
        by_position: list[tuple[Any, Reader]] = []
        for each in signature.parameters.values():
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
                hint = annotation_of(each, function)
                by_name[each.name] = reader(hint)
                if each.kind is not each.KEYWORD_ONLY:
                    by_position.append((hint if hint in (int, str, bool) else None, by_name[each.name]))
        return by_name, by_position

    def refused(name: str, value: Any) -> LabError:
        hint = annotation_of(signature.parameters[name], function)
        return refusal(f"{called}()", name, value, hint, f"help({called}) describes the arguments")

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        by_name, by_position = readers()
        # Most arguments are of exactly the annotated type, which takes no call to see.
        pairs = zip(by_position, args, strict=False)
        given = [value if type(value) is exact else read(value) for (exact, read), value in pairs]
        for position, value in enumerate(given):
            if value is REFUSED:
                raise refused([*by_name][position], args[position])
        for name, value in kwargs.items():
            if name in by_name and (found := by_name[name](value)) is not value:
                if found is REFUSED:
                    raise refused(name, value)
                kwargs[name] = found
        return function(*given, *args[len(given) :], **kwargs)

    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    return wrapper
