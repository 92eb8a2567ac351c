"""Options of what is learned and how: model, objective, timesteps, schedules, optimizer and averages."""

from dataclasses import dataclass
from typing import Any, Literal

from ..core.options import (
    BIN_LOG,
    DRAWS,
    EVALUATION,
    OBJECTIVE,
    SPEED,
    UPDATE,
    WHOLE_RUN,
    Need,
    Role,
    option,
)
from ..data.options import LABELS, SIZED
from ..objective.process import DEFAULT_OBJECTIVE, NUM_STEPS, BetaSchedule, PredictionType

NO_START = Need(
    "--pretrained_model_name_or_path", lambda config: config.pretrained_model_name_or_path is None, is_absence=True
)
NO_DENOISER = Need("--denoiser", lambda config: config.denoiser is None, is_absence=True)
HELD_OUT = Need("--num_validation_images above 0", lambda config: config.num_validation_images > 0)
DROPOUT = Need("--label_dropout above 0", lambda config: config.label_dropout > 0)
BINS = Need("--log_timestep_bins above 0", lambda config: config.log_timestep_bins > 0)

EMA = Need("--use_ema", lambda config: config.use_ema)
NO_EMA_SPEC = Need("--ema", lambda config: config.ema is None, is_absence=True)
EMA_PARAMETER = (EMA, NO_EMA_SPEC)
EMA_OPTIONS = ("inv_gamma", "power", "max_decay")  # --ema_*, parameters of warmup_power

# Options of diffusers' script that are parameters of an objective, by its name.
OBJECTIVE_OPTIONS = {
    "ddpm": {"num_steps": "ddpm_num_steps", "beta_schedule": "ddpm_beta_schedule", "prediction_type": "prediction_type"}
}


def named_parameter(objective: str, parameter: str) -> str:
    """The name of an objective's parameter in errors: its own option, if it has one."""
    options = OBJECTIVE_OPTIONS.get(objective, {})
    return f"--{options[parameter]}" if parameter in options else f"{parameter} of --objective"


Kwargs = dict[str, Any] | str | None


