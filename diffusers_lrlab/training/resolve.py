"""Resolves a [`TrainingConfig`] to a [`ResolvedConfig`], without data or model."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..averaging.forms import EMAForm
from ..core.errors import LabError, given, must_be
from ..core.files import expanded
from ..core.options import check_needs, check_ranges, defaults_of
from ..core.plugins import load_plugins
from ..core.spec import merge_spec
from ..core.words import counted
from ..data.latents.manifest import latents_folder
from ..data.options import EMBEDDED_DATASETS
from ..data.sources import has_points, local_folder
from ..models.registry import DENOISERS
from ..optimizers.build import check_installed
from ..optimizers.entries import OPTIMIZERS
from .choices import LEARNED_FROM, given_kwargs, resolve_choice
from .config import ResolvedConfig, TrainingConfig
from .kinds.select import components, kind_of
from .learning_options import named_parameter
from .resolve_objective import resolve_objective
from .resolve_schedules import resolve_lr_schedule, resolve_momentum
from .resolve_timesteps import check_timestep_options
from .trackers import tracker_packages


def resolve_config(config: TrainingConfig) -> ResolvedConfig:
    """
    Fills in defaults, and checks everything that can be checked without data or model. Reads the columns of a data set whose
    kind is not known otherwise, which may need the network.
    """
    load_plugins(config.plugins)
    check_ranges(config, TrainingConfig)  # before anything asks the network
    _check_source(config)
    draft: Any = SimpleNamespace(**{name: getattr(config, name) for name in defaults_of(TrainingConfig)})
    for step in _STEPS:
        vars(draft).update(step(draft))
    for name, hint in ResolvedConfig.__annotations__.items():
        if getattr(draft, name) is None and "None" not in str(hint):
            raise LabError(f"--{name} is missing, and its kind of data has no default for it. Give it.")
    resolved = ResolvedConfig(**vars(draft))
    kind = kind_of(resolved)
    check_timestep_options(resolved, kind)
    check_needs(resolved, TrainingConfig, kind.name)
    _check_combinations(resolved)
    return resolved


def _check_source(config: TrainingConfig) -> None:
    """Raises a `LabError` unless there is one source of data, which exists."""
    if config.dataset_name is not None and config.train_data_dir is not None:
        both = given("--dataset_name", config.dataset_name), given("--train_data_dir", config.train_data_dir)
        raise LabError(f"{' and '.join(both)} are both given. Hint: leave one of them out.")
    if config.streaming:
        _check_streaming(config)
    folder = config.train_data_dir or local_folder(config.dataset_name or "digits")
    if folder is not None:
        _check_folder(folder)


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


def _check_streaming(config: TrainingConfig) -> None:
    name = config.dataset_name or ("digits" if config.train_data_dir is None else None)
    if name in EMBEDDED_DATASETS:
        raise LabError(f"{name!r} is embedded and needs no --streaming. Leave it out.")
    if config.max_train_steps is None:
        given = "" if config.num_epochs is None else f", not --num_epochs {config.num_epochs}"
        raise LabError(f"The length of a stream is unknown: give --max_train_steps, the updates of the run{given}.")
    for name in ("save_images_epochs", "save_model_epochs"):
        if getattr(config, name) is not None:
            raise LabError(f"--{name} counts epochs, which a stream does not have. Leave it out.")


def _check_folder(folder: str) -> None:
    path = expanded(folder)
    if not path.is_dir():
        fault = "is a file" if path.exists() else "does not exist"
        raise LabError(f"The data folder {folder!r} {fault}. Give the path of a folder of images.")
    if next(path.iterdir(), None) is None:
        raise LabError(f"The data folder {folder!r} is empty. It should hold images, also in subfolders, or Parquet files.")


# Options of diffusers' script, and the parameters of Adam-like optimizers that they set.
ADAM_OPTIONS = {"adam_beta1": "beta1", "adam_beta2": "beta2", "adam_weight_decay": "weight_decay", "adam_epsilon": "eps"}


def _resolve_optimizer(config: TrainingConfig) -> dict[str, Any]:
    """Name and parameters; Adam-like optimizers take the options of diffusers' script."""
    name, kwargs = merge_spec(config.optimizer, given_kwargs(config, "optimizer"), OPTIMIZERS)
    takes, resolved = "adam" in OPTIMIZERS[name].traits, {}
    for option, key in ADAM_OPTIONS.items():
        value = getattr(config, option)
        asked = value != defaults_of(TrainingConfig)[option]
        if asked and not takes:
            known = {parameter.name for parameter in OPTIMIZERS[name].parameters}
            instead = f"Write --optimizer {name}:{key}={value}" if key in known else f"It takes {', '.join(sorted(known))}"
            raise LabError(f"--{option} {value} has no effect on {name!r}. {instead} (`lrlab list optimizers`).")
        if asked and kwargs.get(key, value) != value:
            raise LabError(f"{key!r} of {name!r} is given twice: --{option} {value}, {key}={kwargs[key]!r}. Leave one out.")
        if replacing := next((each for each in OPTIMIZERS[name].replacing(key) if kwargs.get(each) is not None), None):
            if asked:
                raise LabError(f"--{option} {value} has no effect beside {replacing} of {name!r}. Leave one of them out.")
        elif takes:
            kwargs.setdefault(key, value)
            resolved[option] = float(kwargs[key])
    check_installed(name)
    return {**resolved, "optimizer": name, "optimizer_kwargs": OPTIMIZERS[name].resolve(kwargs)}


