"""Stand-ins for the rooms that need diffusers_lrlab[train], where it is not installed. Tests that use one are skipped."""

import re
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

NEED_TRAINING = re.compile(
    r"diffusers_lrlab\.(finder|forecast|hub|preflight|run|training|"
    r"study\.(analysis|executors|report|run|spec|stacked))\b"
)


class SkippedRoom(ModuleType):
    """A module of which every name is a function that skips the test."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: pytest.skip(f"{self.__name__} needs diffusers_lrlab[train]")


class SkippedRooms:
    """Finds such modules in place of the real ones."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if NEED_TRAINING.match(name) else None

    def create_module(self, spec):
        return SkippedRoom(spec.name)

    def exec_module(self, module):
        pass
