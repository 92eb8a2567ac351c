"""The options that say what is learned and how: model, schedules, timesteps, loss, noise, optimizer."""

from dataclasses import dataclass
from typing import Any, Literal

from ..core.options import (
    BIN_LOG,
    DESTINATION,
    DRAWS,
    OBJECTIVE,
    SPEED,
    THIS_START,
    UPDATE,
    WHOLE_RUN,
    Need,
    option,
)
from ..data.options import IMAGES
from ..objective.process import NUM_STEPS, BetaSchedule, PredictionType

EMA = Need("--use_ema", lambda config: config.use_ema)
EMA_OPTIONS = ("inv_gamma", "power", "max_decay", "start_update", "update_every")  # --ema_*, parameters of its usual form
SCALING = Need("--scale_lr linear, sqrt or guide", lambda config: config.scale_lr != "none")
HELD_OUT = Need("--num_validation_images above 0", lambda config: config.num_validation_images > 0)
BINS = Need("--log_timestep_bins above 0", lambda config: config.log_timestep_bins > 0)

# Options that are parameters of one objective, by its name: those of diffusers' script.
OBJECTIVE_OPTIONS = {
    "ddpm": {
        "num_steps": "ddpm_num_steps",
        "beta_schedule": "ddpm_beta_schedule",
        "prediction_type": "prediction_type",
    }
}


