"""A configuration in the words of those who asked for it: as a command, and as a call."""

import json
import os
import shlex
from typing import Any

from ..core.options import defaults_of
from .config import TrainingConfig


def asked_options(config: TrainingConfig) -> dict[str, Any]:
    """What differs from the defaults, without the token; a rate that is found is `learning_rate="auto"`."""
    defaults = defaults_of(TrainingConfig)
    changed = {name: value for name, value in config.to_dict().items() if value != defaults[name]}
    if changed.pop("auto_learning_rate", False):
        changed["learning_rate"] = "auto"
    changed.pop("local_rank", None)
    return changed


def as_command(config: TrainingConfig) -> str:
    """The command that asks for the same."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    several = ["accelerate", "launch", "--multi_gpu", "--num_processes", str(processes), "-m", "diffusers_lrlab.train"]
    words = ["lrlab", "train"] if processes == 1 else several
    for name, value in asked_options(config).items():
        words.append(f"--{name}={json.dumps(value) if isinstance(value, (dict, bool)) else value}")
    return shlex.join(words)


def as_call(config: TrainingConfig, function: str = "train") -> str:
    """The call of Python that asks for the same."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in asked_options(config).items())
    return f"{function}(TrainingConfig({arguments}))"
