"""Registers the lab with diffusers and transformers: at once with imported modules, with others when they are imported.

Importing them takes seconds, so `import diffusers_lrlab` does not import them.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def register() -> None:
    """Registers schedules with diffusers and transformers, and pipelines with diffusers. Idempotent."""
    from .pipelines import PIPELINES, register_pipeline, register_pipelines
    from .schedules import LIBRARIES

    for library in LIBRARIES:
        for module in dict.fromkeys((library.names, library.functions)):
            _when_imported(module, library.register)
    for name in PIPELINES:
        _when_imported(name, register_pipeline)
    _when_imported("diffusers.pipelines.pipeline_utils", register_pipelines)


def _when_imported(host: str, action: Callable[[Any], None]) -> None:
    if host in sys.modules:
        action(sys.modules[host])
    elif not any(isinstance(finder, _ActOnImport) and finder.host == host for finder in sys.meta_path):
        sys.meta_path.insert(0, _ActOnImport(host, action))


class _ActOnImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module once the module is imported."""

    def __init__(self, host: str, action: Callable[[Any], None]):
        self.host, self.action = host, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.host:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self.action(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
