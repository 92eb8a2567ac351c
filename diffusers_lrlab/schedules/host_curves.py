"""Schedules of diffusers and transformers, with their names and values."""

from functools import lru_cache
from typing import Any

import numpy as np

from ..core.errors import LabError, must_be
from ..core.progress import Progress, resolve_updates
from ..core.registry import Parameter
from ..core.values import Range
from ..core.words import counted
from .registries import COOLDOWNS, METRIC_MODE, NO_SHAPE, SCHEDULERS, THRESHOLD_MODES, half_cosine

DIFFUSERS = "diffusers.optimization"
TRANSFORMERS = "transformers.optimization"
_NO_WARMUP = ("warmup_type", "warmup_start_ratio")
_MULTIPLIER = Range("[0, 1]")


# --- diffusers' seven ----------------------------------------------------------------------------------------------


@SCHEDULERS.register(
    "constant",
    description="constant learning rate",
    source=f"{DIFFUSERS}.get_constant_schedule",
    without=("min_lr", "min_lr_ratio", *_NO_WARMUP),
    traits=("host", "no_warmup", "endless"),
)
def constant(progress: Progress) -> Any:
    return np.ones_like(progress.update, dtype=float)


SCHEDULERS.register(
    "constant_with_warmup",
    description="warm-up, then constant",
    source=f"{DIFFUSERS}.get_constant_schedule_with_warmup",
    without=("min_lr", "min_lr_ratio"),
    traits=("host", "endless"),
)(constant)


@SCHEDULERS.register(
    "linear",
    description="linear decay to the floor",
    source=f"{DIFFUSERS}.get_linear_schedule_with_warmup",
    parameters=(
        Parameter("f_min", float, None, "diffusers' name for `min_lr_ratio`", "[0, 1]", same_as="min_lr_ratio"),
        Parameter("f_max", float, 1.0, "the peak, relative to the optimizer's learning rate", "(0, inf)"),
    ),
    traits=("host",),
)
def linear(progress: Progress) -> Any:
    r"""\(s = 1 - p\)."""
    return 1 - progress.fraction


@SCHEDULERS.register(
    "cosine",
    description="half a cosine from the peak to the floor",
    source=f"{DIFFUSERS}.get_cosine_schedule_with_warmup",
    parameters=(Parameter("num_cycles", float, 0.5, "cosine waves over the run; 0.5 goes down once", "(0, inf)"),),
    traits=("host",),
)
def cosine(progress: Progress, num_cycles: float) -> Any:
    r"""\(s = (1 + \cos(2 \pi c p)) / 2\), \(c\) being `num_cycles`."""
    return half_cosine(2 * num_cycles * progress.fraction)


@SCHEDULERS.register(
    "cosine_with_restarts",
    description="half cosines to the floor, each followed by a jump back to the peak",
    source=f"{DIFFUSERS}.get_cosine_with_hard_restarts_schedule_with_warmup",
    parameters=(Parameter("num_cycles", int, 1, "half cosines over the run", "[1, inf)"),),
    traits=("host",),
)
def cosine_with_restarts(progress: Progress, num_cycles: int) -> Any:
    r"""\(s = (1 + \cos(\pi (c p \bmod 1))) / 2\), and 0 at the end, \(c\) being `num_cycles`."""
    fraction = progress.fraction
    return np.where(fraction >= 1, 0.0, half_cosine((num_cycles * fraction) % 1.0))


@SCHEDULERS.register(
    "polynomial",
    description="polynomial decay to the floor",
    source=f"{DIFFUSERS}.get_polynomial_decay_schedule_with_warmup",
    parameters=(
        Parameter(
            "lr_end", float, None, "diffusers' name for `min_lr`; 1e-7 if no floor is given", "[0, inf)", same_as="min_lr"
        ),
        Parameter("power", float, 1.0, "exponent; 1 is linear", "(0, inf)"),
    ),
    traits=("host",),
    facts={"min_lr": 1e-7},
)
def polynomial(progress: Progress, power: float) -> Any:
    r"""\(s = (1 - p)^k\), \(k\) being `power`."""
    return (1 - progress.fraction) ** power


