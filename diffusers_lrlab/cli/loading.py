"""A first line of output in a terminal, since importing torch or transformers takes seconds without any."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from ..core.environment import is_watched
from ..core.errors import is_first_process

LIBRARIES, TEXT = {"torch", "transformers"}, "Loading libraries ...\n"


class _Announcer(MetaPathFinder):
    """Prints the line when one of them is imported, and not when something only asks whether it is installed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in LIBRARIES:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def announced(module: ModuleType) -> None:
            forget_loading()
            sys.stderr.write(TEXT)
            sys.stderr.flush()
            load(module)

        spec.loader.exec_module = announced  # type: ignore[method-assign]
        return spec


def announce_loading() -> None:
    """Makes the first import of one of them print a line, if output goes to a terminal."""
    if not LIBRARIES & {*sys.modules} and is_watched() and is_first_process():
        forget_loading()
        sys.meta_path.insert(0, _Announcer())


def forget_loading() -> None:
    """Undoes it: for programs that call commands as functions."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Announcer)]
