"""Checks of the choices of timesteps, loss and noise, and the objective that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.errors import LabError
from ..core.ranges import Range
from ..objective.noise import NOISES
from ..objective.process import NoiseProcess, make_process
from ..timesteps.bands import band_edges
from ..timesteps.registries import TIMESTEP_SAMPLERS
from .config import ResolvedConfig
from .kinds import kind_of
from .kinds.base import DataKind
from .learning_options import named_parameter

if TYPE_CHECKING:
    from ..objective.objective import ObjectiveSpec


def check_timestep_options(config: ResolvedConfig, kind: DataKind) -> None:
    """Raises a `LabError` for choices that contradict each other or the data."""
    if not kind.has_neighbours and "spatial" in NOISES[config.noise].traits:
        plain = [name for name, entry in NOISES.items() if "spatial" not in entry.traits]
        raise LabError(f"--noise {config.noise} correlates pixels, which {kind.name} do not have. Use {' or '.join(plain)}.")
    _check_timestep_lr(config)
    bins, steps = Range(f"[0, {config.num_train_timesteps}]", whole=True), named_parameter(config.objective, "num_steps")
    bins.check("--log_timestep_bins", config.log_timestep_bins, f"{steps} is the number of timesteps; 0 logs none")


def _check_timestep_lr(config: ResolvedConfig) -> None:
    lr = config.timestep_lr_form
    if lr is None:
        return
    band_edges(len(lr.factors), lr.edges, config.num_train_timesteps)
    if len(lr.factors) == 1:
        raise LabError(f"--timestep_lr {lr.form} with one factor is the same for all timesteps. Use --learning_rate.")
    if lr.form == "banded" and config.timestep_sampler_kwargs["unbiased"]:
        raise LabError("unbiased=true of --timestep_sampler has no effect with --timestep_lr banded. Leave it out.")
    even = [name for name, entry in TIMESTEP_SAMPLERS.items() if "uniform" in entry.traits]
    if lr.form == "banded" and config.timestep_sampler not in even:
        raise LabError(
            f"--timestep_lr banded and --timestep_sampler {config.timestep_sampler} both choose the timesteps of an update. "
            f"Use one of {', '.join(even)}, or --timestep_lr weight."
        )


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
