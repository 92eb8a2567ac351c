"""What a plain installation leaves out, and which extra brings it.

`pip install diffusers_lrlab` is enough for schedules, timestep samplers, previews in the terminal and the launcher. What
else the package imports comes with `diffusers_lrlab[train]` and `diffusers_lrlab[study]`.
"""

import importlib.util
import sys
from collections.abc import Iterable

from .errors import LabError

# By the names under which they are imported; pyproject.toml has the names under which they are installed. Packages that
# torch, diffusers or accelerate bring are not here: they are never missing.
EXTRAS = {
    "train": ("data_morph", "datasets", "matplotlib", "pyarrow", "sklearn", "transformers"),
    "study": ("statsmodels",),
    "images": ("mlxtend",),
    "ray": ("ray",),
}
# Extras of pyproject.toml that only those need who change the package.
FOR_DEVELOPERS = ("test", "docs", "mutants")
_BUILDS_ON = {"study": ("train",), "images": ("train",)}


class MissingExtra(LabError, ImportError):
    """Something needs packages that are not installed; the message names the extra that brings them."""


def require_extra(extra: str, what: str, packages: Iterable[str] = ()) -> None:
    """
    Raises a `MissingExtra` before work is done in vain.

    Args:
        extra (`str`): A name of `EXTRAS`.
        what (`str`): What needs it, as the message begins.
        packages (`str`, *optional*): Those that are needed of it; all of them if none are given.
    """
    needed = [*packages] or [package for part in (*_BUILDS_ON.get(extra, ()), extra) for package in EXTRAS[part]]
    missing = [package for package in needed if not _is_installed(package)]
    if missing:
        raise MissingExtra(_message(what, missing, extra))


def _is_installed(package: str) -> bool:
    return sys.modules.get(package) is not None or importlib.util.find_spec(package) is not None


def _message(what: str, missing: Iterable[str], extra: str) -> str:
    return f"{what} needs {', '.join(missing)}, not installed here. Install the rest: pip install 'diffusers_lrlab[{extra}]'"
