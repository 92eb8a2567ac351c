"""Options of learning rate and momentum."""

from dataclasses import dataclass
from typing import Literal

from ..core.options import UPDATE, WHOLE_RUN, option
from .learning_options import NO_START, Kwargs, parameters_of


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
    scale_lr: Literal["none", "linear", "sqrt", "guide"] = option(
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
