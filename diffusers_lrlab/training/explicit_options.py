"""The explicitly set options of a configuration, as a command and as a Python call."""

import json
import os
import re
import shlex
from typing import Any

from ..core.options import defaults_of, options_of
from ..core.plugins import is_found_again
from .config import TrainingConfig


def asked_options(config: TrainingConfig) -> dict[str, Any]:
    """Options that differ from their defaults, without the token."""
    defaults = defaults_of(TrainingConfig)
    changed = {name: value for name, value in config.to_dict().items() if value != defaults[name]}
    changed.pop("local_rank", None)
    return changed


def program_registrations(config: TrainingConfig) -> list[str]:
    """Names in a configuration that only the running program registers."""
    found = []
    for option, known in options_of(TrainingConfig).items():
        if known.registry:
            words = re.findall(r"\w+", f"{getattr(config, option)} {getattr(config, f'{option}_kwargs', '')}")
            own = (entry for entry in known.entries.values() if entry.module and not is_found_again(entry.module))
            found += [entry.name for entry in own if not {entry.name, *known.entries.aliases_of(entry)}.isdisjoint(words)]
    return found


def as_command(config: TrainingConfig) -> str:
    """The command with the same options."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    several = ["accelerate", "launch", "--multi_gpu", "--num_processes", str(processes), "-m", "diffusers_lrlab.train"]
    words = ["lrlab", "train"] if processes == 1 else several
    for name, value in asked_options(config).items():
        words.append(f"--{name}={json.dumps(value) if isinstance(value, (dict, bool)) else value}")
    return shlex.join(words)


def as_call(config: TrainingConfig, function: str = "train", settings: Any = None) -> str:
    """The Python call with the same options; `settings` are its second argument."""
    asked = [("TrainingConfig", asked_options(config))]
    if settings is not None:
        settings_class: Any = type(settings)
        defaults = defaults_of(settings_class)
        changed = {name: value for name, value in vars(settings).items() if value != defaults[name]}
        asked.append((settings_class.__name__, changed))
    arguments = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in asked)
    return f"{function}({', '.join(arguments)})"
