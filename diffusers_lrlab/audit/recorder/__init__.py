"""Recorder of the updates of a training program, in the program's own processes.

It runs with Python 3.10 and torch 2.6 or newer, without any other package. It reads, and changes nothing: no random number,
no weight, no signal handler.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls the recorder when torch has been imported, which many processes of a program never do."""

    def __init__(self, folder: str):
        self._folder = folder
        self._loader: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            from .recorder import Recorder

            Recorder(self._folder).install()
        except Exception as error:  # of a torch that is too old, say: the program goes on without an audit
            sys.stderr.write(f"lrlab audit: cannot record with this torch: {type(error).__name__}: {error}\n")


def record_when_torch_is_imported(folder: str) -> None:
    """Writes the records of this process to a file in `folder`, once it imports torch."""
    sys.meta_path.insert(0, _AfterImport(folder))
