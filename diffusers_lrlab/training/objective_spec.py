"""What a run learns from, of its configuration."""

from ..objective.objective import ObjectiveSpec
from .config import ResolvedConfig
from .kinds.select import kind_of


def objective_spec(config: ResolvedConfig) -> ObjectiveSpec:
    return ObjectiveSpec(
        seed=config.seed,
        timestep_sampler=config.timestep_sampler,
        timestep_sampler_kwargs=config.timestep_sampler_kwargs,
        loss_weighting=config.loss_weighting,
        loss_weighting_kwargs=config.loss_weighting_kwargs,
        noise=config.noise,
        noise_kwargs=config.noise_kwargs,
        timestep_lr=config.timestep_lr_form,
        process={
            "num_train_timesteps": config.ddpm_num_steps,
            "beta_schedule": config.ddpm_beta_schedule,
            "prediction_type": config.prediction_type,
            "clip_sample": kind_of(config).is_bounded,
        },
    )
