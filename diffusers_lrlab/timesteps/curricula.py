"""Densities over timesteps that move with the clock, or with the losses.

They are over shares of the timesteps, and were published for linear betas; a share has another noise under flow matching,
where each docstring says what moves by the noise itself.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.progress import Progress
from ..core.registry import Parameter
from ..core.words import counted
from ..schedules.registries import RAMPS
from .noise_levels import NoiseLevels
from .registries import TIMESTEP_SAMPLERS
from .samplers import gaussian, logit_normal

CLTS = "idea: arXiv 2404.07946; formula: SpeeD's code, corrected to what it intends"


_GAUSSIAN = (
    Parameter(
        "mu", float, 0.3, "where the Gaussian is highest, as a share of the timesteps", "[0, 1]",
        only_with=("noise_rate_exponent", None),
    ),
    Parameter(
        "sigma", float, 0.3, "its width, as a share of the timesteps", "(0, inf)", only_with=("noise_rate_exponent", None)
    ),
    Parameter("lambda_max", float, 1.0, "largest share of the Gaussian; the rest is uniform", "[0, 1]"),
    Parameter(
        "noise_rate_exponent", float, None, "q of a density that falls with the noise, 1 - lambda + lambda "
        "(1 - noise rate)^q, in place of the Gaussian", "(0, inf)",
    ),
)  # fmt: skip
_RAMP = (
    Parameter("ramp_share", float, 1.0, "the share of the run in which lambda moves", "(0, 1]"),
    Parameter("ramp", str, "linear", "how it moves", choices=("linear", "cosine")),
    Parameter(
        "after", str, "hold", "what follows, if ramp_share is below 1: lambda stays, or uniform", choices=("hold", "uniform")
    ),
)


def _mixture(share: Any, levels: NoiseLevels, mu: float, sigma: float, noise_rate_exponent: float | None) -> np.ndarray:
    """`(1 - share) U + share G`, or in place of `T G` the power of the noise rate as it is.

    `share` is a number, or an array of shape `(num_updates,)`. Under flow matching, the noise rate is that of the
    variance-preserving state of the same SNR: `sigma / sqrt(sigma^2 + (1 - sigma)^2)`.
    """
    share = np.asarray(share, np.float64)[..., None]
    if noise_rate_exponent is not None:
        return (1 - share) + share * (1 - levels.noise_rate) ** noise_rate_exponent
    density = gaussian(levels.position, mu, sigma)
    # Times T, so that a share of 0 is uniform to the last bit.
    return (1 - share) + share * (levels.num_train_timesteps * density / density.sum())


def _share(progress: Progress, lambda_max: float, ramp_share: float, ramp: str, after: str, reverse: bool = False) -> Any:
    tau = np.minimum(np.asarray(progress.fraction) / ramp_share, 1.0)
    height = RAMPS[ramp](tau)
    share = lambda_max * (1 - height if reverse else height)
    if after == "uniform":
        if ramp_share == 1:
            raise LabError(
                "after='uniform' has no effect with ramp_share=1.0: nothing follows. Lower ramp_share, or leave after out."
            )
        share = np.where(np.asarray(progress.fraction) > ramp_share, 0.0, share)
    return share


@TIMESTEP_SAMPLERS.register(
    "clts",
    description="from uniform to a Gaussian at less noise: the easy, noisy timesteps become rarer",
    source=CLTS,
    parameters=(*_GAUSSIAN, *_RAMP),
    traits=("curriculum", "epsilon"),
)
def clts(
    progress: Progress, levels: NoiseLevels, lambda_max: float, ramp_share: float, ramp: str, after: str, **density: Any
) -> np.ndarray:
    r"""\(p = (1 - \lambda) U + \lambda G\), with \(\lambda\) from 0 to `lambda_max` and
    \(G(\tau) \propto \exp(-(\tau - \mu)^2 / (2 \sigma^2))\).
    """
    return _mixture(_share(progress, lambda_max, ramp_share, ramp, after), levels, **density)


TIMESTEP_SAMPLERS.register(
    "clts_speed_intended",
    description="clts with the width that SpeeD's code intended, which is almost uniform",
    source=CLTS,
    parameters=(_GAUSSIAN[0], replace(_GAUSSIAN[1], default=1.0), *_GAUSSIAN[2:], *_RAMP),
    traits=("curriculum", "epsilon"),
)(clts)


@TIMESTEP_SAMPLERS.register(
    "clts_static",
    description="the last density of clts at every update; a control that shows whether the curriculum matters at all",
    source="a control of clts",
    parameters=_GAUSSIAN,
    traits=("epsilon",),
)
def clts_static(progress: Progress, levels: NoiseLevels, lambda_max: float, **density: Any) -> np.ndarray:
    return _mixture(lambda_max, levels, **density)


@TIMESTEP_SAMPLERS.register(
    "clts_reversed",
    description="clts backwards, from the Gaussian to uniform; a control that shows whether its direction matters",
    source="a control of clts",
    parameters=(*_GAUSSIAN, *_RAMP[:2]),
    traits=("curriculum", "epsilon"),
)
def clts_reversed(
    progress: Progress, levels: NoiseLevels, lambda_max: float, ramp_share: float, ramp: str, **density: Any
) -> np.ndarray:
    return _mixture(_share(progress, lambda_max, ramp_share, ramp, "hold", reverse=True), levels, **density)


@TIMESTEP_SAMPLERS.register(
    "easy_to_hard",
    description="only the noisiest timesteps at first, then more and more of the others, then all",
    source="arXiv 2403.10348, by the clock, while the paper waits for the loss to stop falling",
    parameters=(
        Parameter("num_clusters", int, 20, "number of parts in which the timesteps are added", "[1, inf)"),
        Parameter("ramp_share", float, 0.5, "the share of the run after which all parts are in use", "(0, 1]"),
    ),
    traits=("curriculum", "restricted", "epsilon"),
)
def easy_to_hard(progress: Progress, levels: NoiseLevels, num_clusters: int, ramp_share: float) -> np.ndarray:
    """Stage k of K, each `ramp_share / (K - 1)` of the run, is uniform over the k noisiest of K equal parts."""
    num = levels.num_train_timesteps
    if num_clusters > num:
        raise LabError(
            f"'easy_to_hard' got num_clusters={num_clusters}, more than the {counted(num, 'timestep')}. Use at most {num}."
        )
    tau = np.minimum(np.asarray(progress.fraction) / ramp_share, 1.0)
    # Rounding must not delay a part by an update.
    stage = 1 + np.floor(tau * (num_clusters - 1) + 1e-9)[..., None]
    noisier = np.arange(num)[::-1]  # how many timesteps are noisier
    return (noisier * num_clusters < stage * num).astype(np.float64)


TIMESTEP_SAMPLERS.register(
    "loss_second_moment",
    description=(
        "in proportion to the root mean square of each timestep's last losses; uniform until it has seen these, which "
        "takes ten times as many images as there are timesteps"
    ),
    source="improved DDPM, arXiv 2102.09672, section 3.3",
    parameters=(
        Parameter("history", int, 10, "number of losses kept for each timestep", "[1, inf)"),
        Parameter("uniform_share", float, 0.001, "share that stays uniform", "(0, 1]"),
        Parameter("unbiased", bool, True, "as for the others; without it the objective changes"),
    ),
    traits=("feedback",),
)("diffusers_lrlab.timesteps.adaptive:LossSecondMoment")

TIMESTEP_SAMPLERS.register(
    "infonoise",
    description="highest where denoising is most informative: in proportion to the rate at which the entropy of the data "
    "rises with ln sigma, divided by the weight of their error; another density until it has seen every noise level",
    source="InfoNoise, arXiv 2602.18647; numbers of bins, updates and losses are our own choices",
    parameters=(
        Parameter("num_bins", int, 64, "equal parts of ln sigma, with one density each", "[1, 1000]"),
        Parameter("warmup_updates", int, 500, "updates before the first density of its own", "[0, inf)"),
        Parameter("refresh_every", int, 100, "updates between two densities", "[1, inf)"),
        Parameter("min_count", int, 20, "number of losses of a bin that are averaged into a mean", "[1, inf)"),
        Parameter("ema_decay", float, 0.7, "decay of the moving average of these means", "[0, 1)"),
        Parameter(
            "onset",
            float,
            0.002,
            "share of the largest error / sigma^3 that bounds the noise levels below the pivot",
            "(0, 1)",
        ),
        Parameter("uniform_share", float, 0.01, "share that stays uniform, so that no mean becomes outdated", "[0, 1)"),
        Parameter("before", str, "uniform", "the density before its own begins, as a spec string"),
    ),
    traits=("feedback",),
)("diffusers_lrlab.timesteps.infonoise:InfoNoise")


_LOGIT_NORMAL = (
    Parameter("mean", float, 0.8, "mean of the first phase's logit_normal; above 0 prefers noise", "(-inf, inf)"),
    Parameter("std", float, 1.0, "its width", "(0, inf)"),
    Parameter("switch", float, 0.4, "the share of the run with that density", "(0, 1)"),
)


def _phases(progress: Progress, levels: NoiseLevels, is_first: Any, mean: float, std: float) -> np.ndarray:
    """logit_normal where `is_first`, a bool of the shape of the clock's updates; uniform elsewhere."""
    middle = logit_normal(progress, levels, mean, std)
    # Times T, so that the other phase is uniform to the last bit.
    return np.where(np.asarray(is_first)[..., None], levels.num_train_timesteps * middle / middle.sum(), 1.0)


@TIMESTEP_SAMPLERS.register(
    "logit_normal_then_uniform",
    description="Curriculum Sampling: more of the noisy middle first, then all timesteps equally",
    source="arXiv 2603.12517, for flow matching: from 60,000 of 150,000 updates on",
    parameters=_LOGIT_NORMAL,
    traits=("curriculum",),
)
def logit_normal_then_uniform(progress: Progress, levels: NoiseLevels, mean: float, std: float, switch: float) -> np.ndarray:
    return _phases(progress, levels, np.asarray(progress.fraction) < switch, mean, std)


@TIMESTEP_SAMPLERS.register(
    "uniform_then_logit_normal",
    description=(
        "logit_normal_then_uniform backwards, with phases of the same lengths; a control that shows whether their order "
        "matters"
    ),
    source="a control of logit_normal_then_uniform",
    parameters=_LOGIT_NORMAL,
    traits=("curriculum",),
)
def uniform_then_logit_normal(progress: Progress, levels: NoiseLevels, mean: float, std: float, switch: float) -> np.ndarray:
    return _phases(progress, levels, np.asarray(progress.fraction) >= 1 - switch, mean, std)
