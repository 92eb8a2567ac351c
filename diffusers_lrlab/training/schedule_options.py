"""Options of learning rate and momentum."""

from dataclasses import dataclass
from typing import Literal

from ..core.options import THIS_START, UPDATE, WHOLE_RUN, Need, option
from .learning_options import NO_START, Kwargs, parameters_of

SCALING = Need("--scale_lr linear or sqrt", lambda config: config.scale_lr != "none")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Parameters that control the learning rate and the momentum."""

    _argument_group_name = "learning rate and momentum"

    learning_rate: float | None = option(
        None,
        "Peak learning rate, or auto: found by a test of about 600 updates before the run (default with AdamW: 1e-4; 1e-3 "
        "for embedded image sets, 3e-4 for points).",
        WHOLE_RUN,
        range="(0, 1e30]",
        is_first=True,
    )
    auto_learning_rate: bool = option(False, "The same as --learning_rate auto.", THIS_START)
    scale_lr: Literal["none", "linear", "sqrt"] = option(
        "none",
        "Rule by which the learning rate grows with the images per update, over all micro-batches and processes: linear, "
        "for SGD, or sqrt, for Adam.",
        WHOLE_RUN,
        finder="refuses",
    )
    base_batch_size: int = option(
        64,
        "Images per update that --learning_rate is meant for, with --scale_lr.",
        WHOLE_RUN,
        range="[1, 1e9]",
        needs=(SCALING,),
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
    lr_num_cycles: float | None = option(None, "num_cycles, for the schedules that take it.", WHOLE_RUN, range="(0, 1e9]")
    lr_power: float | None = option(None, "power, for the schedules that take it.", WHOLE_RUN, range="(0, 1000]")
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