def has_chosen_decay(config: ResolvedConfig) -> bool:
    """Whether the weight decay of a run differs from the default."""
    given = config.optimizer_kwargs.get("weight_decay")
    entry = OPTIMIZERS[config.optimizer]
    usual = {parameter.name: parameter.default for parameter in entry.parameters}.get("weight_decay")
    if "adam" in entry.traits:
        usual = defaults_of(TrainingConfig)["adam_weight_decay"]
    return given != usual


def _resolve_data(config: Any) -> dict[str, Any]:
    """The data set, and defaults that depend on it and on the optimizer."""
    found: dict[str, Any] = {}
    if config.train_data_dir is None and config.dataset_name is None:
        found["dataset_name"] = "digits"
    found["finds_learning_rate"] = config.learning_rate == "auto"
    if found["finds_learning_rate"]:
        _check_auto(config)
        found["learning_rate"] = None
    elif config.scale_lr != "none" and "learning_rate" in OPTIMIZERS[config.optimizer].facts:
        raise LabError(f"{config.optimizer!r} finds its learning rate by itself. Leave --scale_lr {config.scale_lr} out.")
    config = SimpleNamespace(**vars(config) | found)
    defaults, scale = kind_of(config).defaults(config), OPTIMIZERS[config.optimizer].facts
    factor = scale.get("learning_rate_factor", 1)
    defaults = {**defaults, "learning_rate": scale.get("learning_rate", defaults["learning_rate"] * factor)}
    if config.num_epochs is not None or config.max_train_steps is not None:
        defaults = {name: value for name, value in defaults.items() if name not in ("num_epochs", "max_train_steps")}
    return found | {name: value for name, value in defaults.items() if getattr(config, name) is None}


def _check_auto(config: TrainingConfig) -> None:
    """Raises a `LabError` for --learning_rate auto with another way to choose a learning rate."""
    if config.scale_lr != "none":
        raise LabError(
            f"--scale_lr {config.scale_lr} has no effect with --learning_rate auto, which finds the rate for the batch of "
            "this run. Leave one of them out."
        )
    if "learning_rate" in OPTIMIZERS[config.optimizer].facts:
        raise LabError(f"{config.optimizer!r} finds its learning rate by itself. Leave --learning_rate auto out.")


def _resolve_rest(config: TrainingConfig) -> dict[str, Any]:
    """Timesteps, loss and noise; length, sampling steps, bins and the folder."""
    steps = given_kwargs(config, "objective")["num_steps"]
    resolved = {key: value for option in LEARNED_FROM for key, value in resolve_choice(config, option).items()}
    if config.denoiser is not None or config.denoiser_kwargs:
        resolved |= resolve_choice(config, "denoiser")
    if config.pretrained_model_name_or_path is not None:
        resolved |= _resolve_start(config)
    if config.ema is not None:
        resolved["ema"] = str(EMAForm.of(config.ema))
    if config.num_inference_steps is None:
        resolved["num_inference_steps"] = min(100, steps)
    if config.log_timestep_bins is None:
        resolved["log_timestep_bins"] = min(10, steps)
    if config.output_dir is None:
        resumed = Path(config.resume_from_checkpoint or "latest")
        dataset = Path(config.dataset_name or config.train_data_dir or "").resolve().name
        of_checkpoint = (resumed / "trainer.json").is_file()
        resolution = "" if config.resolution is None else f"-{config.resolution}"
        own = f"{config.objective}-{dataset}{resolution}"
        resolved["output_dir"] = str(resumed.parent) if of_checkpoint else own
    return resolved


def _resolve_start(config: TrainingConfig) -> dict[str, Any]:
    """A model that starts from weights has their configuration."""
    if config.denoiser is not None and (
        given := merge_spec(config.denoiser, given_kwargs(config, "denoiser"), DENOISERS)[1]
    ):
        names = ", ".join(given)
        raise LabError(
            f"--denoiser {config.denoiser}: must be given without parameters beside --pretrained_model_name_or_path, got "
            f"{names}. Hint: the weights determine the configuration of the model."
        )
    return {} if config.denoiser is None else {"denoiser_kwargs": {}}


_STEPS: tuple[Callable[[Any], dict[str, Any]], ...] = (
    _find_kind,
    _resolve_optimizer,
    _resolve_data,
    resolve_objective,
    resolve_lr_schedule,
    resolve_momentum,
    _resolve_rest,
)


def _check_combinations(config: ResolvedConfig) -> None:
    """Raises a `LabError` for options that exclude each other, and for missing packages."""
    if config.num_inference_steps > config.num_train_timesteps:
        raise LabError(
            f"--num_inference_steps {config.num_inference_steps} is more than the "
            f"{counted(config.num_train_timesteps, 'timestep')} ({named_parameter(config.objective, 'num_steps')}); use at "
            "most as many."
        )
    if Path(config.logging_dir).name != config.logging_dir or config.logging_dir.startswith(
        ("lrlab", "checkpoint", *components())
    ):
        wanted = "the name of a folder inside --output_dir that nothing else uses"
        raise must_be("--logging_dir", config.logging_dir, wanted, "logs is the default")
    packages = dict.fromkeys(tracker_packages(config.logger), "leave --logger out")
    if config.enable_xformers_memory_efficient_attention:
        packages["xformers"] = "leave --enable_xformers_memory_efficient_attention out: torch's attention is as good"
    for package, remedy in packages.items():
        if importlib.util.find_spec(package) is None:
            raise LabError(f"The package {package!r} is not installed: pip install {package}, or {remedy}.")
    if config.local_rank >= 0 and "LOCAL_RANK" not in os.environ:
        raise LabError(
            f"--local_rank {config.local_rank} has no effect without a launcher. Start several processes with "
            "`accelerate launch --num_processes N -m diffusers_lrlab.train ...`."
        )
