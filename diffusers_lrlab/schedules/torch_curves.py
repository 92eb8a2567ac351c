"""torch's schedulers as closed-form functions of the clock, with their names and values."""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.progress import Progress, clip, resolve_updates
from ..core.registry import Parameter
from ..core.words import counted
from .registries import METRIC_MODE, NO_SHAPE, SCHEDULERS, THRESHOLD_MODES, half_cosine

TORCH = "torch.optim.lr_scheduler"
# Unlike diffusers and transformers, torch has one floor for groups of any rate: the trait "floor_of_all".
_ETA_MIN = Parameter("eta_min", float, None, "torch's name for `min_lr`", "[0, inf)", same_as="min_lr")


@SCHEDULERS.register(
    "step",
    description="multiplied by `gamma` every `step_size` updates",
    source=f"{TORCH}.StepLR",
    parameters=(
        Parameter("step_size", int, None, "updates between drops; derived: a third of the run after warm-up", "[1, inf)"),
        Parameter("gamma", float, 0.1, "factor at each drop", "(0, 1]"),
    ),
)
def step(progress: Progress, step_size: int | None, gamma: float) -> Any:
    r"""\(s = \gamma^{\lfloor n / k \rfloor}\), counted from the end of warm-up."""
    return gamma ** (progress.after_warmup // (step_size or max(1, math.ceil(progress.span / 3))))


@SCHEDULERS.register(
    "multistep",
    description="multiplied by `gamma` at each milestone",
    source=f"{TORCH}.MultiStepLR",
    parameters=(
        Parameter("milestones", list, (0.5, 0.75), "updates of the run (warm-up included), or fractions of it", "(0, inf)"),
        Parameter("gamma", float, 0.1, "factor at each milestone", "(0, 1]"),
    ),
)
def multistep(progress: Progress, milestones: list[float], gamma: float) -> Any:
    r"""\(s = \gamma^m\) after \(m\) milestones."""
    total = progress.total_updates
    # At update 1 or later, however short the run is.
    updates = sorted(max(1, resolve_updates(milestone, total, "A milestone")) for milestone in milestones)
    return gamma ** np.searchsorted(updates, progress.now, side="right")


@SCHEDULERS.register(
    "exponential",
    description="multiplied by `gamma` at every update",
    source=f"{TORCH}.ExponentialLR",
    parameters=(Parameter("gamma", float, None, "factor per update; derived: the run ends at 1 % of the peak", "(0, 1]"),),
)
def exponential(progress: Progress, gamma: float | None) -> Any:
    r"""\(s = \gamma^n\), counted from the end of warm-up."""
    return (gamma or 0.01 ** (1 / progress.span)) ** progress.after_warmup


@SCHEDULERS.register(
    "cosine_annealing",
    description="half a cosine from the peak to the floor in `T_max` updates",
    source=f"{TORCH}.CosineAnnealingLR; SGDR, arXiv 1608.03983, eq. 5",
    parameters=(
        Parameter("T_max", int, None, "updates of the half wave; derived: the run after warm-up", "[1, inf)"),
        _ETA_MIN,
    ),
    traits=("floor_of_all",),
)
def cosine_annealing(progress: Progress, T_max: int | None) -> Any:
    r"""\(s = (1 + \cos(\pi n / T)) / 2\), counted from the end of warm-up.

    As in torch, a `T_max` below the length of the run makes the rate climb again after the bottom.
    """
    return half_cosine(progress.after_warmup / (T_max or progress.span))


@SCHEDULERS.register(
    "cosine_annealing_warm_restarts",
    description="half cosines to the floor with jumps back to the peak, each `T_mult` times as long as the one before",
    source=f"{TORCH}.CosineAnnealingWarmRestarts; SGDR, arXiv 1608.03983, eq. 5",
    parameters=(
        Parameter("T_0", int, None, "updates of the first half wave; derived: a quarter of the run", "[1, inf)"),
        Parameter("T_mult", int, 1, "factor on the length at each restart", "[1, inf)"),
        _ETA_MIN,
    ),
    traits=("floor_of_all",),
)
def cosine_annealing_warm_restarts(progress: Progress, T_0: int | None, T_mult: int) -> Any:
    r"""\(s = (1 + \cos(\pi n_i / T_i)) / 2\), \(n_i\) updates after the last restart."""
    first, passed = T_0 or math.ceil(progress.span / 4), progress.after_warmup
    if T_mult == 1:
        return half_cosine(passed % first / first)
    # A search for the cycle, since a logarithm can round to the wrong side of a restart.
    starts = [0]
    while starts[-1] <= progress.span:
        starts.append(starts[-1] + first * T_mult ** (len(starts) - 1))
    edges = np.array(starts)
    cycle = np.searchsorted(edges, passed, side="right") - 1
    return half_cosine((passed - edges[cycle]) / (edges[cycle + 1] - edges[cycle]))


@SCHEDULERS.register(
    "cyclic",
    description="triangular waves between floor and peak, starting at the floor",
    source=f"{TORCH}.CyclicLR; arXiv 1506.01186",
    parameters=(
        Parameter("step_size_up", int, None, "updates of the rise; derived: an eighth of the run after warm-up", "[1, inf)"),
        Parameter("step_size_down", int, None, "updates of the fall; derived: as the rise", "[1, inf)"),
        Parameter(
            "mode", str, "triangular", "peaks of one height, halved at each wave, or times gamma^update",
            choices=("triangular", "triangular2", "exp_range"),
        ),
        Parameter("gamma", float, 1.0, "of exp_range", "(0, 1]", only_with=("mode", "exp_range")),
    ),
    facts={"min_lr_ratio": 0.1},
)  # fmt: skip
def cyclic(progress: Progress, step_size_up: int | None, step_size_down: int | None, mode: str, gamma: float) -> Any:
    r"""A triangle times 1, \(2^{-\text{wave}}\) or \(\gamma^n\), counted from the end of warm-up.

    torch's `base_lr` is the floor here, its `max_lr` the optimizer's learning rate. The momentum stays as it is.
    """
    up = step_size_up or max(1, math.ceil(progress.span / 8))
    length = up + (step_size_down or up)
    passed = progress.after_warmup
    wave, position = np.floor_divide(passed, length), np.mod(passed, length)
    height = np.where(position <= up, position / up, (length - position) / (length - up))
    scale = {"triangular": 1.0, "triangular2": 0.5**wave, "exp_range": gamma**passed}[mode]
    return height * scale


ONE_CYCLE_RISE = Parameter(
    "pct_start", float, None, "share of the run that rises; derived: the requested warm-up, or 0.3 without one", "(0, 1)"
)
ONE_CYCLE_STRATEGY = Parameter("anneal_strategy", str, "cos", "shape of rise and fall", choices=("cos", "linear"))
ONE_CYCLE_PHASES = Parameter(
    "three_phase", bool, False, "fall as fast as the rise, then continue from the rate at the start"
)
ONE_CYCLE_MOMENTA = (
    Parameter("base_momentum", float, 0.85, "momentum at the peak", "[0, 1)"),
    Parameter("max_momentum", float, 0.95, "momentum at start and end", "[0, 1)"),
)
_CYCLED_MOMENTA = tuple(replace(parameter, only_with=("cycle_momentum", True)) for parameter in ONE_CYCLE_MOMENTA)


def one_cycle_curve(
    progress: Progress, levels: tuple[float, float, float], rise: float | None, strategy: str, three_phase: bool
) -> Any:
    """The curve of `OneCycleLR` through three levels: start, peak, end."""
    total = progress.total_updates
    ends, values = _one_cycle_phases(total, progress.warmup_updates, levels, rise, three_phase)
    now = clip(progress.update, 0, total - 1)
    phase = np.minimum(np.searchsorted(ends[1:], now), len(ends) - 2)
    share = clip((now - ends[phase]) / np.maximum(ends[phase + 1] - ends[phase], 1e-300), 0.0, 1.0)
    weight = half_cosine(share) if strategy == "cos" else 1 - share
    return values[phase + 1] + (values[phase] - values[phase + 1]) * weight


@lru_cache(maxsize=64)
def _one_cycle_phases(
    total: int, warmup: int, levels: tuple[float, float, float], rise: float | None, three_phase: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The updates between phases, from the start of the run to its end, and the values there."""
    if rise is not None and warmup:
        raise LabError(
            f"one_cycle got pct_start={rise} and {counted(warmup, 'update')} of warm-up, which both set the length of the "
            "rise. Leave out pct_start or the warm-up."
        )
    # torch's peak is one update before the end of the share; a warm-up of n updates peaks at update n, as everywhere here.
    peak, last = float(warmup) or (rise or 0.3) * total - 1, total - 1
    start, top, end = levels
    if not three_phase:
        return np.array([0.0, peak, last]), np.array([start, top, end])
    if 2 * peak > last:
        raise LabError(
            f"one_cycle with three_phase rises for {peak + 1:g} of {counted(total, 'update')}. Use less than half."
        )
    return np.array([0.0, peak, 2 * peak, last]), np.array([start, top, start, end])


@SCHEDULERS.register(
    "one_cycle",
    description="from a low rate up to the peak and down to almost nothing, with the momentum in the opposite direction",
    source=f"{TORCH}.OneCycleLR; arXiv 1708.07120",
    parameters=(
        ONE_CYCLE_RISE,
        ONE_CYCLE_STRATEGY,
        Parameter("cycle_momentum", bool, True, "whether the momentum is cycled too"),
        *_CYCLED_MOMENTA,
        Parameter("div_factor", float, 25.0, "the peak divided by the rate at the start", "[1, inf)"),
        Parameter("final_div_factor", float, 1e4, "the rate at the start divided by the rate at the end", "[1, inf)"),
        ONE_CYCLE_PHASES,
    ),
    without=("warmup_type", "warmup_start_ratio"),
    traits=("rises", "momentum"),
)
def one_cycle(
    progress: Progress,
    pct_start: float | None,
    anneal_strategy: str,
    div_factor: float,
    final_div_factor: float,
    three_phase: bool,
    **momentum: Any,
) -> Any:
    r"""\(1/d \to 1 \to 1/(d f)\); torch's `max_lr` is the optimizer's learning rate."""
    levels = (1 / div_factor, 1.0, 1 / div_factor / final_div_factor)
    return one_cycle_curve(progress, levels, pct_start, anneal_strategy, three_phase)


SCHEDULERS.register(
    "reduce_lr_on_plateau",
    description="multiplied by `factor` when the validation loss has stopped improving",
    source=f"{TORCH}.ReduceLROnPlateau",
    parameters=(
        METRIC_MODE,
        Parameter("factor", float, 0.1, "factor at each reduction", "(0, 1)"),
        Parameter("patience", int, 10, "validations without improvement before a reduction", "[0, inf)"),
        Parameter("threshold", float, 1e-4, "smallest change that counts as improvement", "[0, inf)"),
        Parameter("threshold_mode", str, "rel", "whether `threshold` is relative", choices=THRESHOLD_MODES),
        Parameter("cooldown", int, 0, "validations ignored after a reduction", "[0, inf)"),
        Parameter("min_lr", float, 0.0, "floor of the learning rate", "[0, inf)"),
        Parameter("eps", float, 1e-8, "smaller changes of the learning rate are ignored", "[0, inf)"),
    ),
    without=NO_SHAPE,
    traits=("feedback",),
)("diffusers_lrlab.schedules.feedback:PlateauWithWarmup")
