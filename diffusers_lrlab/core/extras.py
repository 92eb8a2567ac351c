"""Optional dependencies, the extras that install them, and the versions that they need.

`pip install diffusers_lrlab` is enough for schedules, timestep samplers, previews in the terminal, the audit and the
launcher, and keeps the versions that other trainers pin. Plots come with `diffusers_lrlab[plots]`. Training and studies come
with `diffusers_lrlab[train]` and `diffusers_lrlab[study]`, and need newer versions.
"""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Mapping

from .errors import LabError

# Import names with the lower bounds of pyproject.toml, which has the names on PyPI. Dependencies of torch, diffusers and
# accelerate are never missing, so they are not listed.
EXTRAS: dict[str, Mapping[str, str]] = {
    "plots": {"matplotlib": "3.8", "pyarrow": "16"},
    "train": {
        "accelerate": "1.10",
        "data_morph": "0.3",
        "datasets": "4.0",
        "diffusers": "0.35",
        "sklearn": "1.4",
        "torch": "2.11",
        "transformers": "4.56",
    },
    "study": {"statsmodels": "0.15"},
    "images": {"mlxtend": "0.23"},
    "ray": {"ray": "2.60"},
}
ON_PYPI = {"data_morph": "data-morph-ai", "sklearn": "scikit-learn"}  # where that is another name
_TRAIN = ("plots", "train")
_BUILDS_ON = {"train": ("plots",), "study": _TRAIN, "images": _TRAIN}


class MissingExtra(LabError, ImportError):
    """Packages are not installed, or too old; the message has the command that installs them."""


def require_extra(extra: str, what: str, packages: Iterable[str] = ()) -> None:
    """
    Raises a `MissingExtra`, which begins with `what`, unless `packages` (all of the extra if not given) are installed in
    versions that are new enough.
    """
    bounds = {name: bound for part in (*_BUILDS_ON.get(extra, ()), extra) for name, bound in EXTRAS[part].items()}
    needed = [*packages] or [*bounds]
    missing = [name for name in needed if not _is_installed(name)]
    old = [_wanted(name, bounds[name]) for name in needed if name not in missing and _is_older(name, bounds.get(name))]
    command = f"pip install 'diffusers_lrlab[{extra}]'"
    if old:
        parts = [*([f"{', '.join(missing)}, not installed here"] if missing else []), *old]
        remedy = "If another program needs the installed versions, use an environment of its own"
        raise MissingExtra(f"{what} needs {', '.join(parts)}. {remedy}: {command}")
    if missing:
        raise MissingExtra(f"{what} needs {', '.join(missing)}, not installed here. Install the rest: {command}")


def require_version(what: str, name: str, bound: str) -> None:
    """Raises a `MissingExtra`, which begins with `what`, unless this version of a package or a later one is installed."""
    if not _is_installed(name) or _is_older(name, bound):
        raise MissingExtra(f"{what} needs {_wanted(name, bound)}. Install it: pip install '{name}>={bound}'")


def version_of(package: str) -> str | None:
    """The installed version of a package by its name on PyPI."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wanted(name: str, bound: str) -> str:
    found = f"{version_of(ON_PYPI.get(name, name))} is installed" if _is_installed(name) else "not installed here"
    return f"{name} {bound} or later ({found})"


def _is_installed(package: str) -> bool:
    return sys.modules.get(package) is not None or importlib.util.find_spec(package) is not None


def _is_older(name: str, bound: str | None) -> bool:
    from packaging.version import Version

    found = version_of(ON_PYPI.get(name, name))
    return bound is not None and found is not None and Version(found) < Version(bound)
