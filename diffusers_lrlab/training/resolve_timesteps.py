"""What was chosen by name for timesteps, loss and noise, from what a user writes to names with all their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.errors import LabError
from ..core.registry import Registry
from ..core.spec import format_spec
from ..objective.noise import NOISES
from ..schedules.resolve import merge_spec
from ..timesteps.bands import band_edges
from ..timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_LRS, TIMESTEP_SAMPLERS
from .config import TrainingConfig
from .resolve import given_kwargs

if TYPE_CHECKING:
    from .plan import Plan

_CHOICES: dict[str, Registry] = {
    "timestep_sampler": TIMESTEP_SAMPLERS,
    "loss_weighting": LOSS_WEIGHTINGS,
    "timestep_lr": TIMESTEP_LRS,
    "noise": NOISES,
}


def resolve_timesteps(config: TrainingConfig) -> None:
    """Splits names and parameters of samplers, weightings and noise, and checks what goes with what."""
    for option, registry in _CHOICES.items():
        spec, flag = getattr(config, option), f"--{option}_kwargs"
        given = given_kwargs(getattr(config, f"{option}_kwargs"), flag)
        if spec is None:
            if given:
                raise LabError(f"{flag} {given} without --{option}. Give its name too.")
            resolved: dict[str, Any] = {}
        else:
            spec, given = merge_spec(spec, given, registry)
            resolved = registry[spec].resolve(given)
        setattr(config, option, spec)
        setattr(config, f"{option}_kwargs", resolved)
    if config.point_column is not None and "spatial" in NOISES[config.noise].traits:
        plain = [name for name, entry in NOISES.items() if "spatial" not in entry.traits]
        raise LabError(
            f"--noise {config.noise} is about neighbouring pixels, and points have none. Use {' or '.join(plain)}."
        )
    _check_timestep_lr(config)
    _resolve_bins(config)


def _check_timestep_lr(config: TrainingConfig) -> None:
    lr = config.timestep_lr_form
    if lr is None:
        return
    band_edges(len(lr.factors), lr.edges, config.ddpm_num_steps)
    if len(lr.factors) == 1:
        raise LabError(f"--timestep_lr {lr.form} with one factor is the same for all timesteps. Use --learning_rate.")
    assert isinstance(config.timestep_sampler_kwargs, dict)
    if lr.form == "banded" and config.timestep_sampler_kwargs["unbiased"]:
        raise LabError("--timestep_lr banded takes bands in turn; unbiased=true of --timestep_sampler has no say. Drop it.")
    even = [name for name, entry in TIMESTEP_SAMPLERS.items() if "uniform" in entry.traits]
    if lr.form == "banded" and config.timestep_sampler not in even:
        raise LabError(
            f"--timestep_lr banded decides which timesteps an update has, and so does --timestep_sampler "
            f"{config.timestep_sampler}, with a density of its own. Use one of {', '.join(even)}, or --timestep_lr weight."
        )


def _resolve_bins(config: TrainingConfig) -> None:
    if config.log_timestep_bins is None:
        config.log_timestep_bins = min(10, config.ddpm_num_steps)
    if not 0 <= config.log_timestep_bins <= config.ddpm_num_steps:
        raise LabError(
            f"--log_timestep_bins {config.log_timestep_bins} is not allowed: there are {config.ddpm_num_steps} timesteps "
            f"(--ddpm_num_steps). Use 1 to {config.ddpm_num_steps}, or 0 for none."
        )


def describe_choices(config: TrainingConfig) -> list[tuple[str, str]]:
    """What was chosen, as spec strings with what is not at its default: (option, spec), without what was not asked for."""
    described = []
    for option, registry in _CHOICES.items():
        name, kwargs = getattr(config, option), getattr(config, f"{option}_kwargs")
        if name is not None:
            defaults = registry[name].resolve({})
            given = {key: value for key, value in kwargs.items() if value != defaults[key]}
            described.append((option, format_spec(name, given)))
    return described


def check_timesteps(config: TrainingConfig) -> None:
    """Builds sampler and weighting once, for what only the densities themselves can refuse."""
    from ..objective.objective import make_noise_scheduler, make_sampler, make_weighting

    noise_scheduler = make_noise_scheduler(config)
    make_sampler(config, noise_scheduler, config.max_train_steps or 1000)
    make_weighting(config, noise_scheduler)


def timestep_warnings(config: TrainingConfig, plan: Plan) -> list[str]:
    """What can be done as asked, and is likely not what is wanted."""
    from ..timesteps.sampling import contradiction
    from .diagnostics.gradients import NUM_PROBES

    sampler, weighting = config.timestep_sampler, config.loss_weighting
    warnings = [contradiction(sampler, config.prediction_type)]
    if "middle" in TIMESTEP_SAMPLERS[sampler].traits & LOSS_WEIGHTINGS[weighting].traits:
        warnings.append(
            f"{sampler!r} draws more of the middle of the noise levels and {weighting!r} weighs it more: both at once leave "
            "little of the rest. Use one of them."
        )
    kwargs = config.timestep_sampler_kwargs
    assert isinstance(kwargs, dict)
    needed, seen = kwargs.get("history", 0) * config.ddpm_num_steps, plan.num_updates * plan.layout.global_batch
    if seen < needed:
        warnings.append(
            f"{sampler!r} stays uniform until all {config.ddpm_num_steps} timesteps were drawn {kwargs['history']} times. "
            f"That takes more than {needed} images, and this run sees {seen}. Lower history, or train for longer."
        )
    if plan.layout.global_batch == 1 and (kwargs["draw"] != "independent" or config.noise == "immiscible"):
        chosen = config.noise if config.noise == "immiscible" else kwargs["draw"]
        warnings.append(f"{chosen!r} relates the images of an update to each other, and there is one. Use a larger batch.")
    if config.timestep_grad_every and config.timestep_grad_every > plan.num_updates:
        warnings.append(f"--timestep_grad_every {config.timestep_grad_every} never comes in {plan.num_updates} updates.")
    if config.timestep_grad_every and plan.num_held_out < NUM_PROBES:
        warnings.append(
            f"Gradients are measured at {NUM_PROBES} images, and {plan.num_held_out} are held out: there will be norms, "
            "but no noise scales. Raise --num_validation_images."
        )
    return [warning for warning in warnings if warning]
