"""Temporary replacements of attributes in other libraries."""

import contextlib
import functools
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

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replaces a function or method by one that calls `around(original, *args, **kwargs)`."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self.replace(owner, name, call)
