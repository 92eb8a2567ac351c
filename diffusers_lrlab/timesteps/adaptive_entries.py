"""The entries of what follows the losses; their classes need torch and are in `adaptive.py`."""

from __future__ import annotations

from ..core.registry import Parameter
from .registries import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS

TIMESTEP_SAMPLERS.register(
    "loss_second_moment",
    description="in proportion to the root mean square of each timestep's last losses, uniform until it has seen them; "
    "takes ten times as many images as there are timesteps to begin",
    source="improved DDPM, arXiv 2102.09672, section 3.3",
    parameters=(
        Parameter("history", int, 10, "losses kept of each timestep", "[1, inf)"),
        Parameter("uniform_share", float, 0.001, "share that stays uniform", "(0, 1]"),
        Parameter("unbiased", bool, True, "as for the others; without it the objective changes"),
    ),
    traits=("feedback",),
)("diffusers_lrlab.timesteps.adaptive:LossSecondMoment")

LOSS_WEIGHTINGS.register(
    "learned_log_variance",
    description="1 / exp(u), with u learned as the log of the expected loss at each noise level, so that all count alike",
    source="EDM2, arXiv 2312.02696; here with an Adam of its own",
    parameters=(
        Parameter("num_features", int, 128, "random Fourier features of the noise level that u is linear in", "[1, inf)"),
        Parameter("learning_rate", float, 0.01, "of u", "(0, inf)"),
    ),
    traits=("feedback",),
)("diffusers_lrlab.timesteps.adaptive:LearnedLogVariance")
