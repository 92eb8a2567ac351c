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
            when_imported(module, library.register)
    for name in PIPELINES:
        when_imported(name, register_pipeline)
    when_imported("diffusers.pipelines.pipeline_utils", register_pipelines)


def when_imported(host: str, action: Callable[[Any], None]) -> None:
    """Calls an action with a module, now or when it is imported. The same action for the same module is called once."""
    if host in sys.modules:
        action(sys.modules[host])
        return
    finder = _finder_of(host)
    if finder is None:
        sys.meta_path.insert(0, _ActOnImport(host, action))
    elif action not in finder.actions:
        finder.actions.append(action)


def _finder_of(host: str) -> "_ActOnImport | None":
    return next((each for each in sys.meta_path if isinstance(each, _ActOnImport) and each.host == host), None)


class _ActOnImport(importlib.abc.MetaPathFinder):
    """Calls functions with a module once the module is imported."""

    def __init__(self, host: str, action: Callable[[Any], None]):
        self.host, self.actions = host, [action]

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
                for action in self.actions:
                    action(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
