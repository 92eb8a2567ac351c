"""Where and how a run was made: versions, source, hardware, command, memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def describe_environment() -> dict[str, Any]:
    """Versions, source commit and hardware, for the `meta` section of `run.json`."""
    packages = ("diffusers_lrlab", "torch", "diffusers", "transformers", "accelerate", "datasets", "numpy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    repository = Path(__file__).parents[2]

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
        "versions": {"python": platform.python_version(), **versions},
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": None if status is None else bool(status),
        "platform": platform.platform(),
        "processor": _processor_name(),
        "cpu_cores": available_cores(),
    }


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor_name() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1) if match else platform.processor()


def launch_command() -> str:
    """The command that started this process, as one would type it again, without the token."""
    arguments: list[str] = []
    for argument in sys.argv[1:]:
        hidden = arguments and arguments[-1] in ("--hub_token", "--hub-token")
        arguments.append("..." if hidden else re.sub(r"^(--hub[_-]token=).*", r"\1...", argument))
    script, repository = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[2]
    inside = script.is_relative_to(repository)
    if script.name == "lrlab" or script == Path(__file__).resolve().parents[1] / "cli" / "main.py":
        return shlex.join(["lrlab", *arguments])
    program = ["accelerate", "launch", str(script.relative_to(repository)) if inside else os.path.relpath(script)]
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if processes > 1:
        program[2:2] = ["--multi_gpu", "--num_processes", str(processes)]
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        program[2:2] = ["--mixed_precision", precision]
    return shlex.join([*program, *arguments])


def peak_memory_mb() -> float:
    """The largest memory of this process so far: on the GPU where there is one, else in RAM."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
