"""Choices by name and parameters: from spec strings, `--..._kwargs` and flags of diffusers' script, and back."""

import os
from typing import Any

from diffusers_lrlab.training.kinds import kind_of

from ..core.errors import LabError, given
from ..core.options import defaults_of, options_of
from ..core.registry import Registry
from ..core.spec import format_spec, merge_spec, parse_json_kwargs
from ..objective.process import OBJECTIVES
from ..optimizers.build import check_installed
from ..optimizers.entries import OPTIMIZERS
from ..schedules.registries import SCHEDULERS
from ..schedules.schedule import resolve_kwargs
from .config import ResolvedConfig, TrainingConfig, complete_options
from .learning_options import OBJECTIVE_OPTIONS

# Options of timesteps, loss and noise, resolved by their registries alone.
LEARNED_FROM = ("timestep_sampler", "loss_weighting", "timestep_lr", "noise")
# Parameters of Adam-like optimizers, and the flags of diffusers' script that set them.
ADAM_OPTIONS = {"beta1": "adam_beta1", "beta2": "adam_beta2", "weight_decay": "adam_weight_decay", "eps": "adam_epsilon"}


def registry_of(option: str) -> Registry:
    """The registry of the names that an option takes."""
    return options_of(TrainingConfig)[option].entries


def given_kwargs(config: TrainingConfig, option: str) -> dict[str, Any]:
    """The `--..._kwargs` of an option, as a dictionary."""
    kwargs = getattr(config, f"{option}_kwargs")
    return parse_json_kwargs(kwargs, f"--{option}_kwargs") if isinstance(kwargs, str) else kwargs or {}


def resolve_choice(config: TrainingConfig, option: str) -> dict[str, Any]:
    """The resolved fields of an option: its name, and all parameters with their defaults."""
    spec, kwargs = getattr(config, option), given_kwargs(config, option)
    if spec is None:
        if kwargs:
            raise LabError(
                f"{given(f'--{option}_kwargs', kwargs)} has no effect without --{option}. Hint: add that, or leave it out."
            )
        return {option: None, f"{option}_kwargs": {}}
    registry = registry_of(option)
    name, kwargs = merge_spec(spec, kwargs, registry)
    return {option: name, f"{option}_kwargs": registry[name].resolve(kwargs)}


def describe_choices(fields: dict[str, Any]) -> list[tuple[str, str]]:
    """The options of timesteps, loss and noise with their spec strings, without parameters at their defaults."""
    described, fields = [], complete_options(fields)
    for option in LEARNED_FROM:
        if (name := fields[option]) is not None:
            defaults = registry_of(option)[name].resolve({})
            changed = {key: value for key, value in (fields[f"{option}_kwargs"] or {}).items() if value != defaults[key]}
            described.append((option, format_spec(name, changed)))
    return described


def _add_flags(config: TrainingConfig, option: str, name: str, kwargs: dict[str, Any], flags: dict[str, str]) -> None:
    """Adds parameters that were given by flags of their own; a `LabError` for one with two values."""
    for parameter, flag in flags.items():
        value = getattr(config, flag)
        if value != defaults_of(TrainingConfig)[flag] and kwargs.setdefault(parameter, value) != value:
            raise LabError(
                f"{parameter!r} of --{option} {name} is given twice: as {given(f'--{flag}', value)} and as "
                f"{parameter}={kwargs[parameter]!r}. Hint: leave one of them out."
            )


def _refuse_flags(config: TrainingConfig, option: str, name: str, flags: dict[str, str], remedy: str) -> None:
    """Raises a `LabError` for a flag that was given and has no effect on this name."""
    for flag in flags.values():
        if (value := getattr(config, flag)) != defaults_of(TrainingConfig)[flag]:
            raise LabError(f"{given(f'--{flag}', value)} has no effect on --{option} {name}. Hint: leave it out{remedy}.")


def _parameters(option: str, name: str) -> str:
    """The remedy for a flag that a name does not take."""
    takes = ", ".join(parameter.name for parameter in registry_of(option)[name].parameters)
    return f", or give parameters as --{option} {name}:key=value; it takes {takes}" if takes else ""