@lru_cache(maxsize=64)
def read_step_rules(step_rules: str) -> tuple[np.ndarray, np.ndarray]:
    """Boundaries (in updates) and multipliers of diffusers' rules, such as `"1:500,0.1:900,0.01"`."""
    *parts, last = step_rules.split(",")
    try:
        # As in diffusers, the last of equal boundaries counts.
        pairs = sorted({int(update): float(value) for value, update in (part.split(":") for part in parts)}.items())
        values = [value for _, value in pairs] + [float(last)]
    except ValueError:
        wanted = "MULTIPLIER:UPDATE,...,MULTIPLIER"
        raise must_be("step_rules", step_rules, wanted, "such as '1:500,0.1:900,0.01'") from None
    if not all(value in _MULTIPLIER for value in values):
        raise must_be("step_rules", step_rules, f"multipliers, each {_MULTIPLIER}", "raise the learning rate instead")
    return np.array([update for update, _ in pairs]), np.array(values)


@SCHEDULERS.register(
    "piecewise_constant",
    description="multipliers, each of which holds up to a given update",
    source=f"{DIFFUSERS}.get_piecewise_constant_schedule",
    parameters=(Parameter("step_rules", str, "1.0", "'1:500,0.1:900,0.01' holds 1 to update 500, 0.1 to 900, then 0.01"),),
    without=_NO_WARMUP,
    traits=("host", "no_warmup", "endless"),
)
def piecewise_constant(progress: Progress, step_rules: str) -> Any:
    r"""\(s = m_i\) for \(b_{i-1} \le n < b_i\), the multipliers and updates of the rules."""
    boundaries, values = read_step_rules(step_rules)
    return values[np.searchsorted(boundaries, progress.now, side="right")]


# --- only in transformers ----------------------------------------------------------------------------------------


@SCHEDULERS.register(
    "inverse_sqrt",
    description="falls with the inverse square root of the update",
    source=f"{TRANSFORMERS}.get_inverse_sqrt_schedule; arXiv 2106.04560",
    parameters=(
        Parameter("timescale", int, None, "time scale in updates; derived: the warm-up, or 10,000 without one", "[1, inf)"),
    ),
)
def inverse_sqrt(progress: Progress, timescale: int | None) -> Any:
    r"""\(s = \sqrt{t / (n - w + t)}\), \(t\) being `timescale`."""
    scale = timescale or progress.warmup_updates or 10_000
    return np.sqrt(scale / (progress.after_warmup + scale))


_MIN_LR_RATE = Parameter(
    "min_lr_rate", float, None, "transformers' name for `min_lr_ratio`; 0.1 if no floor is given", "[0, 1]",
    same_as="min_lr_ratio",
)  # fmt: skip
_NUM_CYCLES = Parameter("num_cycles", float, 0.5, "cosine waves over the run", "(0, inf)")

SCHEDULERS.register(
    "cosine_with_min_lr",
    description="half a cosine from the peak to a floor",
    source=f"{TRANSFORMERS}.get_cosine_with_min_lr_schedule_with_warmup",
    parameters=(_MIN_LR_RATE, _NUM_CYCLES),
    facts={"min_lr_ratio": 0.1},
)(cosine)


@SCHEDULERS.register(
    "cosine_warmup_with_min_lr",
    description=(
        "half a cosine from the peak to a floor, one update earlier: it does not start at 0, and reaches the floor at the "
        "last update"
    ),
    source=f"{TRANSFORMERS}.get_cosine_with_min_lr_schedule_with_warmup_lr_rate",
    parameters=(
        _MIN_LR_RATE,
        Parameter(
            "warmup_lr_rate", float, None, "transformers' name for `warmup_start_ratio`; 1 / warm-up if not given",
            "[0, 1]", same_as="warmup_start_ratio",
        ),
        _NUM_CYCLES,
    ),
    traits=("early_peak",),
    facts={"min_lr_ratio": 0.1},
)  # fmt: skip
def cosine_warmup_with_min_lr(progress: Progress, num_cycles: float) -> Any:
    r"""\(s = (1 + \cos(2 \pi c p)) / 2\) with \(p = (n - w + 1) / (N - w)\).

    transformers counts from 1 here, so that the peak is at update \(w - 1\). These are its values.
    """
    passed = np.where(progress.update < progress.warmup_updates, 0, progress.after_warmup + 1)
    return half_cosine(2 * num_cycles * np.minimum(passed / progress.span, 1.0))


_DECAY = Parameter(
    "num_decay_steps", float, None, "updates of the cool-down, or a fraction of the run; derived: what num_stable_steps "
    "leaves, or a fifth of the run", "(0, inf)",
)  # fmt: skip


