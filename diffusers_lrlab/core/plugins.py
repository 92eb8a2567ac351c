"""Plug-ins: users' code that registers names, in a file, a module or an installed package."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import FAILURES, LabError, failures_located

ENTRY_POINTS = "diffusers_lrlab.plugins"
"""The entry point group of packages that register names wherever they are installed."""

_loaded: dict[str, dict[str, str]] = {}  # by path or module, as given to --import
_packages: dict[str, str] = {}
_roots = {__name__.partition(".")[0]}  # top-level packages that are always importable, or loaded here
_installed = False


def load_plugins(names: str | None) -> None:
    """
    Runs code that registers schedules, samplers, optimizers or other entries, once per process: Python files or modules,
    with commas. Raises a `LabError` if one of them cannot be found, or fails.
    """
    load_installed_plugins()
    for name in filter(None, (part.strip() for part in (names or "").split(","))):
        key = str(Path(name).resolve()) if _is_file(name) else name
        if key not in _loaded:
            module = _run(name)
            _roots.add(module.__name__.partition(".")[0])
            source = Path(module.__file__).read_bytes() if module.__file__ else b""
            _loaded[key] = {"name": name, "sha256": hashlib.sha256(source).hexdigest()}


def loaded_plugins() -> list[dict[str, str]]:
    """Name and SHA-256 of each file or module that [`load_plugins`] has run; for a package, of its `__init__.py`."""
    return list(_loaded.values())


@contextmanager
def names_code(plugins: Any) -> Iterator[None]:
    """Lets an error say which code a record names, if none was loaded: a name that it registered may be missing."""
    try:
        yield
    except LabError as error:
        if plugins and not _loaded:
            raise LabError(
                f"{error} The record was made with --import {plugins!r}, whose names may be missing here. Read that code, "
                "then give the option again."
            ) from error
        raise


def plugin_packages() -> dict[str, str]:
    """Versions of the packages that [`load_installed_plugins`] has loaded."""
    return dict(_packages)


def is_found_again(module: str) -> bool:
    """Whether another process can import this module: one of this package, of `--import` or of an installed plug-in."""
    return module.partition(".")[0] in _roots


def load_installed_plugins() -> None:
    """Loads the plug-ins of installed packages, once; one that fails is skipped with a warning."""
    global _installed
    if _installed:
        return
    _installed = True  # first, since plug-ins may look names up
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            _roots.add(entry.module.partition(".")[0])
            entry.load()
            if entry.dist is not None:
                _packages[entry.dist.name] = entry.dist.version
        except FAILURES as error:
            what = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"warning: the installed plug-in {entry.name!r} ({entry.value}) was skipped: {what}\n")


def _is_file(name: str) -> bool:
    return name.endswith(".py") or "/" in name


def _run(name: str) -> ModuleType:
    with failures_located(f"--import {name}"):
        return _run_file(Path(name)) if _is_file(name) else _run_module(name)


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise LabError(f"--import {path}: there is no such file. Give a Python file, or the name of a module.")
    # A name that no other module has. Processes that unpickle objects of this file cannot import it by that name.
    spec = importlib.util.spec_from_file_location(f"lrlab_plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise LabError(f"--import {path} is not a Python file. Its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _run_module(name: str) -> ModuleType:
    sys.path.insert(0, "")  # the current folder, as for `python -m` and unlike for a command such as `lrlab`
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] and error.name != name:
            raise
        raise LabError(
            f"--import {name}: there is no such module. Give the name of a module, or a Python file, such as {name}.py."
        ) from None
    finally:
        sys.path.remove("")
