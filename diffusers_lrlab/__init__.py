"""Training dynamics of diffusion models, as an extension of diffusers.

Importing this package registers its schedules with `diffusers.optimization`, whether that is imported before or after.
Everything else is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from .schedules.diffusers_plugin import register

__version__ = "0.1.0"

_HOMES = {
    "LabError": "errors",
    "Progress": "progress",
    "TrainingConfig": "training.config",
    "get_loss_weighting": "timesteps.loss_weights",
    "get_momentum_scheduler": "schedules.lr",
    "get_optimizer": "optimizers",
    "get_scheduler": "schedules.lr",
    "get_timestep_sampler": "timesteps.sampling",
    "list_loss_weightings": "timesteps.loss_weights",
    "list_momentum_schedulers": "schedules.lr",
    "list_optimizers": "optimizers",
    "list_schedulers": "schedules.lr",
    "list_timestep_samplers": "timesteps.sampling",
    "lr_curve": "schedules.promise",
    "train": "training.run",
}
__all__ = sorted(_HOMES)

register()


def __getattr__(name: str) -> Any:
    if name.startswith("get_") and name.endswith("_schedule"):
        return getattr(importlib.import_module(".schedules.functions", __name__), name)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
