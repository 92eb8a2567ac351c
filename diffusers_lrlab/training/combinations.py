"""Options that exclude each other, or that data, optimizer, launcher or machine rule out; all checked in one place.

What an option needs to have an effect is declared with the option (`Need`).
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

from ..core.errors import LabError, given, must_be
from ..core.files import expanded
from ..core.options import check_needs
from ..core.progress import resolve_warmup_updates
from ..core.registry import Entry
from ..core.values import Range
from ..data.sources import local_folder
from ..objective.noise import NOISES
from ..optimizers.entries import OPTIMIZERS
from ..timesteps.bands import band_edges
from ..timesteps.registries import TIMESTEP_SAMPLERS
from .config import ResolvedConfig, TrainingConfig
from .kinds import DataKind, components, kind_of
from .learning_options import named_parameter
from .trackers import tracker_packages


def check_source(config: TrainingConfig) -> None:
    """Raises a `LabError` unless there is one source of data, which exists, and a length if it is a stream."""
    if config.dataset_name is not None and config.train_data_dir is not None:
        both = given("--dataset_name", config.dataset_name), given("--train_data_dir", config.train_data_dir)
        raise LabError(f"{' and '.join(both)} are both given. Hint: leave one of them out.")
    if config.streaming and config.max_train_steps is None:
        raise must_be("--max_train_steps", None, "given with --streaming", "the length of a stream is not known")
    folder = config.train_data_dir or local_folder(config.dataset_name or "digits")
    if folder is None:
        return
    path = expanded(folder)
    if not path.is_dir():
        fault = "is a file" if path.exists() else "does not exist"
        raise LabError(f"The data folder {folder!r} {fault}. Give the path of a folder of images.")
    if next(path.iterdir(), None) is None:
        raise LabError(f"The data folder {folder!r} is empty. It should hold images, also in subfolders, or Parquet files.")


def check_combinations(config: ResolvedConfig) -> None:
    """Raises a `LabError` for options that have no effect or exclude each other, and for missing packages."""
    kind, optimizer = kind_of(config), OPTIMIZERS[config.optimizer]
    _check_rate(config, optimizer)
    _check_schedule(config, optimizer)
    _check_timesteps(config, kind)
    check_needs(config, TrainingConfig, kind.name)
    if config.num_inference_steps > config.num_train_timesteps:
        wanted = f"at most {config.num_train_timesteps}, the timesteps"
        hint = f"{named_parameter(config.objective, 'num_steps')} is their number"
        raise must_be("--num_inference_steps", config.num_inference_steps, wanted, hint)
    reserved = ("lrlab", "checkpoint", *components())
    if Path(config.logging_dir).name != config.logging_dir or config.logging_dir.startswith(reserved):
        wanted = "the name of a folder inside --output_dir that nothing else uses"
        raise must_be("--logging_dir", config.logging_dir, wanted, "logs is the default")
    packages = dict.fromkeys(tracker_packages(config.logger), "leave --logger out")
    if config.enable_xformers_memory_efficient_attention:
        packages["xformers"] = "leave --enable_xformers_memory_efficient_attention out: torch's attention is as good"
    for package, remedy in packages.items():
        if importlib.util.find_spec(package) is None:
            raise LabError(f"The package {package!r} is not installed: pip install {package}, or {remedy}.")


def _check_rate(config: ResolvedConfig, optimizer: Entry) -> None:
    """Two ways to find a learning rate, and a floor above it."""
    found_by = "--learning_rate auto" if config.finds_learning_rate else ""
    scaling = "" if config.scale_lr == "none" else f"--scale_lr {config.scale_lr}"
    if "learning_rate" in optimizer.facts and (other := found_by or scaling):
        raise LabError(f"{config.optimizer!r} finds its learning rate by itself. Leave {other} out.")
    if found_by and scaling:
        raise LabError(
            f"{scaling} has no effect with {found_by}, which finds the rate for the batch of this run. Hint: leave one out."
        )
    if not found_by and not scaling:  # else the peak is not known yet
        check_floor(config, config.learning_rate)


def check_floor(config: ResolvedConfig, peak: float) -> None:
    """Raises a `LabError` for a schedule whose floor is above its peak."""
    if (floor := config.lr_scheduler_kwargs.get("min_lr") or 0.0) > peak:
        rate = "--learning_rate" if config.scale_lr == "none" else "the scaled learning rate"
        raise LabError(f"min_lr={floor:g} of {config.lr_scheduler!r} is above {rate} {peak:g}. Lower it.")


def _check_schedule(config: ResolvedConfig, optimizer: Entry) -> None:
    """Warm-up, validation, momentum and averages that a schedule or an optimizer rules out."""
    # Making the schedule raises an error if two schedules set the momentum or the rate.
    name, traits, warmup = config.lr_scheduler, config.schedule.traits, config.lr_warmup_steps
    if "no_warmup" in traits and warmup:
        use = "; use --lr_scheduler constant_with_warmup" if name == "constant" else ". Leave it out"
        raise LabError(f"--lr_warmup_steps {warmup:g} has no effect on {name!r}, which has no warm-up{use}.")
    shape = {key: config.lr_scheduler_kwargs.get(key) for key in ("warmup_type", "warmup_start_ratio", "warmup_lr_rate")}
    changed = {key: value for key, value in shape.items() if value not in (None, "linear")}
    if changed and warmup == 0:
        raise LabError(f"{changed} of {name!r} has no effect without warm-up. Give --lr_warmup_steps, or leave it out.")
    resolve_warmup_updates(warmup, config.max_train_steps or 10**12)
    if "feedback" in traits and config.num_validation_images == 0:
        raise LabError(f"{name!r} follows the validation loss; it cannot run with --num_validation_images 0.")
    if "averages" in optimizer.traits:
        is_flat = name in ("constant", "constant_with_warmup") and config.momentum_scheduler is None
        wrong = ["--lr_scheduler constant_with_warmup and no --momentum_scheduler"] * (not is_flat)
        wrong += ["--no_use_ema"] * config.use_ema
        if wrong:
            raise LabError(
                f"{config.optimizer!r} averages the weights in place of a schedule and of an EMA: it goes with "
                f"{', and with '.join(wrong)}."
            )


def _check_timesteps(config: ResolvedConfig, kind: DataKind) -> None:
    """Noise that the data do not have, more bins than timesteps, and two ways to choose timesteps."""
    if not kind.has_neighbours and "spatial" in NOISES[config.noise].traits:
        plain = [name for name, entry in NOISES.items() if "spatial" not in entry.traits]
        raise must_be("--noise", config.noise, f"one of {', '.join(plain)} for {kind.name}", "others correlate pixels")
    bins, steps = Range(f"[0, {config.num_train_timesteps}]", whole=True), named_parameter(config.objective, "num_steps")
    bins.check("--log_timestep_bins", config.log_timestep_bins, f"{steps} is the number of timesteps; 0 logs none")
    if (lr := config.timestep_lr_form) is None:
        return
    band_edges(len(lr.factors), lr.edges, config.num_train_timesteps)
    if len(lr.factors) == 1:
        raise LabError(f"--timestep_lr {lr.form} with one factor is the same for all timesteps. Use --learning_rate.")
    if lr.form != "banded":
        return
    if config.timestep_sampler_kwargs["unbiased"]:
        raise LabError("unbiased=true of --timestep_sampler has no effect with --timestep_lr banded. Leave it out.")
    even = [name for name, entry in TIMESTEP_SAMPLERS.items() if "uniform" in entry.traits]
    if config.timestep_sampler not in even:
        hint = "both choose the timesteps of an update; --timestep_lr weight does not"
        raise must_be(
            "--timestep_sampler", config.timestep_sampler, f"one of {', '.join(even)} with --timestep_lr banded", hint
        )


def check_launch(config: ResolvedConfig) -> None:
    """
    Raises a `LabError` for launches that shard the model, for `accelerate launch --cpu --num_processes N`, which starts a
    single process for any N, and for a precision that the device or another option rules out.
    """
    environment: Any = os.environ
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if environment.get(f"ACCELERATE_USE_{name}", "").lower() in ("1", "true"):
            wanted = "a launch that leaves the model whole, for its average and its checkpoints"
            hint = "launch with --multi_gpu; `accelerate config` changes what is in a file"
            raise must_be("accelerate launch with", name, wanted, hint)
    launched = environment.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    if launched and "MASTER_ADDR" in environment and not {"WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"} & {*environment}:
        raise LabError(
            "accelerate launch --cpu --num_processes N starts a single process. Hint: use "
            "`accelerate launch --multi_gpu --num_processes N ...` (it works on CPUs too) or "
            "`torchrun --nproc_per_node N ...`. If MASTER_ADDR is set in your environment for another reason, unset it."
        )
    if (config.mixed_precision or environment.get("ACCELERATE_MIXED_PRECISION", "no")) != "fp16":
        return
    if config.skip_bad_updates is not None:
        raise LabError(
            f"{given('--skip_bad_updates', config.skip_bad_updates)} has no effect with fp16, whose loss scaling repeats "
            "updates that overflow. Hint: leave it out, or use --mixed_precision bf16."
        )
    import torch

    if not torch.accelerator.is_available():
        raise LabError("fp16 needs a GPU, and this machine has none. Hint: use --mixed_precision bf16 or no.")
