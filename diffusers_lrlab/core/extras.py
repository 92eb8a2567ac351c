"""Optional dependencies, and the extras that install them.

`pip install diffusers_lrlab` is enough for schedules, timestep samplers, previews in the terminal and the launcher. All
other dependencies come with `diffusers_lrlab[train]` and `diffusers_lrlab[study]`.
"""

import importlib.util
import sys
from collections.abc import Iterable

from .errors import LabError

# Import names; pyproject.toml has the names on PyPI. Dependencies of torch, diffusers and accelerate are never missing, so
# they are not listed.
EXTRAS = {
    "train": ("data_morph", "datasets", "matplotlib", "pyarrow", "sklearn", "transformers"),
    "study": ("statsmodels",),
    "images": ("mlxtend",),
    "lora": ("peft",),
    "ray": ("ray",),
}
# Extras of pyproject.toml that only developers of this package need.
FOR_DEVELOPERS = ("test", "docs", "mutants")
_BUILDS_ON = {"study": ("train",), "images": ("train",), "lora": ("train",)}


class MissingExtra(LabError, ImportError):
    """Packages are not installed; the message names the extra that installs them."""


def require_extra(extra: str, what: str, packages: Iterable[str] = ()) -> None:
    """Raises a `MissingExtra`, which begins with `what`, unless `packages` (all of the extra if not given) are installed."""
    needed = [*packages] or [package for part in (*_BUILDS_ON.get(extra, ()), extra) for package in EXTRAS[part]]
    missing = [package for package in needed if not _is_installed(package)]
    if missing:
        raise MissingExtra(_message(what, missing, extra))


def _is_installed(package: str) -> bool:
    return sys.modules.get(package) is not None or importlib.util.find_spec(package) is not None


def _message(what: str, missing: Iterable[str], extra: str) -> str:
    return f"{what} needs {', '.join(missing)}, not installed here. Install the rest: pip install 'diffusers_lrlab[{extra}]'"
