"""What can be wrong about a configuration besides single options: the source of the data, combinations, the launch."""

import importlib.util
import os
from pathlib import Path

from ..core.errors import LabError
from ..data.options import EMBEDDED_DATASETS
from ..data.sources import local_folder
from .config import ResolvedConfig, TrainingConfig
from .kinds.select import components
from .trackers import tracker_packages


def check_source(config: TrainingConfig) -> None:
    """What can be known of the data without opening them: whether there is one source, and whether it is there."""
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


def _check_folder(folder: str) -> None:
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise LabError(f"The data folder {folder!r} does not exist. Give the path of a folder that holds images.")
    if next(path.iterdir(), None) is None:
        raise LabError(f"The data folder {folder!r} is empty. It should hold images, also in subfolders, or parquet.")


def check_combinations(config: ResolvedConfig) -> None:
    """Raises a `LabError` for options that exclude each other, and for packages that are missing."""
    if config.num_epochs is not None and config.max_train_steps is not None:
        raise LabError(
            f"--num_epochs {config.num_epochs} and --max_train_steps {config.max_train_steps} both set the length of "
            "the run; give one of them."
        )
    if config.ddpm_num_inference_steps > config.ddpm_num_steps:
        raise LabError(
            f"--ddpm_num_inference_steps {config.ddpm_num_inference_steps} is more than --ddpm_num_steps "
            f"{config.ddpm_num_steps}; use at most as many."
        )
    if config.denoiser is not None and config.model_config_name_or_path is not None:
        raise LabError(
            f"--denoiser {config.denoiser} and --model_config_name_or_path {config.model_config_name_or_path!r} both choose "
            "the model. Give one of them; a denoiser takes its parameters as NAME:key=value."
        )
    if Path(config.logging_dir).name != config.logging_dir or config.logging_dir.startswith(
        ("lrlab", "checkpoint", *components())
    ):
        raise LabError(
            f"--logging_dir {config.logging_dir!r} must be a name for a folder of its own inside --output_dir, such as logs."
        )
    packages = dict.fromkeys(tracker_packages(config.logger), "leave --logger out")
    if config.enable_xformers_memory_efficient_attention:
        packages["xformers"] = "leave the flag out: torch's own attention is as good"
    for package, remedy in packages.items():
        if importlib.util.find_spec(package) is None:
            raise LabError(f"The package {package!r} is asked for but not installed: pip install {package}, or {remedy}.")
    if config.local_rank >= 0 and "LOCAL_RANK" not in os.environ:
        raise LabError(
            f"--local_rank {config.local_rank} without a launcher has no effect. Start several processes with "
            "`accelerate launch --num_processes N -m diffusers_lrlab.train ...`."
        )


def _check_streaming(config: TrainingConfig) -> None:
    name = config.dataset_name or ("digits" if config.train_data_dir is None else None)
    if name in EMBEDDED_DATASETS:
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


def check_precision(config: ResolvedConfig) -> None:
    """float16 has no use on a CPU: say so instead of training slowly and badly."""
    precision = config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision == "fp16" and config.skip_bad_updates is not None:
        raise LabError(
            f"--skip_bad_updates {config.skip_bad_updates} has no place beside fp16, which repeats updates that "
            "overflow with a smaller scale of the loss. Leave it out, or use --mixed_precision bf16."
        )
    if precision == "fp16":
        import torch

        if not torch.accelerator.is_available():
            raise LabError("fp16 needs a GPU, and there is none here. Use --mixed_precision bf16 or no.")
