"""Temporary replacements of attributes in other libraries."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

_INHERITED = object()


class Patches(contextlib.ExitStack):
    """The replaced attributes of a run. Closing it restores the original objects in reverse order."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """
        Sets an attribute of a class or a module until the run ends.

        Not `__new__`: Python does not restore the slot of a class whose `__new__` was inherited.
        """
        own = vars(owner).get(name, _INHERITED)  # getattr would bind a classmethod
        setattr(owner, name, value)
        if own is _INHERITED:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, own)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any], where: Callable[[], bool] | None = None) -> None:
        """
        Replaces a function or method by one that calls `around(original, *args, **kwargs)`, if `where` is not false then.

        The parameters of `around` are positional-only, since a caller's keyword may have any name. Those that it names and
        a caller gives by keyword are passed by their position in `original`.
        """
        original = getattr(owner, name)
        names = _positional(original)[: len(_positional(around)) - 1]

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if where is not None and not where():
                return original(*args, **kwargs)
            for given in names[len(args) :]:
                if given not in kwargs:
                    break
                args = (*args, kwargs.pop(given))
            return around(original, *args, **kwargs)

        self.replace(owner, name, call)

    def follow_classes(self, base: Any, follow: Callable[[type], None]) -> None:
        """Calls `follow` with a class, and with all that inherit from it, now or later."""

        def follow_new(cls: Any, /, **kwargs: Any) -> None:
            super(base, cls).__init_subclass__(**kwargs)
            follow(cls)

        for cls in _with_subclasses(base):
            follow(cls)
        self.replace(base, "__init_subclass__", classmethod(follow_new))


def _positional(function: Callable[..., Any]) -> list[str]:
    """The names of its positional parameters; none for a built-in function that does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return []
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


def _with_subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(_with_subclasses, cls.__subclasses__()))
