"""The environment: packages and the extras that install them, source, hardware, command, memory, and the project itself.

`pip install diffusers_lrlab` is enough for schedules, timestep samplers, previews in the terminal, the audit and the
launcher, and keeps the versions that other trainers pin. Plots come with `diffusers_lrlab[plots]`. Training and studies come
with `diffusers_lrlab[train]` and `diffusers_lrlab[study]`, and need newer versions.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from .errors import LabError
from .plugins import loaded_plugins, plugin_packages

PACKAGE = Path(__file__).resolve().parents[1]
OTHERS_WAIT = timedelta(hours=2)  # how long processes wait for the one that samples, evaluates or uploads
_OF_LAUNCHERS = {"ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"}
_VERSIONS = ("torch", "diffusers", "transformers", "accelerate", "datasets", "numpy")

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
    if missing or old:
        parts = [*([f"{', '.join(missing)}, not installed here"] if missing else []), *old]
        remedy = (
            "If another program needs the installed versions, use an environment of its own" if old else "Install the rest"
        )
        raise MissingExtra(f"{what} needs {', '.join(parts)}. {remedy}: pip install 'diffusers_lrlab[{extra}]'")


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
    found = version_of(ON_PYPI.get(name, name)) if _is_installed(name) else None
    return f"{name} {bound} or later ({f'{found} is installed' if found else 'not installed here'})"


def _is_installed(package: str) -> bool:
    return sys.modules.get(package) is not None or importlib.util.find_spec(package) is not None


def _is_older(name: str, bound: str | None) -> bool:
    from packaging.version import Version

    found = version_of(ON_PYPI.get(name, name))
    return bound is not None and found is not None and Version(found) < Version(bound)


def describe_environment() -> dict[str, Any]:
    """Versions, source commit and hardware, for the `meta` section of `run.json`."""
    repository = PACKAGE.parent

    def git(*arguments: str) -> str | None:
        if not (repository / "pyproject.toml").exists():
            return None  # installed: a repository around the environment is not the source of this package
        command = ["git", "-C", str(repository), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    cpu_info = Path("/proc/cpuinfo")
    processors = re.findall(
        r"^model name\s*:\s*(.*)$", cpu_info.read_text("utf-8") if cpu_info.exists() else "", re.MULTILINE
    )
    status = git("status", "--porcelain", "--untracked-files=no")
    return {
        "versions": {
            "python": platform.python_version(),
            PACKAGE.name: vars(sys.modules[PACKAGE.name])["__version__"],
            **{name: version_of(name) for name in _VERSIONS if version_of(name)},
            **plugin_packages(),
        },
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": None if status is None else bool(status),
        "platform": platform.platform(),
        "processor": (processors or [platform.processor()])[0],
        "cpu_cores": available_cores(),
        "plugins": loaded_plugins(),
    }


def is_watched() -> bool:
    """Whether someone can watch progress: output goes to a terminal or a notebook, not to a file."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allowed_threads(processes: int = 1) -> int:
    """Threads per process: `OMP_NUM_THREADS` if the user set it, or a share of the cores."""
    return asked_threads() or max(1, available_cores() // processes)


def asked_threads() -> int | None:
    """
    `OMP_NUM_THREADS` as the user set it; `None` if it is not set.

    `accelerate launch` and `torchrun` set it to 1 for their processes if it is not set, so the user's value is the one in
    the environment of the launcher.
    """
    environment = dict(os.environ)
    if environment.keys() & _OF_LAUNCHERS:
        import psutil

        try:
            environment = psutil.Process(os.getppid()).environ()
        except psutil.Error:
            return None
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) or None if first.isdecimal() else None


def launch_command() -> str | None:
    """
    The command that started this process, ready to be typed again, without the token; `None` in third-party programs and
    notebooks.
    """
    script = Path(sys.argv[0]).resolve()
    if script.name == "lrlab" or script in (PACKAGE / "__main__.py", PACKAGE / "cli/main.py"):
        program = ["lrlab"]
    elif script == PACKAGE / "train.py":
        program = ["accelerate", "launch", "-m", "diffusers_lrlab.train"]
    elif script.parent == PACKAGE.parent / "training_scripts":
        program = ["accelerate", "launch", f"training_scripts/{script.name}"]
    else:
        return None
    arguments: list[str] = []
    for argument in sys.argv[1:]:
        hidden = arguments and arguments[-1] in ("--hub_token", "--hub-token")
        arguments.append("..." if hidden else re.sub(r"^(--hub[_-]token=).*", r"\1...", argument))
    processes, precision = int(os.environ.get("WORLD_SIZE", 1)), os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if program[:2] == ["accelerate", "launch"]:
        program[2:2] = ["--dynamo_backend", backend] if backend != "no" else []
        program[2:2] = ["--mixed_precision", precision] if precision != "no" else []
        program[2:2] = ["--multi_gpu", "--num_processes", str(processes)] if processes > 1 else []
    return shlex.join([*program, *arguments])


def peak_memory_mb() -> float:
    """The largest memory of this process so far: on the GPU where there is one, else in RAM."""
    import resource  # not on Windows, where `lrlab` imports this module too

    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def repository() -> str | None:
    """The address of the repository, as `[project.urls]` of `pyproject.toml` has it, without a slash at its end, if any."""
    try:
        urls = importlib.metadata.metadata(PACKAGE.name).get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:  # runs from its source
        return None
    return next((each.partition(", ")[2].rstrip("/") for each in urls if each.startswith("Repository, ")), None)


def project_link() -> str:
    """The project as Markdown, with a link to its repository if that has an address."""
    return f"[{PACKAGE.name}]({repository()})" if repository() else PACKAGE.name


def install_command(extra: str) -> str:
    """The command that installs the package with an extra, without a checkout."""
    command = f"pip install '{PACKAGE.name}[{extra}] @ git+{repository() or 'REPOSITORY'}'"
    return command if repository() else f"{command}  # REPOSITORY: the address of the project's repository"


def citation() -> str:
    """The entry of `CITATION.cff` in BibTeX."""
    fields = {"title": f"{{{PACKAGE.name}}}", "author": "{the diffusers_lrlab developers}", "license": "Apache-2.0"}
    if address := repository():
        fields["url"] = address
    return "\n".join([f"@software{{{PACKAGE.name},", *(f"  {key} = {{{value}}}," for key, value in fields.items()), "}"])