@SCHEDULERS.register(
    "warmup_stable_decay",
    description="warm-up, then constant, then a cool-down to the floor",
    source=f"{TRANSFORMERS}.get_wsd_schedule; arXiv 2404.06395, cool-downs arXiv 2405.18392",
    parameters=(
        _DECAY,
        Parameter(
            "num_stable_steps",
            float,
            None,
            "updates at the peak, or a fraction; derived: the updates that are left",
            "[0, inf)",
        ),
        Parameter("decay_type", str, "cosine", "shape of the cool-down", choices=tuple(COOLDOWNS)),
        Parameter("num_cycles", float, 0.5, "waves of the cosine cool-down", "(0, inf)", only_with=("decay_type", "cosine")),
    ),
    traits=("warmup_from_floor",),
    aliases=("wsd",),
)
def warmup_stable_decay(
    progress: Progress, num_decay_steps: float | None, num_stable_steps: float | None, decay_type: str, num_cycles: float
) -> Any:
    r"""\(s = 1\), then over a cool-down of which the share \(q\) is over: `linear` \(1 - q\), `cosine`
    \((1 + \cos(\pi q)) / 2\), `exponential` \((0.01^q - 0.01) / 0.99\), `1-sqrt` \(1 - \sqrt{q}\), `square`
    \(1 - q^2\), or `mirror_cosine` \(2 (1 - q) - (1 + \cos(\pi q)) / 2\).
    """
    stable, decay = _stable_and_decay(progress, num_decay_steps, num_stable_steps)
    fraction = np.clip((progress.after_warmup - stable) / max(decay, 1), 0.0, 1.0)
    if decay_type == "cosine" and num_cycles != 0.5:
        # As in transformers, the floor holds once the cool-down is over, however many waves there are.
        return np.where(fraction >= 1, 0.0, half_cosine(2 * num_cycles * fraction))
    return COOLDOWNS[decay_type](fraction)


def _stable_and_decay(progress: Progress, decay: float | None, stable: float | None) -> tuple[int, int]:
    total, span = progress.total_updates, progress.span
    num_stable = None if stable is None else resolve_updates(stable, total, "num_stable_steps")
    if decay is not None:
        num_decay = max(1, resolve_updates(decay, total, "num_decay_steps"))
    else:
        num_decay = min(span, max(1, round(0.2 * total))) if num_stable is None else span - num_stable
    num_stable = span - num_decay if num_stable is None else num_stable
    if num_stable < 0 or num_decay < 0 or num_stable + num_decay > span:
        raise LabError(
            f"warmup_stable_decay has {counted(progress.warmup_updates, 'update')} of warm-up, {num_stable} at the peak "
            f"and {num_decay} of cool-down: that is not {total}, the updates of the run. Lower num_decay_steps or "
            "num_stable_steps, or give num_decay_steps as a fraction such as 0.2."
        )
    return num_stable, num_decay


@SCHEDULERS.register(
    "trapezoid",
    description="warm-up, then constant, then a linear cool-down to the floor",
    source="arXiv 2405.18392",
    parameters=(_DECAY,),
)
def trapezoid(progress: Progress, num_decay_steps: float | None) -> Any:
    return warmup_stable_decay(progress, num_decay_steps, None, "linear", 0.5)


SCHEDULERS.register(
    "greedy",
    description="divided by `factor` while the validation loss keeps improving, multiplied by it when it does not",
    source=f"{TRANSFORMERS}.GreedyLR; arXiv 2512.14527",
    parameters=(
        METRIC_MODE,
        Parameter("factor", float, 0.95, "factor of a step down; a step up divides by it", "(0, 1)"),
        Parameter("patience", int, 10, "consecutive validations of one kind before a step", "[0, inf)"),
        Parameter("threshold", float, 1e-6, "smallest change that counts as improvement", "[0, inf)"),
        Parameter("threshold_mode", str, "abs", "whether `threshold` is relative", choices=THRESHOLD_MODES),
        Parameter("cooldown", int, 0, "validations ignored after a step down", "[0, inf)"),
        Parameter("warmup", int, 0, "validations ignored after a step up", "[0, inf)"),
        Parameter(
            "min_lr", float, None, "floor; derived: transformers' 1e-3, or a hundredth of the peak if that is lower",
            "[0, inf)",
        ),
        Parameter("max_lr", float, 1.0, "ceiling of the learning rate", "(0, inf)"),
        Parameter("eps", float, 1e-8, "smaller changes of the learning rate are ignored", "[0, inf)"),
        Parameter("smooth", bool, False, "judge the mean of the last `window_size` values instead of the last one"),
        Parameter("window_size", int, 50, "values in that mean", "[1, inf)"),
        Parameter("reset_start", int, 500, "steps down at the floor before it restarts at the peak", "[1, inf)"),
    ),
    without=NO_SHAPE,
    traits=("feedback",),
)("diffusers_lrlab.schedules.feedback:greedy")  # fmt: skip