def named_parameter(objective: str, parameter: str) -> str:
    """How errors call a parameter of an objective: by its own option if there is one."""
    options = OBJECTIVE_OPTIONS.get(objective, {})
    return f"--{options[parameter]}" if parameter in options else f"{parameter} of --objective"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Parameters that control the model and the diffusion process."""

    _argument_group_name = "model and diffusion process"

    denoiser: str | None = option(
        None,
        "Model by name, or as a spec string, for points or of your own by --import; without it a UNet2DModel or an "
        "MLPDenoiser that fits the data. Names: {names}.",
        UPDATE,
        registry="models.registry:DENOISERS",
    )
    denoiser_kwargs: dict[str, Any] | str | None = option(None, "Its parameters as JSON.", UPDATE)
    model_config_name_or_path: str | None = option(
        None,
        "Folder or Hub id with the configuration of a UNet2DModel, or of an MLPDenoiser for points; without it one "
        "that fits the data.",
        UPDATE,
        finder="uses",
        may_change_on_resume=True,
        is_path=True,
    )
    objective: str = option(
        "ddpm",
        "What the model learns, as a name or spec string: the noise process and the prediction. Names: {names}.",
        OBJECTIVE,
        registry="objective.process:OBJECTIVES",
    )
    objective_kwargs: dict[str, Any] | str | None = option(
        None, "Its parameters as JSON; `lrlab list objectives` shows them.", OBJECTIVE
    )
    prediction_type: PredictionType | None = option(
        None,
        "What the model predicts: the noise (epsilon, if not given), the image (its loss weighted by the SNR, as upstream) "
        "or the velocity. The parameter prediction_type of --objective ddpm.",
        OBJECTIVE,
    )
    ddpm_num_steps: int | None = option(
        None,
        "Timesteps of the diffusion process; 1000, or 100 for points. The parameter num_steps of --objective ddpm.",
        OBJECTIVE,
        range=NUM_STEPS,
    )
    ddpm_beta_schedule: BetaSchedule | None = option(
        None, "Noise schedule; linear. The parameter beta_schedule of --objective ddpm.", OBJECTIVE
    )
    num_inference_steps: int | None = option(
        None,
        "Denoising steps for samples during and after training; 100 (upstream 1000, at ten times the cost).",
        WHOLE_RUN,
        aliases=("--ddpm_num_inference_steps", "--ddpm-num-inference-steps"),
        range=NUM_STEPS,
    )
    gradient_checkpointing: bool = option(
        False,
        "Compute activations again in the backward pass instead of keeping them: less memory, more time.",
        SPEED,
        decides_result=True,
        kinds=IMAGES,
    )
    enable_xformers_memory_efficient_attention: bool = option(
        False,
        "Attention by xformers, which must be installed; torch's own is used otherwise.",
        UPDATE,
        finder="uses",
        kinds=IMAGES,
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Parameters that control the learning rate and the momentum."""

    _argument_group_name = "learning rate and momentum"

    learning_rate: float | None = option(
        None,
        "Peak learning rate; 1e-4, 1e-3 for digits and its small model, 3e-4 for points, with AdamW; other optimizers"
        " have others. auto lets the finder choose, by a test of about 600 updates before the run.",
        WHOLE_RUN,
        range="(0, 1e30]",
    )
    auto_learning_rate: bool = option(False, "The same as --learning_rate auto.", THIS_START)
    scale_lr: Literal["none", "linear", "sqrt", "guide"] = option(
        "none",
        "How the learning rate grows with the images of an update, over all micro-batches and processes; `lrlab "
        "scale` shows the rules.",
        WHOLE_RUN,
        finder="refuses",
    )
    base_batch_size: int = option(
        64,
        "Images of an update that --learning_rate is meant for, with --scale_lr.",
        WHOLE_RUN,
        range="[1, 1e9]",
        needs=(SCALING,),
    )
    lr_scheduler: str = option(
        "cosine",
        "Name of the schedule, or a spec string NAME:key=value,key=value, or hub:USER/NAME for one that somebody "
        "published. Names: {names}.",
        WHOLE_RUN,
        registry="schedules.registries:SCHEDULERS",
    )
    lr_scheduler_source: str | None = option(
        None,
        "Set by hub:USER/NAME: the commit and the hash of the schedule that was taken; not for use by hand.",
        DESTINATION,
    )
    lr_scheduler_kwargs: dict[str, Any] | str | None = option(
        None, """Its parameters as JSON, such as '{"step_size": 500}'.""", WHOLE_RUN
    )
    lr_warmup_steps: float | None = option(
        None,
        "Warm-up, in optimizer updates or as a fraction of the run below 1; 0.05, which suits runs of any length "
        "(upstream 500 updates), and 0 for schedules without warm-up or with a rise of their own.",
        WHOLE_RUN,
        range="[0, 1e9]",
    )
    lr_num_cycles: float | None = option(None, "num_cycles of the schedules that take it.", WHOLE_RUN, range="(0, 1e9]")
    lr_power: float | None = option(None, "power of the schedules that take it.", WHOLE_RUN, range="(0, 1000]")
    momentum_scheduler: str | None = option(
        None,
        "Name or spec string of a schedule for the momentum (beta1). Names: {names}.",
        WHOLE_RUN,
        registry="schedules.registries:MOMENTUM_SCHEDULERS",
    )
    momentum_scheduler_kwargs: dict[str, Any] | str | None = option(None, "Its parameters as JSON.", WHOLE_RUN)
    strict_lr_audit: bool = option(
        False,
        "Stop at the first update whose learning rate or momentum is not the expected one, instead of reporting it.",
        WHOLE_RUN,
    )
    on_divergence: str = option(
        "stop",
        "What becomes of a run whose loss or weights are no longer finite: stop, or rollback:factor=0.5,max_rollbacks=3, "
        "back to the last checkpoint (one further if that did not help) and on from there with the learning rate times "
        "factor, at most max_rollbacks times. No checkpoint is written that is not finite.",
        WHOLE_RUN,
        may_change_on_resume=True,  # until the run has gone back once
        study="no",
        registry="training.divergence_rules:ON_DIVERGENCE",
    )


