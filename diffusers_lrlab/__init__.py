"""Training dynamics of diffusion models, as an extension of diffusers.

Importing this package registers its schedules with `diffusers.optimization` and `transformers.optimization`, and its
pipelines with `diffusers.pipelines`, whether these are imported before or after. Everything else is imported on first use.
"""

import importlib
from typing import Any

from .diffusers_plugin.registration import register

__version__ = "0.1.0"

_HOMES = {
    "ImagePipeline": "pipelines.image",
    "LabError": "core.errors",
    "MLPDenoiser": "models.mlp_denoiser",
    "PointDDPMPipeline": "pipelines.point_ddpm",
    "Progress": "core.progress",
    "FinderConfig": "finder.range_test",
    "TrainingConfig": "training.config",
    "extend": "run.extend",
    "find_lr": "finder.find",
    "get_loss_weighting": "timesteps.weighting",
    "get_momentum_scheduler": "schedules.scheduler",
    "get_optimizer": "optimizers.build",
    "get_scheduler": "schedules.scheduler",
    "get_timestep_sampler": "timesteps.sampling",
    "list_loss_weightings": "timesteps.weighting",
    "list_momentum_schedulers": "schedules.scheduler",
    "list_optimizers": "optimizers.build",
    "list_schedulers": "schedules.scheduler",
    "list_timestep_samplers": "timesteps.sampling",
    "list_toy_datasets": "data.toy2d",
    "load_image_dataset": "data.image_sets",
    "load_toy_dataset": "data.toy2d",
    "lr_curve": "schedules.expected",
    "read_study": "study.reading",
    "register_denoiser": "models.registry",
    "register_loss_weighting": "timesteps.registries",
    "register_metric": "evaluation.metrics",
    "register_momentum_schedule": "schedules.registries",
    "register_noise": "objective.noise",
    "register_optimizer": "optimizers.entries",
    "register_schedule": "schedules.registries",
    "register_timestep_sampler": "timesteps.registries",
    "run_study": "study.run",
    "train": "run.train",
}
__all__ = sorted(_HOMES)

register()


def __getattr__(name: str) -> Any:
    if name.startswith("get_") and name.endswith("_schedule"):
        return getattr(importlib.import_module(".schedules.scheduler", __name__), name)
    if name == "ModelMixin":
        # diffusers looks up the base class of a library's models in the library.
        return importlib.import_module("diffusers").ModelMixin
    if name not in _HOMES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}. If it is a third-party denoiser, import its code first."
        )
    if _HOMES[name].startswith("study."):  # before its modules require the extra for training
        importlib.import_module(".core.environment", __name__).require_extra("study", f"{name}()")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
