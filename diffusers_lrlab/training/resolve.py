"""From what is asked for to what is going to run, without data or model: [`TrainingConfig`] -> [`ResolvedConfig`]."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import LabError
from ..core.options import check_needs, check_ranges, check_types, defaults_of
from ..core.plugins import load_plugins
from ..core.spec import format_spec, resolve_spec
from ..data.sources import find_point_column
from ..data.toy2d_entries import TOY_DATASETS
from ..optimizers.entries import OPTIMIZERS, check_installed
from ..schedules.resolve import merge_spec
from .checks import check_combinations, check_source
from .choices import LEARNED_FROM, given_kwargs, registry_of, resolve_choice
from .config import ResolvedConfig, TrainingConfig
from .kinds.select import kind_of
from .resolve_schedules import resolve_lr_schedule, resolve_momentum
from .resolve_timesteps import check_timestep_options


def resolve_config(config: TrainingConfig, find_columns: bool = False) -> ResolvedConfig:
    """
    Fills in what is left open, and checks everything that can be checked without data, model or network.

    To `find_columns` is to find out the kind of data by the columns of the data set, which may be on the network.
    """
    load_plugins(config.plugins)
    check_types(config)
    check_ranges(config, TrainingConfig)  # before anything asks the network
    check_source(config)
    if find_columns and config.data_kind in (None, "points"):
        config = dataclasses.replace(config, point_column=find_point_column(config))
    for step in _STEPS:
        config = dataclasses.replace(config, **step(config))
    resolved = ResolvedConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
    kind = kind_of(resolved)
    check_timestep_options(resolved, kind)
    check_needs(resolved, TrainingConfig, kind.name)
    check_combinations(resolved)
    return resolved


# The options of diffusers' script, and the parameters that they are of the optimizers that take them.
_ADAM_OPTIONS = {"adam_beta1": "beta1", "adam_beta2": "beta2", "adam_weight_decay": "weight_decay", "adam_epsilon": "eps"}


def _resolve_optimizer(config: TrainingConfig) -> dict[str, Any]:
    """Name and parameters; Adam's kin take the options that diffusers' script has for them."""
    name, kwargs = merge_spec(config.optimizer, given_kwargs(config, "optimizer"), OPTIMIZERS)
    takes, resolved = "adam" in OPTIMIZERS[name].traits, {}
    for option, key in _ADAM_OPTIONS.items():
        value = getattr(config, option)
        asked = value != defaults_of(TrainingConfig)[option]
        if asked and not takes:
            raise LabError(
                f"--{option} {value} has no effect on {name!r}. Use --optimizer_kwargs; see `lrlab list optimizers`."
            )
        if asked and kwargs.get(key, value) != value:
            raise LabError(f"{key!r} of {name!r} is given twice: --{option} {value} and {key}={kwargs[key]!r}. Drop one.")
        if takes:
            kwargs.setdefault(key, value)
            resolved[option] = float(kwargs[key])
    check_installed(name)
    return {**resolved, "optimizer": name, "optimizer_kwargs": OPTIMIZERS[name].resolve(kwargs)}


def _resolve_data(config: TrainingConfig) -> dict[str, Any]:
    """The data set, and the defaults that depend on it and on the scale of the optimizer's rates."""
    found: dict[str, Any] = {}
    if config.train_data_dir is None and config.dataset_name is None:
        found["dataset_name"] = "digits"
    if config.dataset_name in TOY_DATASETS and config.point_column is None and config.data_kind in (None, "points"):
        found["point_column"] = "x"
    config = dataclasses.replace(config, **found)
    _check_rate(config)
    kind = kind_of(config)
    if kind.name == kind_of(dataclasses.replace(config, data_kind=None)).name:
        found["data_kind"] = None  # to name what is found anyway makes no other run
    defaults, scale = kind.defaults(config), OPTIMIZERS[config.optimizer].facts
    factor = scale.get("learning_rate_factor", 1)
    defaults = {**defaults, "learning_rate": scale.get("learning_rate", defaults["learning_rate"] * factor)}
    filled = {name: value for name, value in defaults.items() if getattr(config, name) is None}
    return found | filled | kind.check(config)


def _check_rate(config: TrainingConfig) -> None:
    """Raises a `LabError` for two ways to choose a learning rate."""
    if config.auto_learning_rate and config.learning_rate is not None:
        raise LabError(
            f"--learning_rate {config.learning_rate:g} and --auto_learning_rate exclude each other. Give a number, or auto."
        )
    if config.auto_learning_rate and config.scale_lr != "none":
        raise LabError(
            f"--learning_rate auto finds the rate of the batch that is trained with: --scale_lr {config.scale_lr} has no "
            "place beside it. Leave one of them out."
        )
    finds_its_own = "learning_rate" in OPTIMIZERS[config.optimizer].facts
    if config.auto_learning_rate and finds_its_own:
        raise LabError(f"{config.optimizer!r} finds its learning rate by itself. Leave --learning_rate out.")
    if config.scale_lr != "none" and finds_its_own:
        raise LabError(f"{config.optimizer!r} finds its learning rate by itself: leave --scale_lr {config.scale_lr} out.")


def _resolve_rest(config: TrainingConfig) -> dict[str, Any]:
    """Timesteps, loss and noise; length, steps of sampling, bins and the folder."""
    kind, steps = kind_of(config), config.ddpm_num_steps or 0
    resolved = {key: value for option in LEARNED_FROM for key, value in resolve_choice(config, option).items()}
    if config.denoiser is not None or config.denoiser_kwargs:
        resolved |= resolve_choice(config, "denoiser")
    resolved["on_divergence"] = format_spec(*resolve_spec(config.on_divergence, None, registry_of("on_divergence")))
    if config.num_epochs is None and config.max_train_steps is None:
        resolved |= kind.default_length
    if config.ddpm_num_inference_steps is None:
        resolved["ddpm_num_inference_steps"] = min(100, steps)
    if config.log_timestep_bins is None:
        resolved["log_timestep_bins"] = min(10, steps)
    if config.output_dir is None:
        resumed = Path(config.resume_from_checkpoint or "latest")
        dataset = Path(config.dataset_name or config.train_data_dir or "").resolve().name
        of_checkpoint = (resumed / "trainer.json").is_file()
        resolved["output_dir"] = str(resumed.parent) if of_checkpoint else kind.folder_name(dataset, config)
    return resolved


_STEPS: tuple[Callable[[TrainingConfig], dict[str, Any]], ...] = (
    _resolve_optimizer,
    _resolve_data,
    resolve_lr_schedule,
    resolve_momentum,
    _resolve_rest,
)