@dataclass(frozen=True, kw_only=True)
class TimestepConfig:
    """Parameters that control which timesteps are trained when, how strongly, and with which noise."""

    _argument_group_name = "timesteps, loss and noise"

    timestep_sampler: str = option(
        "uniform",
        "Name or spec string of the density that timesteps are drawn from. Names: {names}.",
        DRAWS,
        registry="timesteps.registries:TIMESTEP_SAMPLERS",
    )
    timestep_sampler_kwargs: dict[str, Any] | str | None = option(
        None, """Its parameters as JSON, such as '{"sigma": 0.5}'; `lrlab list timesteps` shows them.""", DRAWS
    )
    loss_weighting: str = option(
        "none",
        "Name or spec string of the weights of the losses by noise level. Names: {names}.",
        DRAWS,
        registry="timesteps.registries:LOSS_WEIGHTINGS",
    )
    loss_weighting_kwargs: dict[str, Any] | str | None = option(None, "Its parameters as JSON.", DRAWS)
    timestep_lr: str | None = option(
        None,
        "A learning rate per timestep: weight:factors=[1|2] weighs the losses of bands of timesteps, "
        "banded:factors=[1|2] takes all timesteps of an update from one band and does it at that band's rate.",
        DRAWS,
        registry="timesteps.registries:TIMESTEP_LRS",
    )
    timestep_lr_kwargs: dict[str, Any] | str | None = option(None, "Its parameters as JSON.", DRAWS)
    noise: str = option(
        "gaussian", "Name or spec string of the noise in training. Names: {names}.", DRAWS, registry="objective.noise:NOISES"
    )
    noise_kwargs: dict[str, Any] | str | None = option(None, "Its parameters as JSON.", DRAWS)
    log_timestep_bins: int | None = option(
        None,
        "Equal parts of the timesteps whose losses are logged apart, in lrlab/timesteps.parquet; 10, and 0 for none.",
        BIN_LOG,
        range="[0, 1e5]",
    )
    timestep_grad_every: int | None = option(
        None,
        "Updates between measurements of gradient norm and gradient noise scale in each of these parts, on 32 held-"
        "out images for each; takes as long as 5 to 20 updates, and is off if not given.",
        BIN_LOG,
        range="[1, 1e9]",
        needs=(BINS, HELD_OUT),
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Parameters that control the optimizer, gradient clipping and EMA."""

    _argument_group_name = "optimizer, clipping and EMA"

    optimizer: str = option(
        "adamw", "Name of the optimizer, or a spec string. Names: {names}.", UPDATE, registry="optimizers.entries:OPTIMIZERS"
    )
    optimizer_kwargs: dict[str, Any] | str | None = option(
        None, """Its parameters as JSON, such as '{"momentum": 0.95}'; `lrlab list optimizers` shows them.""", UPDATE
    )
    adam_beta1: float = option(0.95, "beta1 of adamw, adam and adamw_8bit.", UPDATE, range="[0, 1)")
    adam_beta2: float = option(0.999, "beta2 of Adam and its relatives.", UPDATE, range="[0, 1)")
    adam_weight_decay: float = option(1e-6, "Weight decay of Adam and its relatives.", UPDATE, range="[0, 1e6]")
    adam_epsilon: float = option(1e-8, "Epsilon of Adam and its relatives.", UPDATE, range="(0, 1]")
    max_grad_norm: float = option(1.0, "Gradients are clipped to this norm; 0 turns clipping off.", UPDATE, range="[0, 1e9]")
    skip_bad_updates: int | None = option(
        None,
        "Leave out updates whose gradients are not finite, this many in a row at most: weights, optimizer and EMA stay, the "
        "clock and the data go on. Takes a reading of the device at every update; off if not given.",
        WHOLE_RUN,
        study="no",
        range="[1, 1e9]",
    )
    use_ema: bool = option(
        True,
        "Keep an exponential moving average of the weights, for samples and the saved model: raw weights sample worse"
        " (off upstream; here --no_use_ema turns it off).",
        WHOLE_RUN,
    )
    ema: str | None = option(
        None,
        "How the EMA forgets, as a name or spec string, in place of the --ema_* options: those are warmup_power's. Names: "
        "{names}.",
        WHOLE_RUN,
        registry="averaging.forms:EMA_FORMS",
        needs=(EMA,),
    )
    ema_inv_gamma: float = option(1.0, "Inverse gamma of the EMA's warm-up.", WHOLE_RUN, range="(0, 1e9]", needs=(EMA,))
    ema_power: float = option(3 / 4, "Power of the EMA's warm-up.", WHOLE_RUN, range="[0, 1e9]", needs=(EMA,))
    ema_max_decay: float = option(0.9999, "Largest decay of the EMA.", WHOLE_RUN, range="[0, 1)", needs=(EMA,))
    ema_update_every: int = option(
        1, "Optimizer updates from one update of the EMA to the next.", WHOLE_RUN, range="[1, 1e9]", needs=(EMA,)
    )
    ema_start_update: int = option(
        0, "Optimizer updates during which the EMA is a copy of the weights.", WHOLE_RUN, range="[0, 1e9]", needs=(EMA,)
    )
