"""The learning-rate schedules: every one of them is registered here, and only here.

A curve is a pure function `lr = f(progress, base_lr, **parameters)` of the clock. It describes the part after warm-up;
`lr_at` puts linear warm-up in front of it. Entries with the trait `"host"` belong to diffusers and are called there,
untouched; `"feedback"` marks the ones that also react to a metric, registered as `"module:Class"` since torch is not
imported here; `"no_warmup"` those that cannot warm up.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import LabError
from ..progress import Progress
from ..registry import Parameter, Registry
from .spec import parse_spec

SCHEDULERS = Registry("learning-rate schedule")

DIFFUSERS = "diffusers.optimization"
TORCH = "torch.optim.lr_scheduler"


def lr_at(name: str, progress: Progress, base_lr: float, kwargs: dict[str, Any]) -> Any:
    """The learning rate of a curve at a reading of the clock; an array when `progress.update` is one."""
    return progress.warmup_fraction * SCHEDULERS[name].factory(progress, base_lr, **kwargs)


def merge_spec(spec: str, kwargs: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """Name and parameters from a spec string and a dictionary; a parameter given in both is an error."""
    name, from_spec = parse_spec(spec)
    given = dict(kwargs or {})
    for key in from_spec.keys() & given.keys():
        raise LabError(f"{key!r} is given twice: in the spec string {spec!r} and as {key}={given[key]!r}. Drop one.")
    given |= from_spec
    SCHEDULERS[name].resolve(given)
    return name, given


# --- diffusers' own seven --------------------------------------------------------------------------------------------

SCHEDULERS.register(
    "constant",
    description="the learning rate as it is",
    source=f"{DIFFUSERS}.get_constant_schedule",
    traits=("host", "no_warmup"),
)("get_constant_schedule")

SCHEDULERS.register(
    "constant_with_warmup",
    description="linear warm-up, then constant",
    source=f"{DIFFUSERS}.get_constant_schedule_with_warmup",
    traits=("host",),
)("get_constant_schedule_with_warmup")

SCHEDULERS.register(
    "linear",
    description="linear decay to `f_min` of the peak",
    source=f"{DIFFUSERS}.get_linear_schedule_with_warmup",
    parameters=(
        Parameter("f_min", float, 0.0, "multiplier at the end", "[0, 1]"),
        Parameter("f_max", float, 1.0, "multiplier at the peak", "(0, inf)"),
    ),
    traits=("host",),
)("get_linear_schedule_with_warmup")

SCHEDULERS.register(
    "cosine",
    description="half a cosine from the peak to 0",
    source=f"{DIFFUSERS}.get_cosine_schedule_with_warmup",
    parameters=(Parameter("num_cycles", float, 0.5, "cosine waves over the run; 0.5 ends at 0", "(0, inf)"),),
    traits=("host",),
)("get_cosine_schedule_with_warmup")

SCHEDULERS.register(
    "cosine_with_restarts",
    description="half cosines to 0, each followed by a jump back to the peak",
    source=f"{DIFFUSERS}.get_cosine_with_hard_restarts_schedule_with_warmup",
    parameters=(Parameter("num_cycles", int, 1, "half cosines over the run", "[1, inf)"),),
    traits=("host",),
)("get_cosine_with_hard_restarts_schedule_with_warmup")

SCHEDULERS.register(
    "polynomial",
    description="polynomial decay to `lr_end`",
    source=f"{DIFFUSERS}.get_polynomial_decay_schedule_with_warmup",
    parameters=(
        Parameter("lr_end", float, 1e-7, "learning rate at the end, below the peak", "[0, inf)"),
        Parameter("power", float, 1.0, "exponent; 1 is linear", "(0, inf)"),
    ),
    traits=("host",),
)("get_polynomial_decay_schedule_with_warmup")

SCHEDULERS.register(
    "piecewise_constant",
    description="multipliers that hold up to given updates",
    source=f"{DIFFUSERS}.get_piecewise_constant_schedule",
    parameters=(Parameter("step_rules", str, "1.0", "'1:500,0.1:900,0.01' holds 1 to update 500, 0.1 to 900, then 0.01"),),
    traits=("host", "no_warmup"),
)("get_piecewise_constant_schedule")


# --- torch's schedules, as closed forms of the clock -----------------------------------------------------------------


@SCHEDULERS.register(
    "step",
    description="multiplied by `gamma` every `step_size` updates",
    source=f"{TORCH}.StepLR",
    parameters=(
        Parameter("step_size", int, None, "updates between drops; derived: a third of the run after warm-up", "[1, inf)"),
        Parameter("gamma", float, 0.1, "factor at each drop", "(0, 1]"),
    ),
)
def step(progress: Progress, base_lr: float, step_size: int | None, gamma: float) -> Any:
    r"""\(lr_n = lr_0 \gamma^{\lfloor n / s \rfloor}\), as `torch.optim.lr_scheduler.StepLR`."""
    size = step_size or max(1, math.ceil(progress.span / 3))
    return base_lr * gamma ** (progress.after_warmup // size)


@SCHEDULERS.register(
    "exponential",
    description="multiplied by `gamma` at every update",
    source=f"{TORCH}.ExponentialLR",
    parameters=(Parameter("gamma", float, None, "factor per update; derived: the run ends at 1 % of the peak", "(0, 1]"),),
)
def exponential(progress: Progress, base_lr: float, gamma: float | None) -> Any:
    r"""\(lr_n = lr_0 \gamma^n\), as `torch.optim.lr_scheduler.ExponentialLR`."""
    return base_lr * (gamma or 0.01 ** (1 / progress.span)) ** progress.after_warmup


@SCHEDULERS.register(
    "cosine_annealing",
    description="half a cosine from the peak to `eta_min` in `T_max` updates",
    source=f"{TORCH}.CosineAnnealingLR; SGDR, arXiv 1608.03983, eq. 5",
    parameters=(
        Parameter("T_max", int, None, "updates of the half wave; derived: the run after warm-up", "[1, inf)"),
        Parameter("eta_min", float, 0.0, "learning rate at the bottom", "[0, inf)"),
    ),
)
def cosine_annealing(progress: Progress, base_lr: float, T_max: int | None, eta_min: float) -> Any:
    r"""\(lr_n = \eta + (lr_0 - \eta)(1 + \cos(\pi n / T)) / 2\), as `torch.optim.lr_scheduler.CosineAnnealingLR`.

    As there, a `T_max` below the length of the run makes the rate climb again after the bottom.
    """
    return eta_min + (base_lr - eta_min) * (1 + np.cos(np.pi * progress.after_warmup / (T_max or progress.span))) / 2


# --- feedback --------------------------------------------------------------------------------------------------------

SCHEDULERS.register(
    "reduce_lr_on_plateau",
    description="multiplied by `factor` when the validation loss has stopped improving",
    source=f"{TORCH}.ReduceLROnPlateau",
    parameters=(
        Parameter("mode", str, "min", "whether the metric should fall or rise", choices=("min", "max")),
        Parameter("factor", float, 0.1, "factor at each reduction", "(0, 1)"),
        Parameter("patience", int, 10, "validations without improvement that are waited for", "[0, inf)"),
        Parameter("threshold", float, 1e-4, "smallest change that counts as improvement", "[0, inf)"),
        Parameter("threshold_mode", str, "rel", "whether `threshold` is relative", choices=("rel", "abs")),
        Parameter("cooldown", int, 0, "validations after a reduction that are not counted", "[0, inf)"),
        Parameter("min_lr", float, 0.0, "floor of the learning rate", "[0, inf)"),
        Parameter("eps", float, 1e-8, "changes of the learning rate below this are not made", "[0, inf)"),
    ),
    traits=("feedback",),
)("diffusers_lrlab.schedules.plateau:PlateauWithWarmup")
