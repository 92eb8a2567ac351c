"""The objective that the choices of timesteps, loss and noise make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..objective.process import NoiseProcess, make_process
from .config import ResolvedConfig
from .kinds import kind_of

if TYPE_CHECKING:
    from ..objective.objective import ObjectiveSpec


def check_timesteps(config: ResolvedConfig) -> None:
    """Builds sampler and weighting once, for errors of their own code."""
    spec = objective_spec(config)
    process = spec.make_process()
    spec.make_sampler(process, config.max_train_steps or 1000)
    spec.make_weighting(process)


def objective_spec(config: ResolvedConfig) -> ObjectiveSpec:
    """The objective of a run by its configuration."""
    from ..objective.objective import ObjectiveSpec  # heavy

    return ObjectiveSpec(
        seed=config.seed,
        timestep_sampler=config.timestep_sampler,
        timestep_sampler_kwargs=config.timestep_sampler_kwargs,
        loss_weighting=config.loss_weighting,
        loss_weighting_kwargs=config.loss_weighting_kwargs,
        noise=config.noise,
        noise_kwargs=config.noise_kwargs,
        timestep_lr=config.timestep_lr_form,
        objective=config.objective,
        objective_kwargs=config.objective_kwargs,
        is_bounded=kind_of(config).is_bounded,
    )


def recorded_process(fields: dict[str, Any]) -> NoiseProcess:
    """The noise process of a run by the configuration in its record."""
    return make_process(fields["objective"], is_bounded=kind_of(fields).is_bounded, **fields["objective_kwargs"])
