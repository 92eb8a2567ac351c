"""The configuration of a run, as data: the command line, YAML files and `run.json` are all made from these fields."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from ..data.toy2d_entries import TOY_DATASETS
from ..schedules.schedule import Schedule
from ..timesteps.bands import TimestepLR


def _option(default: Any, help: str, repr: bool = True) -> Any:
    return field(default=default, metadata={"help": help}, repr=repr)


@dataclass(kw_only=True)
class DataConfig:
    """Parameters that control the data."""

    _argument_group_name = "data"

    dataset_name: str | None = _option(
        None,
        "The embedded set 'digits' (8x8 handwritten digits, the default), a set of points in the plane ({toy_datasets}), a "
        "local folder or a Hub id.",
    )
    dataset_config_name: str | None = _option(None, "Configuration of the Hub dataset.")
    dataset_split: str = _option("train", "Split to train on.")
    train_data_dir: str | None = _option(
        None, "Folder of images (png, jpg, ..., also in subfolders); excludes --dataset_name."
    )
    cache_dir: str | None = _option(None, "Where datasets and models that are downloaded are kept.")
    streaming: bool = _option(False, "Read the dataset as a stream, without downloading it whole; needs --max_train_steps.")
    image_column: str | None = _option(None, "Column that holds the images; found by its type if there is only one.")
    point_column: str | None = _option(
        None,
        "Column that holds points, as lists of as many numbers in every row; found by its type if there is only one, and "
        "none of images.",
    )
    resolution: int = _option(
        None, "Images are resized to this many pixels on the shorter side and cropped; 64, or 8 for digits."
    )
    image_channels: Literal[1, 3] = _option(None, "1 for grey, 3 for colour; 3, or 1 for digits.")
    center_crop: bool = _option(False, "Crop at the centre instead of a random place.")
    random_flip: bool = _option(False, "Flip half of the images horizontally.")
    preserve_input_precision: bool = _option(
        True,
        "Keep 16- and 32-bit images at their precision (upstream rounds to 8 bits unless asked; "
        "here that is --no_preserve_input_precision).",
    )
    skip_corrupt_images: bool = _option(
        False, "Leave out images that cannot be decoded, count and list them, instead of stopping at the first."
    )
    num_validation_images: int = _option(
        None,
        "Images held out for the validation loss, at most a fifth of the set; 256, or 10,000 points. 0 turns validation "
        "off.",
    )
    in_memory_limit_mb: int = _option(
        1024, "Sets that fit into this many MiB once decoded are kept in memory, per process; larger ones are read."
    )
    stream_shuffle_buffer: int = _option(1000, "Images in the shuffle buffer of a stream.")
    dataloader_num_workers: int = _option(
        0, "Worker processes that decode images which are not in memory; 0 decodes in the main process."
    )


@dataclass(kw_only=True)
class ModelConfig:
    """Parameters that control the model and the diffusion process."""

    _argument_group_name = "model and diffusion process"

    model_config_name_or_path: str | None = _option(
        None,
        "Folder or Hub id with the configuration of a UNet2DModel, or of an MLPDenoiser for points; without it one that "
        "fits the data.",
    )
    prediction_type: Literal["epsilon", "sample", "v_prediction"] = _option(
        "epsilon",
        "What the model predicts: the noise, the image (its loss weighted by the SNR, as upstream) or the velocity.",
    )
    ddpm_num_steps: int = _option(None, "Timesteps of the diffusion process; 1000, or 100 for points.")
    ddpm_num_inference_steps: int = _option(
        None, "Denoising steps for samples during and after training; 100 (upstream 1000, at ten times the cost)."
    )
    ddpm_beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid", "laplace"] = _option(
        None, "Noise schedule; linear."
    )
    gradient_checkpointing: bool = _option(
        False, "Compute activations again in the backward pass instead of keeping them: less memory, more time."
    )
    enable_xformers_memory_efficient_attention: bool = _option(
        False, "Attention by xformers, which must be installed; torch's own is used otherwise."
    )


@dataclass(kw_only=True)
class ScheduleConfig:
    """Parameters that control the learning rate and the momentum."""

    _argument_group_name = "learning rate and momentum"

    learning_rate: float = _option(
        None,
        "Peak learning rate; 1e-4, 1e-3 for digits and its small model, 3e-4 for points, with AdamW; other optimizers have "
        "others. auto lets the finder choose, by a test of about 600 updates before the run.",
    )
    auto_learning_rate: bool = _option(False, "The same as --learning_rate auto.")
    scale_lr: Literal["none", "linear", "sqrt", "guide"] = _option(
        "none",
        "How the learning rate grows with the images of an update, over all micro-batches and processes; `lrlab scale` "
        "shows the rules.",
    )
    base_batch_size: int = _option(64, "Images of an update that --learning_rate is meant for, with --scale_lr.")
    lr_scheduler: str = _option(
        "cosine",
        "Name of the schedule, or a spec string NAME:key=value,key=value, or hub:USER/NAME for one that somebody published. "
        "Names: {lr_schedulers}.",
    )
    lr_scheduler_source: str | None = _option(
        None, "Set by hub:USER/NAME: the commit and the hash of the schedule that was taken; not for use by hand."
    )
    lr_scheduler_kwargs: dict[str, Any] | str | None = _option(
        None, """Its parameters as JSON, such as '{"step_size": 500}'."""
    )
    lr_warmup_steps: float = _option(
        None,
        "Warm-up, in optimizer updates or as a fraction of the run below 1; 0.05, which suits runs of any length "
        "(upstream 500 updates), and 0 for schedules without warm-up or with a rise of their own.",
    )
    lr_num_cycles: float | None = _option(None, "num_cycles of the schedules that take it.")
    lr_power: float | None = _option(None, "power of the schedules that take it.")
    momentum_scheduler: str | None = _option(
        None, "Name or spec string of a schedule for the momentum (beta1). Names: {momentum_schedulers}."
    )
    momentum_scheduler_kwargs: dict[str, Any] | str | None = _option(None, "Its parameters as JSON.")
    strict_lr_audit: bool = _option(
        False, "Stop at the first update whose learning rate or momentum is not the promised one, instead of reporting it."
    )


@dataclass(kw_only=True)
class TimestepConfig:
    """Parameters that control which timesteps are trained when, how strongly, and with which noise."""

    _argument_group_name = "timesteps, loss and noise"

    timestep_sampler: str = _option(
        "uniform", "Name or spec string of the density that timesteps are drawn from. Names: {timestep_samplers}."
    )
    timestep_sampler_kwargs: dict[str, Any] | str | None = _option(
        None, """Its parameters as JSON, such as '{"sigma": 0.5}'; `lrlab list timesteps` shows them."""
    )
    loss_weighting: str = _option(
        "none", "Name or spec string of the weights of the losses by noise level. Names: {loss_weightings}."
    )
    loss_weighting_kwargs: dict[str, Any] | str | None = _option(None, "Its parameters as JSON.")
    timestep_lr: str | None = _option(
        None,
        "A learning rate per timestep: weight:factors=[1|2] weighs the losses of bands of timesteps, banded:factors=[1|2] "
        "takes all timesteps of an update from one band and does it at that band's rate.",
    )
    timestep_lr_kwargs: dict[str, Any] | str | None = _option(None, "Its parameters as JSON.")
    noise: str = _option("gaussian", "Name or spec string of the noise in training. Names: {noises}.")
    noise_kwargs: dict[str, Any] | str | None = _option(None, "Its parameters as JSON.")
    log_timestep_bins: int = _option(
        None, "Equal parts of the timesteps whose losses are logged apart, in lrlab/timesteps.parquet; 10, and 0 for none."
    )
    timestep_grad_every: int | None = _option(
        None,
        "Updates between measurements of gradient norm and gradient noise scale in each of these parts, on 32 held-out "
        "images for each; takes as long as 5 to 20 updates, and is off if not given.",
    )


@dataclass(kw_only=True)
class OptimizerConfig:
    """Parameters that control the optimizer, gradient clipping and EMA."""

    _argument_group_name = "optimizer, clipping and EMA"

    optimizer: str = _option("adamw", "Name of the optimizer, or a spec string. Names: {optimizers}.")
    optimizer_kwargs: dict[str, Any] | str | None = _option(
        None, """Its parameters as JSON, such as '{"momentum": 0.95}'; `lrlab list optimizers` shows them."""
    )
    adam_beta1: float = _option(0.95, "beta1 of adamw, adam and adamw_8bit.")
    adam_beta2: float = _option(0.999, "beta2 of the same.")
    adam_weight_decay: float = _option(1e-6, "Weight decay of the same.")
    adam_epsilon: float = _option(1e-8, "Epsilon of the same.")
    max_grad_norm: float = _option(1.0, "Gradients are clipped to this norm; 0 turns clipping off.")
    use_ema: bool = _option(
        True,
        "Keep an exponential moving average of the weights, for samples and the saved model: raw weights sample worse "
        "(off upstream; here --no_use_ema turns it off).",
    )
    ema_inv_gamma: float = _option(1.0, "Inverse gamma of the EMA's warm-up.")
    ema_power: float = _option(3 / 4, "Power of the EMA's warm-up.")
    ema_max_decay: float = _option(0.9999, "Largest decay of the EMA.")
    ema_update_every: int = _option(1, "Optimizer updates from one update of the EMA to the next.")
    ema_start_update: int = _option(0, "Optimizer updates during which the EMA is a copy of the weights.")


@dataclass(kw_only=True)
class LoopConfig:
    """Parameters that control the length, speed and randomness of the run."""

    _argument_group_name = "length, speed and randomness"

    num_epochs: int | None = _option(
        None, "Passes over the data; 100 unless --max_train_steps is given, and 10,000 updates for points."
    )
    max_train_steps: int | None = _option(None, "Optimizer updates of the run; excludes --num_epochs.")
    train_batch_size: int = _option(None, "Images per process and micro-batch; 16, 64 for digits, 256 points.")
    gradient_accumulation_steps: int = _option(1, "Micro-batches per optimizer update.")
    mixed_precision: Literal["no", "fp16", "bf16"] | None = _option(
        None, "Precision of the forward pass; accelerate's setting if not given."
    )
    seed: int = _option(0, "Seed of the initial weights, data order, timesteps and noise.")
    cpu_threads: int = _option(
        0,
        "Threads per process, without a GPU; 0 shares the cores among the processes (accelerate launch leaves one thread).",
    )
    local_rank: int = _option(-1, "Set by launchers; not for use by hand.")


@dataclass(kw_only=True)
class OutputConfig:
    """Parameters that control what is written, when, and where it goes."""

    _argument_group_name = "output"

    output_dir: str = _option(
        None, "Folder of the run; ddpm-DATASET-RESOLUTION, so that runs on other data do not meet (upstream ddpm-model-64)."
    )
    overwrite_output_dir: bool = _option(
        False, "Replace the run that output_dir holds; other files there stay. Resuming goes first."
    )
    logging_steps: int = _option(10, "Updates between rows of lrlab/metrics.jsonl.")
    validation_steps: int | None = _option(None, "Updates between validations; 20 over the run.")
    save_images_epochs: int | None = _option(
        None,
        "Epochs between sample images; 4 times over a run of any length, and at its end (upstream every 10 epochs).",
    )
    save_model_epochs: int | None = _option(
        None,
        "Epochs between saves of the pipeline; only at the end, as checkpoints guard the rest (upstream every 10 epochs).",
    )
    eval_batch_size: int = _option(None, "Number of sample images; 16, 40 for digits, 2000 points.")
    frechet_samples: int = _option(
        None, "Samples for the Frechet distance at the end of the run, on digits only; 1000 there, 0 turns it off."
    )
    distance_samples: int | None = _option(
        None,
        "Samples for the distances at the end of a run on points; as many as points are held out, 0 turns them off.",
    )
    checkpointing_steps: int = _option(500, "Updates between checkpoints to resume from.")
    checkpoints_total_limit: int | None = _option(
        3,
        "Checkpoints that are kept, oldest removed first; more would only fill the disk (upstream keeps all; here 0 does).",
    )
    resume_from_checkpoint: str | None = _option(None, "'latest', or the folder of a checkpoint.")
    logger: Literal["none", "tensorboard", "wandb"] = _option(
        "none", "Tracker, besides lrlab/metrics.jsonl and the plots, which are always written (upstream tensorboard)."
    )
    logging_dir: str = _option("logs", "Folder of the tensorboard log, inside output_dir.")
    push_to_hub: bool = _option(False, "Upload the result to the Hub when the pipeline is saved.")
    hub_token: str | None = _option(None, "Token for the Hub; the one of `hf auth login` if not given.", repr=False)
    hub_model_id: str | None = _option(None, "Repository on the Hub; the name of output_dir in your namespace.")
    hub_private_repo: bool = _option(False, "Make the repository private if it is new.")
    hub_push_every: int | None = _option(
        None,
        "Updates between uploads of the pipeline during training, which goes on meanwhile; at the end only if not given.",
    )
    hub_license: str | None = _option(None, "License of the model, for its card, such as apache-2.0; none if not given.")
    preflight: bool = _option(True, "Check data, settings and model before training, and say what looks like a mistake.")
    sanity: bool = _option(
        False, "Before training, learn a single batch by heart, in 150 updates, and stop if the loss does not fall to half."
    )
    dry_run: bool = _option(False, "Print the plan of the run, with the memory, time and disk that it will take, and stop.")


@dataclass(kw_only=True)
class TrainingConfig(DataConfig, ModelConfig, ScheduleConfig, TimestepConfig, OptimizerConfig, LoopConfig, OutputConfig):
    """
    The whole configuration of a run. Fields left at `None` are filled in by [`resolve_config`] as their help says; those
    whose type does not name `None` have a value from then on.

    Every field is a flag of `training_scripts/train_ddpm.py`, whose `--help` documents them. `learning_rate="auto"` is
    `auto_learning_rate=True`.
    """

    def __post_init__(self) -> None:
        if isinstance(self.learning_rate, str) and self.learning_rate == "auto":
            self.learning_rate, self.auto_learning_rate = None, True  # filled in when resolved

    @property
    def schedule(self) -> Schedule:
        """Learning rate and momentum as functions of the clock, once resolved."""
        assert isinstance(self.lr_scheduler_kwargs, dict)
        momentum_kwargs = self.momentum_scheduler_kwargs
        return Schedule(
            self.lr_scheduler,
            self.lr_scheduler_kwargs,
            self.momentum_scheduler,
            momentum_kwargs if isinstance(momentum_kwargs, dict) else {},
        )

    @property
    def timestep_lr_form(self) -> TimestepLR | None:
        """The learning rate per timestep, once resolved; `None` if there is none."""
        if self.timestep_lr is None:
            return None
        assert isinstance(self.timestep_lr_kwargs, dict)
        return TimestepLR(self.timestep_lr, **self.timestep_lr_kwargs)

    @property
    def optimizer_arguments(self) -> dict[str, Any]:
        """The optimizer's parameters, once resolved."""
        assert isinstance(self.optimizer_kwargs, dict)
        return self.optimizer_kwargs

    @property
    def start_momentum(self) -> float | None:
        """The momentum that the optimizer is made with, `None` if it has none."""
        return self.optimizer_arguments.get("momentum", self.optimizer_arguments.get("beta1"))

    def to_dict(self) -> dict[str, Any]:
        """The fields as data, without the token."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "hub_token"}


CONFIG_GROUPS: tuple[Any, ...] = (
    DataConfig,
    ModelConfig,
    ScheduleConfig,
    TimestepConfig,
    OptimizerConfig,
    LoopConfig,
    OutputConfig,
)

# Defaults that depend on the data: the embedded sets are small, and so are their models.
GENERAL_DEFAULTS = {
    "resolution": 64,
    "image_channels": 3,
    "num_validation_images": 256,
    "train_batch_size": 16,
    "learning_rate": 1e-4,
    "ddpm_num_steps": 1000,
    "ddpm_beta_schedule": "linear",
    "frechet_samples": 0,
    "eval_batch_size": 16,
}
EMBEDDED_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {
        "resolution": 8,
        "image_channels": 1,
        "train_batch_size": 64,
        "learning_rate": 1e-3,
        "frechet_samples": 1000,
        "eval_batch_size": 40,
    },
    **{name: {} for name in TOY_DATASETS},
}
POINT_DEFAULTS = {
    "resolution": None,
    "image_channels": None,
    "num_validation_images": 10_000,
    "train_batch_size": 256,
    "learning_rate": 3e-4,
    "ddpm_num_steps": 100,
    "eval_batch_size": 2000,
}
POINT_UPDATES = 10_000
