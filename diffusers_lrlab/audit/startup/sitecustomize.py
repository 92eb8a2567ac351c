"""Loads the recorder into every Python process of an audited program, whichever launcher starts it.

Python imports `sitecustomize` at startup. This one removes its folder from `sys.path`, and then imports the environment's
own. The recorder is loaded once torch is imported, which many processes of a program never do. It must not import
`diffusers_lrlab`, which registers schedules and need not be installed here.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Starts the recorder when torch has been imported."""

    def __init__(self, folder: str):
        self._folder = folder  # of the records
        self._loader: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            _load_recorder().Recorder(self._folder).install()
        except Exception as error:  # of a torch that is too old, say: the program goes on without an audit
            sys.stderr.write(f"lrlab audit: cannot record with this torch: {type(error).__name__}: {error}\n")


def _load_recorder() -> Any:
    folder = os.path.join(os.path.dirname(_HERE), "recorder")
    path = os.path.join(folder, "__init__.py")
    spec: Any = importlib.util.spec_from_file_location("_lrlab_recorder", path, submodule_search_locations=[folder])
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import_own_sitecustomize() -> None:
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
    sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = sys.modules.get("sitecustomize", _this)


_this = sys.modules[__name__]
if os.environ.get("LRLAB_AUDIT"):
    sys.meta_path.insert(0, _AfterImport(os.environ["LRLAB_AUDIT"]))
_import_own_sitecustomize()