def resolve_optimizer(config: TrainingConfig) -> dict[str, Any]:
    """Name and parameters; Adam-like optimizers take the options of diffusers' script."""
    name, kwargs = merge_spec(config.optimizer, given_kwargs(config, "optimizer"), OPTIMIZERS)
    entry = OPTIMIZERS[name]
    taken = dict(ADAM_OPTIONS) if "adam" in entry.traits else {}
    for key in [*taken]:
        if replacing := next((other for other in entry.replacing(key) if kwargs.get(other) is not None), None):
            _refuse_flags(config, "optimizer", f"{name} with {replacing}", {key: taken.pop(key)}, "")
    if "adam" not in entry.traits:
        _refuse_flags(config, "optimizer", name, ADAM_OPTIONS, _parameters("optimizer", name))
    _add_flags(config, "optimizer", name, kwargs, taken)
    kwargs = {key: getattr(config, flag) for key, flag in taken.items()} | kwargs
    check_installed(name)
    flags = {flag: float(kwargs[key]) for key, flag in taken.items()}
    return flags | {"optimizer": name, "optimizer_kwargs": entry.resolve(kwargs)}


def resolve_objective(config: TrainingConfig) -> dict[str, Any]:
    """The objective's name and parameters, some of which have their own options."""
    name, kwargs = merge_spec(config.objective, given_kwargs(config, "objective"), OBJECTIVES)
    filled: dict[str, None] = {}
    for objective, flags in OBJECTIVE_OPTIONS.items():
        filled |= dict.fromkeys(flags.values())
        if objective == name:
            _add_flags(config, "objective", name, kwargs, flags)
        else:
            _refuse_flags(config, "objective", name, flags, _parameters("objective", name))
    return {**filled, "objective": name, "objective_kwargs": resolved_parameters(config, name, kwargs)}


def resolved_parameters(config: TrainingConfig, objective: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All parameters of an objective, with defaults of the kind of data."""
    resolved = OBJECTIVES[objective].resolve(kwargs)
    if resolved["num_steps"] is None:
        resolved["num_steps"] = kind_of(config).num_train_timesteps
    base_resolution = resolved.pop("base_resolution", None)
    if base_resolution is not None:
        # The root of the ratio of pixels (arXiv 2403.03206, section 5.3.2): one number, with which the pipeline samples too.
        if config.resolution is None or kwargs.get("shift") is not None:
            without = (
                "data without a resolution, such as points" if config.resolution is None else f"shift={kwargs['shift']:g}"
            )
            raise LabError(
                f"base_resolution={base_resolution} of --objective {config.objective}: must be left out beside {without}. "
                "Hint: it sets shift to --resolution / base_resolution."
            )
        resolved["shift"] = config.resolution / base_resolution
    return resolved


def resolve_lr_schedule(config: TrainingConfig) -> dict[str, Any]:
    """The schedule with all its parameters and its warm-up, in updates or as a fraction of the run."""
    name, kwargs = merge_spec(config.lr_scheduler, given_kwargs(config, "lr_scheduler"), SCHEDULERS)
    warmup, traits = config.lr_warmup_steps, SCHEDULERS[name].traits
    if "no_warmup" in traits:
        warmup = warmup or 0
    elif warmup is None:
        warmup = 0 if "rises" in traits else 0.05
    return {
        "lr_scheduler": name,
        "lr_scheduler_kwargs": resolve_kwargs(SCHEDULERS[name], kwargs),
        "lr_warmup_steps": warmup,
    }


def check_schedule(config: ResolvedConfig) -> None:
    """Builds optimizer and schedules once, for errors of their own code; the real length may be unknown."""
    from ..optimizers.build import tried_optimizer
    from ..schedules.scheduler import build_all

    # WORLD_SIZE is the number of processes of the launcher.
    batch = config.train_batch_size * config.gradient_accumulation_steps * int(os.environ.get("WORLD_SIZE", "1"))
    schedule, peak = config.schedule_for(batch), config.peak_learning_rate(batch)
    optimizer = tried_optimizer(config.optimizer, config.optimizer_kwargs, [(2, 2), (2,)], peak, batch)
    length = config.max_train_steps or max(1000, 2 * int(config.lr_warmup_steps) + 2)
    build_all(schedule, optimizer, config.lr_warmup_steps, length)
