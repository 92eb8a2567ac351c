"""Choices by name and parameters: read from two options, written as one spec string."""

from typing import Any

from ..core.errors import LabError
from ..core.options import options_of
from ..core.registry import Registry
from ..core.spec import format_spec, merge_spec, parse_json_kwargs
from .config import TrainingConfig, complete_options

# Options of timesteps, loss and noise, resolved by their registries alone.
LEARNED_FROM = ("timestep_sampler", "loss_weighting", "timestep_lr", "noise")


def registry_of(option: str) -> Registry:
    """The registry of the names that an option takes."""
    return options_of(TrainingConfig)[option].entries


def given_kwargs(config: TrainingConfig, option: str) -> dict[str, Any]:
    """The `--..._kwargs` of an option, as a dictionary."""
    kwargs = getattr(config, f"{option}_kwargs")
    return parse_json_kwargs(kwargs, f"--{option}_kwargs") if isinstance(kwargs, str) else kwargs or {}


def resolve_choice(config: TrainingConfig, option: str) -> dict[str, Any]:
    """The resolved fields of an option: its name, and all parameters with their defaults."""
    spec, given = getattr(config, option), given_kwargs(config, option)
    if spec is None and given:
        raise LabError(f"--{option}_kwargs {given} has no effect without --{option}. Add that or leave it out.")
    if spec is None:
        return {option: None, f"{option}_kwargs": {}}
    registry = registry_of(option)
    name, given = merge_spec(spec, given, registry)
    return {option: name, f"{option}_kwargs": registry[name].resolve(given)}


def describe_choices(fields: dict[str, Any]) -> list[tuple[str, str]]:
    """The options of timesteps, loss and noise with their spec strings, without parameters at their defaults."""
    described, fields = [], complete_options(fields)
    for option in LEARNED_FROM:
        if (name := fields[option]) is not None:
            defaults = registry_of(option)[name].resolve({})
            given = {key: value for key, value in (fields[f"{option}_kwargs"] or {}).items() if value != defaults[key]}
            described.append((option, format_spec(name, given)))
    return described
