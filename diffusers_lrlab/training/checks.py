"""Everything about a configuration that can be wrong before data is read or a model is built."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from ..core.errors import LabError, did_you_mean
from ..data.toy2d_entries import TOY_DATASETS
from ..optimizers.entries import OPTIMIZERS
from .config import EMBEDDED_DEFAULTS, GENERAL_DEFAULTS, POINT_DEFAULTS, POINT_UPDATES, TrainingConfig
from .resolve import resolve_lr_schedule, resolve_momentum, resolve_optimizer
from .resolve_timesteps import resolve_timesteps

_AT_LEAST_ONE = (
    "resolution", "train_batch_size", "gradient_accumulation_steps", "num_epochs", "max_train_steps", "ddpm_num_steps",
    "ddpm_num_inference_steps", "logging_steps", "validation_steps", "save_images_epochs", "save_model_epochs",
    "eval_batch_size", "checkpointing_steps", "stream_shuffle_buffer", "timestep_grad_every",
    "ema_update_every", "base_batch_size", "hub_push_every",
)  # fmt: skip
_AT_LEAST_ZERO = (
    "num_validation_images", "dataloader_num_workers", "checkpoints_total_limit", "in_memory_limit_mb", "cpu_threads",
    "frechet_samples", "distance_samples", "max_grad_norm", "adam_weight_decay", "lr_warmup_steps", "ema_power",
    "ema_start_update",
)  # fmt: skip


# Options that would be ignored unless something else is asked for: (options, what they need, whether it is there).
_NEEDS: tuple[tuple[tuple[str, ...], str, Callable[[TrainingConfig], bool]], ...] = (
    (
        ("hub_token", "hub_model_id", "hub_private_repo", "hub_push_every"),
        "--push_to_hub",
        lambda config: config.push_to_hub,
    ),
    (
        ("ema_inv_gamma", "ema_power", "ema_max_decay", "ema_update_every", "ema_start_update"),
        "--use_ema",
        lambda config: config.use_ema,
    ),
    (("base_batch_size",), "--scale_lr linear, sqrt or guide", lambda config: config.scale_lr != "none"),
    (("logging_dir",), "--logger tensorboard or wandb", lambda config: config.logger != "none"),
    (("stream_shuffle_buffer",), "--streaming", lambda config: config.streaming),
    (("in_memory_limit_mb", "dataloader_num_workers"), "no --streaming", lambda config: not config.streaming),
    (("validation_steps",), "--num_validation_images above 0", lambda config: config.num_validation_images > 0),
    (("timestep_grad_every",), "--log_timestep_bins above 0", lambda config: config.log_timestep_bins > 0),
    (
        ("timestep_grad_every",),
        "--num_validation_images above 0",
        lambda config: config.num_validation_images > 0,
    ),
    (
        ("image_column", "dataset_config_name", "dataset_split"),
        "data that are not embedded",
        lambda config: config.dataset_name not in EMBEDDED_DEFAULTS,
    ),
    (
        (
            *("resolution", "image_channels", "center_crop", "random_flip", "preserve_input_precision"),
            *("skip_corrupt_images", "image_column", "enable_xformers_memory_efficient_attention"),
            "gradient_checkpointing",
        ),
        "a data set of images",
        lambda config: config.point_column is None,
    ),
    (
        ("in_memory_limit_mb", "dataloader_num_workers"),
        "data that are read, and toy sets are made",
        lambda config: config.dataset_name not in TOY_DATASETS,
    ),
    (("sanity",), "a run, and --dry_run makes none", lambda config: not config.dry_run),
    (("distance_samples",), "a data set of points", lambda config: config.point_column is not None),
)


def resolve_config(config: TrainingConfig) -> TrainingConfig:
    """
    Fills in the fields left at `None` and checks everything that can be checked without data, model or network.

    Returns:
        [`TrainingConfig`]: a new one, with the schedule's name and parameters apart and all its defaults spelt out.

    Raises:
        LabError: for the first thing that cannot be done as asked.
    """
    config = dataclasses.replace(config)
    check_source(config)
    resolve_optimizer(config)
    _resolve_data(config)
    _check_numbers(config)
    resolve_lr_schedule(config)
    resolve_momentum(config)
    resolve_timesteps(config)
    _check_combinations(config)
    resumed = Path(config.resume_from_checkpoint or "latest")
    if config.output_dir is None and (resumed / "trainer.json").is_file():
        config.output_dir = str(resumed.parent)
    if config.output_dir is None:
        name = Path(config.dataset_name or config.train_data_dir or "").resolve().name
        config.output_dir = f"ddpm-{name}" + (f"-{config.resolution}" if config.point_column is None else "")
    return config


def _check_types(config: TrainingConfig) -> None:
    """What the command line's parser makes sure of, for configurations made in Python."""
    for name, hint in get_type_hints(TrainingConfig).items():
        value = getattr(config, name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        plain = tuple(get_origin(kind) or kind for kind in kinds if get_origin(kind) is not Literal)
        if value is None or (choices and value in choices):
            continue
        if choices:
            raise LabError(f"{name}={value!r} is not allowed; choose from {', '.join(map(repr, choices))}.")
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not (isinstance(value, plain) or (float in plain and is_number)) or (int in plain and isinstance(value, bool)):
            raise LabError(f"{name}={value!r} is not allowed; give {' or '.join(kind.__name__ for kind in plain)}.")


def check_source(config: TrainingConfig) -> None:
    """What can be known of the data without opening them: whether there is one source, and whether it is there."""
    _check_types(config)
    if config.dataset_name is not None and config.train_data_dir is not None:
        raise LabError(
            f"Both --dataset_name {config.dataset_name!r} and --train_data_dir {config.train_data_dir!r} are given; "
            "give one of them."
        )
    folder = config.train_data_dir or local_folder(config.dataset_name or "digits")
    if folder is not None:
        _check_folder(folder)
    if config.streaming:
        _check_streaming(config)


def _resolve_data(config: TrainingConfig) -> None:
    if config.train_data_dir is None and config.dataset_name is None:
        config.dataset_name = "digits"
    asked_for_frechet = config.frechet_samples is not None
    if config.dataset_name in TOY_DATASETS:
        if config.point_column not in (None, "x"):
            raise LabError(f"--point_column {config.point_column!r}: the points of {config.dataset_name!r} are in 'x'.")
        config.point_column = "x"
    defaults = GENERAL_DEFAULTS | EMBEDDED_DEFAULTS.get(config.dataset_name or "", {})
    if config.point_column is not None:
        defaults |= POINT_DEFAULTS
    if config.auto_learning_rate and config.learning_rate is not None:
        raise LabError(
            f"--learning_rate {config.learning_rate:g} and --auto_learning_rate exclude each other. Give a number, or auto."
        )
    scale = OPTIMIZERS[config.optimizer].facts
    if config.auto_learning_rate and config.scale_lr != "none":
        raise LabError(
            f"--learning_rate auto finds the rate of the batch that is trained with: --scale_lr {config.scale_lr} has no "
            "place beside it. Leave one of them out."
        )
    if config.auto_learning_rate and "learning_rate" in scale:
        raise LabError(f"{config.optimizer!r} finds its learning rate by itself. Leave --learning_rate out.")
    if config.scale_lr != "none" and "learning_rate" in scale:
        raise LabError(f"{config.optimizer!r} finds its learning rate by itself: leave --scale_lr {config.scale_lr} out.")
    defaults["learning_rate"] = scale.get("learning_rate", defaults["learning_rate"] * scale.get("learning_rate_factor", 1))
    for name, value in defaults.items():
        if getattr(config, name) is None:
            setattr(config, name, value)
    if config.num_validation_images < 2 and not asked_for_frechet:
        config.frechet_samples = 0
    if config.frechet_samples == 1 or (config.frechet_samples and config.num_validation_images < 2):
        raise LabError(
            f"--frechet_samples {config.frechet_samples} against {config.num_validation_images} held-out images: both "
            "sets need 2 at least. Raise --num_validation_images, or leave --frechet_samples out."
        )
    if config.frechet_samples and config.dataset_name != "digits":
        instead = "" if config.point_column is None else "; points have --distance_samples"
        raise LabError(
            f"--frechet_samples {config.frechet_samples} needs features that suit the data; they exist for digits only"
            f"{instead}. Leave it out for {config.dataset_name or config.train_data_dir!r}."
        )


def local_folder(dataset_name: str) -> str | None:
    """`dataset_name` if it means a folder on this machine rather than an embedded set or a Hub id."""
    if dataset_name in EMBEDDED_DEFAULTS:
        return None
    if Path(dataset_name).expanduser().exists() or dataset_name.startswith((".", "/", "~")):
        return dataset_name
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", dataset_name):
        raise LabError(
            f"--dataset_name {dataset_name!r} is neither an embedded set ({', '.join(EMBEDDED_DEFAULTS)}), nor a folder "
            "that exists, nor a Hub id (USER/NAME)."
        )
    if "/" not in dataset_name and (hint := did_you_mean(dataset_name, EMBEDDED_DEFAULTS)):
        raise LabError(f"Unknown data set {dataset_name!r}.{hint} A Hub dataset is written USER/NAME.")
    return None


def _check_folder(folder: str) -> None:
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise LabError(f"The data folder {folder!r} does not exist. Give the path of a folder that holds images.")
    if next(path.iterdir(), None) is None:
        raise LabError(f"The data folder {folder!r} is empty. It should hold images, also in subfolders, or parquet.")


def _check_numbers(config: TrainingConfig) -> None:
    for names, lowest in ((_AT_LEAST_ONE, 1), (_AT_LEAST_ZERO, 0)):
        for name in names:
            value = getattr(config, name)
            if value is not None and not lowest <= value < math.inf:
                raise LabError(f"--{name} {value} is not allowed; use {lowest} or more.")
    for name in ("learning_rate", "adam_epsilon", "ema_inv_gamma"):
        if not 0 < getattr(config, name) < math.inf:
            raise LabError(f"--{name} {getattr(config, name)} is not allowed; it must be a number above 0, such as 1e-4.")
    for name in ("adam_beta1", "adam_beta2", "ema_max_decay"):
        if not 0 <= getattr(config, name) < 1:
            raise LabError(f"--{name} {getattr(config, name)} is outside [0, 1).")


def _check_combinations(config: TrainingConfig) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for names, need, is_there in _NEEDS:
        for name in names:
            if getattr(config, name) != defaults[name] and not is_there(config):
                raise LabError(f"--{name} has no effect here; it needs {need}. Add that or leave --{name} out.")
    if config.num_epochs is not None and config.max_train_steps is not None:
        raise LabError(
            f"--num_epochs {config.num_epochs} and --max_train_steps {config.max_train_steps} both set the length of "
            "the run; give one of them."
        )
    if config.num_epochs is None and config.max_train_steps is None:
        if config.point_column is None:
            config.num_epochs = 100
        else:
            config.max_train_steps = POINT_UPDATES
    if config.ddpm_num_inference_steps is None:
        config.ddpm_num_inference_steps = min(100, config.ddpm_num_steps)
    if config.ddpm_num_inference_steps > config.ddpm_num_steps:
        raise LabError(
            f"--ddpm_num_inference_steps {config.ddpm_num_inference_steps} is more than --ddpm_num_steps "
            f"{config.ddpm_num_steps}; use at most as many."
        )
    if Path(config.logging_dir).name != config.logging_dir or config.logging_dir.startswith(
        ("lrlab", "unet", "denoiser", "checkpoint")
    ):
        raise LabError(
            f"--logging_dir {config.logging_dir!r} must be a name for a folder of its own inside --output_dir, such as logs."
        )
    for package, wanted, remedy in (
        ("tensorboard", config.logger == "tensorboard", "pip install tensorboard, or leave --logger out"),
        ("wandb", config.logger == "wandb", "pip install wandb, or leave --logger out"),
        (
            "xformers",
            config.enable_xformers_memory_efficient_attention,
            "pip install xformers, or leave the flag out: torch's own attention is as good",
        ),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            raise LabError(f"The package {package!r} is asked for but not installed: {remedy}.")
    if config.local_rank >= 0 and "LOCAL_RANK" not in os.environ:
        raise LabError(
            f"--local_rank {config.local_rank} without a launcher has no effect. Start several processes with "
            "`accelerate launch --num_processes N training_scripts/train_ddpm.py ...`."
        )


def _check_streaming(config: TrainingConfig) -> None:
    name = config.dataset_name or ("digits" if config.train_data_dir is None else None)
    if name in EMBEDDED_DEFAULTS:
        raise LabError(f"{name!r} is embedded and needs no --streaming. Leave the flag out.")
    if config.max_train_steps is None:
        raise LabError("A stream has no known length: give --max_train_steps instead of --num_epochs.")
    for name in ("save_images_epochs", "save_model_epochs"):
        if getattr(config, name) is not None:
            raise LabError(f"--{name} counts epochs, which a stream does not have. Leave it out.")


def check_launch() -> None:
    """`accelerate launch --cpu --num_processes N` starts one process whatever N is: say so instead of obeying half."""
    launched = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    if launched and "MASTER_ADDR" in os.environ and not {"WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"} & {*os.environ}:
        raise LabError(
            "accelerate launch was asked for several processes on the CPU, but it starts only one of them. Write "
            "`accelerate launch --multi_gpu --num_processes N ...` (it works on CPUs too) or "
            "`torchrun --nproc_per_node N ...`. If MASTER_ADDR is set in your environment for another reason, unset it."
        )


def check_precision(config: TrainingConfig) -> None:
    """float16 has no use on a CPU: say so instead of training slowly and badly."""
    precision = config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision == "fp16":
        import torch

        if not torch.accelerator.is_available():
            raise LabError("fp16 needs a GPU, and there is none here. Use --mixed_precision bf16 or no.")
