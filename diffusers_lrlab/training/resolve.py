"""Completes and checks a configuration, once: from a [`TrainingConfig`] to a [`ResolvedConfig`], without data or model."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..averaging.forms import EMAForm
from ..core.errors import LabError, must_be
from ..core.options import check_ranges, defaults_of
from ..core.plugins import load_plugins
from ..data.latents import latents_folder
from ..data.sources import has_points
from ..optimizers.entries import OPTIMIZERS
from .choices import (
    LEARNED_FROM,
    given_kwargs,
    resolve_choice,
    resolve_lr_schedule,
    resolve_objective,
    resolve_optimizer,
)
from .combinations import check_combinations, check_source, check_start
from .config import ResolvedConfig, TrainingConfig
from .kinds import kind_of


def resolve_config(config: TrainingConfig) -> ResolvedConfig:
    """
    Fills in defaults, and checks everything that can be checked without data or model. Reads the columns of a data set whose
    kind is not known otherwise, which may need the network.
    """
    load_plugins(config.plugins)
    check_ranges(config, TrainingConfig)  # before anything asks the network
    check_source(config)
    check_start(config)
    draft: Any = SimpleNamespace(**{name: getattr(config, name) for name in defaults_of(TrainingConfig)})
    for step in _STEPS:
        vars(draft).update(step(draft))
    for name, hint in ResolvedConfig.__annotations__.items():
        if getattr(draft, name) is None and "None" not in str(hint):
            raise LabError(f"--{name} is missing, and its kind of data has no default for it. Give it.")
    resolved = ResolvedConfig(**vars(draft))
    check_combinations(resolved)
    return resolved


# --- steps: the options, completed so far, to what is found next ---------------------------------------------------------


def _find_kind(config: TrainingConfig) -> dict[str, Any]:
    """The kind of data as given, or found from the data; `None` for images."""
    kind = config.data_kind
    if latents_folder(config) is not None:
        if kind in ("images", "points"):
            raise must_be("--data_kind", kind, "latents, or left out", "the data are a folder of latents")
        kind = kind or "latents"
    elif kind is None and has_points(config):
        kind = "points"
    return {"data_kind": None if kind == "images" else kind}


def _name_data(config: TrainingConfig) -> dict[str, Any]:
    is_given = config.train_data_dir is not None or config.dataset_name is not None
    finds = config.learning_rate == "auto"
    return ({} if is_given else {"dataset_name": "digits"}) | {
        "finds_learning_rate": finds,
        "learning_rate": None if finds else config.learning_rate,
    }


def _defaults_of_kind(config: TrainingConfig) -> dict[str, Any]:
    """Defaults that depend on the data and on the optimizer."""
    defaults, scale = kind_of(config).defaults(config), OPTIMIZERS[config.optimizer].facts
    rate = scale.get("learning_rate", defaults["learning_rate"] * scale.get("learning_rate_factor", 1))
    has_length = config.num_epochs is not None or config.max_train_steps is not None
    dropped = {"num_epochs", "max_train_steps"} if has_length else set()
    defaults = {name: value for name, value in {**defaults, "learning_rate": rate}.items() if name not in dropped}
    return {name: value for name, value in defaults.items() if getattr(config, name) is None}


def _resolve_names(config: TrainingConfig) -> dict[str, Any]:
    """Momentum, timesteps, loss, noise, denoiser and EMA."""
    resolved: dict[str, Any] = {}
    for option in ("momentum_scheduler", *LEARNED_FROM):
        resolved |= resolve_choice(config, option)
    if config.denoiser is not None or config.denoiser_kwargs:
        resolved |= resolve_choice(config, "denoiser")
    if config.pretrained_model_name_or_path is not None and config.denoiser is not None:
        resolved |= {"denoiser": config.denoiser, "denoiser_kwargs": {}}  # the weights have them
    return resolved if config.ema is None else {**resolved, "ema": str(EMAForm.of(config.ema))}


def _resolve_rest(config: TrainingConfig) -> dict[str, Any]:
    """Sampling steps, bins and the folder."""
    resolved: dict[str, Any] = {}
    steps = given_kwargs(config, "objective")["num_steps"]
    for name, most in (("num_inference_steps", 100), ("log_timestep_bins", 10)):
        if getattr(config, name) is None:
            resolved[name] = min(most, steps)
    if config.output_dir is None:
        resumed = Path(config.resume_from_checkpoint or "latest")
        dataset = Path(config.dataset_name or config.train_data_dir or "").resolve().name
        resolution = "" if config.resolution is None else f"-{config.resolution}"
        of_checkpoint = (resumed / "trainer.json").is_file()
        own = f"{config.objective}-{dataset}{resolution}"
        resolved["output_dir"] = str(resumed.parent) if of_checkpoint else own
    return resolved


_STEPS: tuple[Callable[[Any], dict[str, Any]], ...] = (
    _find_kind,
    _name_data,
    resolve_optimizer,
    _defaults_of_kind,
    resolve_objective,
    resolve_lr_schedule,
    _resolve_names,
    _resolve_rest,
)