def parameters_of(name: str, role: Role, more: str = "") -> Any:
    """The option with the parameters of another one."""
    return option(None, f"Parameters of --{name}, as JSON{more}.", role)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Parameters that control the model and the diffusion process."""

    _argument_group_name = "model and diffusion process"

    denoiser: str | None = option(
        None,
        "Registered model, as a name or spec string (default: a UNet2DModel or MLPDenoiser that fits the data). Names: "
        "{names}.",
        UPDATE,
        registry="models.registry:DENOISERS",
    )
    denoiser_kwargs: Kwargs = parameters_of("denoiser", UPDATE)
    model_config_name_or_path: str | None = option(
        None,
        "Folder or Hub id of the configuration of a UNet2DModel, or of an MLPDenoiser for points (default: one that fits "
        "the data).",
        UPDATE,
        finder="uses",
        may_change_on_resume=True,
        is_path=True,
        needs=(NO_DENOISER, NO_START),
    )
    pretrained_model_name_or_path: str | None = option(
        None,
        "Folder or Hub id of a pipeline or a model whose configuration and weights the model starts from (default: random "
        "weights). USER/NAME@REVISION names a branch, tag or commit; --denoiser names a class other than the default one.",
        UPDATE,
        is_path=True,
    )
    objective: str = option(
        DEFAULT_OBJECTIVE,
        "Training objective (noise process and prediction), as a name or spec string. Names: {names}.",
        OBJECTIVE,
        registry="objective.process:OBJECTIVES",
        is_first=True,
    )
    objective_kwargs: Kwargs = parameters_of("objective", OBJECTIVE, "; `lrlab list objectives` shows them")
    prediction_type: PredictionType | None = option(
        None,
        "What the model predicts: the noise (epsilon), the image (sample; its loss is weighted by the SNR, as upstream) or "
        "the velocity. A parameter of --objective ddpm (default: epsilon).",
        OBJECTIVE,
    )
    ddpm_num_steps: int | None = option(
        None,
        "Timesteps of the diffusion process: num_steps of --objective ddpm (default: 1000; 100 for points).",
        OBJECTIVE,
        range=NUM_STEPS,
    )
    ddpm_beta_schedule: BetaSchedule | None = option(
        None, "Noise schedule: beta_schedule of --objective ddpm (default: linear).", OBJECTIVE
    )
    num_inference_steps: int | None = option(
        None,
        "Denoising steps for samples during and after training (default: 100; upstream 1000, at ten times the cost).",
        WHOLE_RUN,
        aliases=("--ddpm_num_inference_steps", "--ddpm-num-inference-steps"),
        range=NUM_STEPS,
    )
    guidance_scale: float = option(
        1.0,
        "Classifier-free guidance of samples during and after training: 1 for none, above 1 for samples that are more "
        "typical of their class, at twice the cost. The saved pipeline has it as its default.",
        EVALUATION,
        range="[0, 1000]",
        needs=(LABELS, DROPOUT),
        kinds=SIZED,
    )
    gradient_checkpointing: bool = option(
        False,
        "Recompute activations in the backward pass instead of storing them: less memory, more time.",
        SPEED,
        decides_result=True,
        kinds=SIZED,
    )
    enable_xformers_memory_efficient_attention: bool = option(
        False,
        "Use the attention of xformers, which must be installed, instead of torch's.",
        UPDATE,
        finder="uses",
        kinds=SIZED,
    )


@dataclass(frozen=True, kw_only=True)
class TimestepConfig:
    """Parameters that control which timesteps are trained when, how strongly, and with which noise."""

    _argument_group_name = "timesteps, loss and noise"

    timestep_sampler: str = option(
        "uniform",
        "Distribution of the training timesteps, as a name or spec string. Names: {names}.",
        DRAWS,
        registry="timesteps.registries:TIMESTEP_SAMPLERS",
    )
    timestep_sampler_kwargs: Kwargs = parameters_of(
        "timestep_sampler", DRAWS, ", such as '{\"sigma\": 0.5}'; `lrlab list timesteps` shows them"
    )
    loss_weighting: str = option(
        "none",
        "Weight of the loss by noise level, as a name or spec string. Names: {names}.",
        DRAWS,
        registry="timesteps.registries:LOSS_WEIGHTINGS",
    )
    loss_weighting_kwargs: Kwargs = parameters_of("loss_weighting", DRAWS)
    timestep_lr: str | None = option(
        None,
        "Learning rate per band of timesteps: weight:factors=[1|2] multiplies the losses of each band; "
        "banded:factors=[1|2] draws an update from one band and applies that band's rate (default: one rate for all).",
        DRAWS,
        registry="timesteps.bands:TIMESTEP_LRS",
    )
    timestep_lr_kwargs: Kwargs = parameters_of("timestep_lr", DRAWS)
    noise: str = option(
        "gaussian", "Training noise, as a name or spec string. Names: {names}.", DRAWS, registry="objective.noise:NOISES"
    )
    noise_kwargs: Kwargs = parameters_of("noise", DRAWS)
    log_timestep_bins: int | None = option(
        None,
        "Equal bins of timesteps whose losses are logged in lrlab/timesteps.parquet; 0 for no log (default: 10).",
        BIN_LOG,
        range="[0, 1e5]",
    )
    timestep_grad_every: int | None = option(
        None,
        "Updates between measurements of gradient norm and noise scale in each bin, on 32 held-out images; one takes as "
        "long as 5 to 20 updates (default: off).",
        BIN_LOG,
        range="[1, 1e9]",
        needs=(BINS, HELD_OUT),
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Parameters that control the learning rate and the momentum."""

    _argument_group_name = "learning rate and momentum"

    learning_rate: float | str | None = option(
        None,
        "Peak learning rate, or auto: found by a test of about 600 updates before the run (default with AdamW: 1e-4; 1e-3 "
        "for embedded image sets, 3e-4 for points).",
        WHOLE_RUN,
        range="(0, 1e30]",
        is_first=True,
    )
    scale_lr: Literal["none", "linear", "sqrt"] = option(
        "none",
        "Rule by which the learning rate, meant for 64 images per update, grows with the images of an update over all "
        "micro-batches and processes; `lrlab plan` shows the rates.",
        WHOLE_RUN,
        finder="refuses",
    )
    width_base: int | None = option(
        None,
        "Width of the model that --learning_rate was found with; muP then fits rates and initial weights to the width of "
        "this model, and `lrlab plan` shows how (default: one rate for all parameters). For MLPDenoiser and "
        "DiTTransformer2DModel.",
        UPDATE,
        range="[1, 1e6]",
        needs=(NO_START,),
    )
    lr_scheduler: str = option(
        "cosine",
        "Learning-rate schedule: a name, or a spec string NAME:key=value,key=value. Names: {names}.",
        WHOLE_RUN,
        registry="schedules.registries:SCHEDULERS",
        is_first=True,
    )
    lr_scheduler_kwargs: Kwargs = parameters_of("lr_scheduler", WHOLE_RUN, ", such as '{\"step_size\": 500}'")
    lr_warmup_steps: float | None = option(
        None,
        "Warm-up in optimizer updates, or below 1 as a fraction of the run (default: 0.05, upstream 500 updates; 0 for "
        "schedules that have no warm-up or rise by themselves).",
        WHOLE_RUN,
        range="[0, 1e9]",
    )
    momentum_scheduler: str | None = option(
        None,
        "Schedule of the momentum (beta1), as a name or spec string (default: constant momentum). Names: {names}.",
        WHOLE_RUN,
        registry="schedules.registries:MOMENTUM_SCHEDULERS",
    )
    momentum_scheduler_kwargs: Kwargs = parameters_of("momentum_scheduler", WHOLE_RUN)
    strict_lr_audit: bool = option(
        False, "Stop at the first update whose learning rate or momentum is not the expected one; else report it.", WHOLE_RUN
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Parameters that control the optimizer, gradient clipping and EMA."""

    _argument_group_name = "optimizer, clipping and EMA"

    optimizer: str = option(
        "adamw", "Optimizer, as a name or spec string. Names: {names}.", UPDATE, registry="optimizers.entries:OPTIMIZERS"
    )
    optimizer_kwargs: Kwargs = parameters_of(
        "optimizer", UPDATE, ", such as '{\"momentum\": 0.95}'; `lrlab list optimizers` shows them"
    )
    adam_beta1: float = option(0.95, "beta1 of adamw, adam and adamw_8bit.", UPDATE, range="[0, 1)")
    adam_beta2: float = option(0.999, "beta2 of Adam and its relatives.", UPDATE, range="[0, 1)")
    adam_weight_decay: float = option(1e-6, "Weight decay of Adam and its relatives.", UPDATE, range="[0, 1e6]")
    adam_epsilon: float = option(1e-8, "Epsilon of Adam and its relatives.", UPDATE, range="(0, 1]")
    max_grad_norm: float = option(1.0, "Norm to which gradients are clipped; 0 for no clipping.", UPDATE, range="[0, 1e9]")
    skip_bad_updates: int | None = option(
        None,
        "Skip updates with non-finite gradients, at most this many in a row: weights, optimizer and EMA stay unchanged, "
        "while clock and data advance. Synchronizes the device at every update (default: off).",
        WHOLE_RUN,
        study="no",
        range="[1, 1e9]",
    )
    use_ema: bool = option(
        True,
        "Average the weights (exponential moving average) for samples and the saved model: raw weights sample worse. "
        "Off upstream.",
        WHOLE_RUN,
    )
    ema: str | None = option(
        None,
        "Decay of the EMA, as a name or spec string, instead of the --ema_* options (default: warmup_power with those "
        "options). Names: {names}.",
        WHOLE_RUN,
        registry="averaging.forms:EMA_FORMS",
        needs=(EMA,),
    )
    ema_inv_gamma: float = option(
        1.0, "Inverse gamma of the EMA's warm-up.", WHOLE_RUN, range="(0, 1e9]", needs=EMA_PARAMETER
    )
    ema_power: float = option(3 / 4, "Power of the EMA's warm-up.", WHOLE_RUN, range="[0, 1e9]", needs=EMA_PARAMETER)
    ema_max_decay: float = option(0.9999, "Largest decay of the EMA.", WHOLE_RUN, range="[0, 1)", needs=EMA_PARAMETER)
