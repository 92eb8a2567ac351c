"""The environment of a run: versions, source, hardware, command, memory."""

import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from .extras import version_of
from .plugins import loaded_plugins, plugin_packages

PACKAGE = Path(__file__).resolve().parents[1]
OTHERS_WAIT = timedelta(hours=2)  # how long processes wait for the one that samples, evaluates or uploads
_OF_LAUNCHERS = {"ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"}
_VERSIONS = ("torch", "diffusers", "transformers", "accelerate", "datasets", "numpy")


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
        "processor": _processor_name(),
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


def cpu_computes_in_bf16() -> bool:
    """
    Whether this processor has bfloat16 instructions that torch uses (AVX512_BF16 or AMX; BF16 on ARM).

    Without them torch converts, and an update takes many times as long as in float32. Respects `ONEDNN_MAX_CPU_ISA`.
    """
    import torch

    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # true of any AVX-512: oneDNN has kernels for it, but slow ones
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _processor_name() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1) if match else platform.processor()


def launch_command() -> str | None:
    """
    The command that started this process, ready to be typed again, without the token; `None` in third-party programs and
    notebooks.
    """
    program = _program(Path(sys.argv[0]).resolve())
    if program is None:
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


def _program(script: Path) -> list[str] | None:
    """The command that starts one of the lab's programs, given its file."""
    doors = ("__main__.py", "cli/main.py")
    if script.name == "lrlab" or script in [PACKAGE / door for door in doors]:
        return ["lrlab"]
    if script == PACKAGE / "train.py":
        return ["accelerate", "launch", "-m", "diffusers_lrlab.train"]
    if script.parent == PACKAGE.parent / "training_scripts":
        return ["accelerate", "launch", f"training_scripts/{script.name}"]
    return None


def peak_memory_mb() -> float:
    """The largest memory of this process so far: on the GPU where there is one, else in RAM."""
    import resource  # not on Windows, where `lrlab` imports this module too

    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
