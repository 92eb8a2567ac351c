"""Attributes of other libraries that are replaced while a script runs, and put back when it ends."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

_INHERITED = object()


class Patches(contextlib.ExitStack):
    """The replaced attributes of a run. Closing it restores them in reverse order, the very objects they were."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """
        Sets an attribute of a class or a module until the run ends.

        Not `__new__`: Python does not restore the slot of a class whose `__new__` was inherited.
        """
        own = vars(owner).get(name, _INHERITED)  # not getattr, which would bind a classmethod
        setattr(owner, name, value)
        restore = (
            functools.partial(delattr, owner, name) if own is _INHERITED else functools.partial(setattr, owner, name, own)
        )
        self.callback(restore)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Makes `around(original, *args, **kwargs)` answer the calls of a function or method."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self.replace(owner, name, call)
