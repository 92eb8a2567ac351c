"""Resolves the requested objective to a name with all its parameters."""

from typing import Any

from ..core.errors import LabError
from ..core.spec import merge_spec
from ..objective.process import OBJECTIVES
from .choices import given_kwargs
from .config import TrainingConfig
from .kinds import kind_of
from .learning_options import OBJECTIVE_OPTIONS


def resolve_objective(config: TrainingConfig) -> dict[str, Any]:
    """The objective's name and parameters, some of which have their own options."""
    name, given = merge_spec(config.objective, given_kwargs(config, "objective"), OBJECTIVES)
    filled: dict[str, None] = {}
    for objective, options in OBJECTIVE_OPTIONS.items():
        for parameter, option in options.items():
            filled[option] = None
            if (value := getattr(config, option)) is None:
                continue
            if objective != name:
                raise LabError(
                    f"--{option} {value} has no effect on --objective {name}, only on {objective}. Give parameters of "
                    f"{name} as --objective {name}:key=value."
                )
            if given.setdefault(parameter, value) != value:
                raise LabError(
                    f"{parameter!r} of --objective {name} is given twice: --{option} {value} and {parameter}="
                    f"{given[parameter]}. Leave one out."
                )
    return {**filled, "objective": name, "objective_kwargs": resolved_parameters(config, name, given)}


def resolved_parameters(config: TrainingConfig, objective: str, given: dict[str, Any]) -> dict[str, Any]:
    """All parameters of an objective, with defaults of the kind of data."""
    resolved = OBJECTIVES[objective].resolve(given)
    if resolved["num_steps"] is None:
        resolved["num_steps"] = kind_of(config).num_train_timesteps
    base_resolution = resolved.pop("base_resolution", None)
    if base_resolution is not None:
        resolved["shift"] = _shift_by_resolution(config, base_resolution, given.get("shift"))
    return resolved


def _shift_by_resolution(config: TrainingConfig, base_resolution: int, shift: float | None) -> float:
    """The root of the ratio of pixels (arXiv 2403.03206, section 5.3.2): one number, with which the pipeline samples too."""
    if shift is not None:
        raise LabError(
            f"shift={shift:g} and base_resolution={base_resolution} of --objective {config.objective}: exclude each "
            "other. Hint: base_resolution sets the shift to --resolution / base_resolution."
        )
    if config.resolution is None:
        raise LabError(
            f"base_resolution={base_resolution} of --objective {config.objective}: must be left out for data without a "
            "resolution, such as points. Hint: give shift."
        )
    return config.resolution / base_resolution
