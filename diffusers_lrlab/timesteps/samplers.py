"""Densities over timesteps that stay as they are over the run.

Most are over the share tau = t / T of the timesteps, whatever noise they have. Under flow matching, tau is sigma without the
shift: with a shift s, sigma = s tau / (1 + (s - 1) tau), as in diffusers' scripts. Those with the trait "noise_level" are
over sqrt(1 / SNR), which is sigma / (1 - sigma) there, and so the same for every objective.
"""

import math
from dataclasses import replace

import numpy as np

from ..core.errors import LabError
from ..core.progress import Progress
from ..core.registry import Parameter
from ..core.words import counted
from .noise_levels import LogSigma, NoiseLevels
from .registries import DRAWS, TIMESTEP_SAMPLERS

SD3 = "Stable Diffusion 3, arXiv 2403.03206"


def uniform(progress: Progress, levels: NoiseLevels) -> np.ndarray:
    return np.ones(levels.num_train_timesteps)


_DRAW = Parameter("draw", str, None, "as for the others", choices=DRAWS)

TIMESTEP_SAMPLERS.register(
    "uniform",
    description="all timesteps equally likely, as in diffusers' scripts",
    source="DDPM, arXiv 2006.11239, algorithm 1",
    traits=("uniform",),
)(uniform)
TIMESTEP_SAMPLERS.register(
    "stratified",
    description="uniform and stratified: one timestep from each of N equal parts, for a batch of N images",
    source="the low-discrepancy sampler of VDM, arXiv 2107.00630",
    parameters=(replace(_DRAW, default="stratified"),),
    traits=("uniform",),
)(uniform)
TIMESTEP_SAMPLERS.register(
    "antithetic",
    description="uniform, in pairs t and T - 1 - t",
    source="Hammersley and Morton 1956; the training code of DDIM, arXiv 2010.02502",
    parameters=(replace(_DRAW, default="antithetic"),),
    traits=("uniform",),
)(uniform)


def gaussian(x: np.ndarray, mean: float, std: float) -> np.ndarray:
    """Proportional to a normal density; the largest value is 1, however narrow or far away it is."""
    distance = np.abs(x - mean)
    nearest = distance.min()
    # As a product, since squares of tiny widths overflow.
    with np.errstate(over="ignore"):
        return np.exp(-0.5 * ((distance - nearest) / std) * ((distance + nearest) / std))


def _mass(cumulative: np.ndarray) -> np.ndarray:
    """The probability of each share, from the distribution function at the borders; rounding must not make it negative."""
    return np.clip(np.diff(cumulative), 0.0, None)


@TIMESTEP_SAMPLERS.register(
    "logit_normal",
    description="the sigmoid of a normal variable; favours the middle of the timesteps",
    source=f"{SD3}, section 3.1",
    parameters=(
        Parameter(
            "mean", float, 0.0,
            "above 0 prefers noise, below 0 images (diffusers' scripts count the other way)", "(-inf, inf)",
        ),
        Parameter("std", float, 1.0, "width", "(0, inf)"),
    ),
    traits=("middle",),
)  # fmt: skip
def logit_normal(progress: Progress, levels: NoiseLevels, mean: float, std: float) -> np.ndarray:
    r"""\(p(\tau) \propto \exp(-(x - \mu)^2 / (2 s^2)) / (\tau (1 - \tau))\) with \(x = \ln(\tau / (1 - \tau))\), \(\mu\)
    being `mean` and \(s\) `std`.

    Mass of each timestep's share of [0, 1].
    """
    from scipy.special import logit, ndtr

    return _mass(ndtr((logit(levels.borders) - mean) / std))


@TIMESTEP_SAMPLERS.register(
    "mode",
    description="higher in the middle, or at the ends if the scale is negative; never 0",
    source=f"{SD3}, section 3.1",
    parameters=(
        # Beyond 2 / (pi - 2) the map of the paper is not monotone.
        Parameter("scale", float, 1.29, "how much higher; 0 is uniform", "[-1, 1.75]"),
    ),
    traits=("middle",),
)
def mode(progress: Progress, levels: NoiseLevels, scale: float) -> np.ndarray:
    r"""The density of \(\tau = 1 - u - s (\cos^2(\pi u / 2) - 1 + u)\) for uniform \(u\), \(s\) being `scale`.

    By inverting this function at the borders.
    """
    u = np.linspace(0, 1, 200_001)
    mapped = 1 - u - scale * (np.cos(math.pi * u / 2) ** 2 - 1 + u)
    return _mass(1 - np.interp(levels.borders, mapped[::-1], u[::-1]))


@TIMESTEP_SAMPLERS.register(
    "cosine_map",
    description="as if the noise schedule were a cosine; slightly favours the middle",
    source=f"{SD3}, section 3.1",
    traits=("middle",),
)
def cosine_map(progress: Progress, levels: NoiseLevels) -> np.ndarray:
    r"""\(p(\tau) = 2 / (\pi (1 - 2 \tau + 2 \tau^2))\)."""
    return 1 / (1 - 2 * levels.centre + 2 * levels.centre**2)


@TIMESTEP_SAMPLERS.register(
    "truncated_normal",
    description="a normal density over t / T, cut off at both ends",
    source="a plain choice, for comparison",
    parameters=(
        Parameter("mean", float, 0.5, "where it is highest, as a share of the timesteps", "[0, 1]"),
        Parameter("std", float, 0.25, "width, as a share of the timesteps", "(0, inf)"),
    ),
)
def truncated_normal(progress: Progress, levels: NoiseLevels, mean: float, std: float) -> np.ndarray:
    r"""\(p(\tau) \propto \exp(-(\tau - \mu)^2 / (2 s^2))\), \(\mu\) being `mean` and \(s\) `std`.

    Proportional to the density in the middle of each timestep's share.
    """
    return gaussian(levels.centre, mean, std)


@TIMESTEP_SAMPLERS.register(
    "beta",
    description="a beta density over t / T; less than 1 for alpha prefers little noise",
    source="B-TTDM, ECCV 2024: beta = 1 and alpha < 1, whose values could not be found",
    parameters=(
        Parameter("alpha", float, 0.85, "below 1, the density is high at little noise", "(0, inf)"),
        Parameter("beta", float, 1.0, "below 1, the density is high at much noise", "(0, inf)"),
    ),
)
def beta(progress: Progress, levels: NoiseLevels, alpha: float, beta: float) -> np.ndarray:
    r"""\(p(\tau) \propto \tau^{\alpha - 1} (1 - \tau)^{\beta - 1}\).

    Mass of each timestep's share of [0, 1].
    """
    from scipy.special import betainc

    return _mass(betainc(alpha, beta, levels.borders))


@TIMESTEP_SAMPLERS.register(
    "edm_log_normal",
    description="log-normal in the noise level sigma, inside the range of the noise schedule",
    source="EDM, arXiv 2206.00364, table 1",
    parameters=(
        Parameter("p_mean", float, -1.2, "mean of ln sigma, for images in [-1, 1]", "(-inf, inf)"),
        Parameter("p_std", float, 1.2, "standard deviation of ln sigma", "(0, inf)"),
    ),
    traits=("noise_level",),
)
def edm_log_normal(progress: Progress, levels: NoiseLevels, p_mean: float, p_std: float) -> np.ndarray:
    r"""\(p(\ln \sigma) \propto \exp(-(\ln \sigma - \mu)^2 / (2 s^2))\), \(\mu\) being `p_mean`, \(s\) `p_std`, and
    \(\sigma = 1 / \sqrt{\text{SNR}}\).

    Mass of the values of ln sigma that are nearest to that of a timestep.
    """
    from scipy.special import ndtr

    # Differences of the upper tail, where the lower one is 1 to the last digit.
    z = (levels.log_sigma_borders - p_mean) / p_std
    return np.where(z[:-1] > 0, _mass(-ndtr(-z)), _mass(ndtr(z)))


@TIMESTEP_SAMPLERS.register(
    "laplace",
    description="a Laplace density over log SNR, highest where signal and noise are equal",
    source="arXiv 2407.03297, whose form could not be checked",
    parameters=(
        Parameter("mean", float, 0.0, "log SNR where it is highest", "(-inf, inf)"),
        Parameter("scale", float, 0.5, "width, in log SNR", "(0, inf)"),
    ),
    traits=("middle", "noise_level"),
)
def laplace(progress: Progress, levels: NoiseLevels, mean: float, scale: float) -> np.ndarray:
    r"""\(p(\ln \text{SNR}) \propto \exp(-\lvert \ln \text{SNR} - \mu \rvert / b)\), \(\mu\) being `mean` and \(b\) `scale`.

    Mass of the values of log SNR that are nearest to that of a timestep.
    """
    z = -(-2 * levels.log_sigma_borders - mean) / scale  # grows with the timestep
    tail = 0.5 * np.exp(-np.abs(z))
    # Differences of the tail that the share lies in: the other one is 1 to the last digit.
    return np.where(z[:-1] > 0, _mass(-tail), _mass(np.where(z < 0, tail, 1 - tail)))


@TIMESTEP_SAMPLERS.register(
    "piecewise",
    description="a fixed density over ln sigma, constant in equal parts, such as the last one of infonoise",
    source="a plain choice, for comparison",
    parameters=(
        Parameter(
            "densities",
            list,
            (1.0,),
            "densities of the parts, from the least noise; their scale does not matter",
            "[0, inf)",
        ),
        Parameter("low", float, None, "ln sigma where the first part begins; the least noise if not given", "(-inf, inf)"),
        Parameter("high", float, None, "ln sigma where the last part ends; the most noise if not given", "(-inf, inf)"),
        Parameter("uniform_share", float, 0.0, "share that is uniform over the timesteps", "[0, 1)"),
    ),
    traits=("noise_level",),
)
def piecewise(
    progress: Progress,
    levels: NoiseLevels,
    densities: list[float],
    low: float | None,
    high: float | None,
    uniform_share: float,
) -> np.ndarray:
    """Mass of the values of ln sigma that are nearest to that of a timestep."""
    if not densities:
        raise LabError("'piecewise' got no densities. Give one for each part, such as densities=[1|2|1].")
    log_sigma = LogSigma(levels)
    edges = log_sigma.edges(len(densities), low, high)
    if edges[0] >= edges[-1]:
        raise LabError(f"'piecewise' from low={edges[0]:g} to high={edges[-1]:g} is empty. Make high larger than low.")
    mass = log_sigma.overlaps(edges) @ np.asarray(densities, np.float64)
    total = mass.sum()
    if not total > 0:
        raise LabError(
            f"'piecewise' from low={edges[0]:g} to high={edges[-1]:g} gives no timestep any probability: ln sigma goes from "
            f"{log_sigma.borders[0]:.3g} to {log_sigma.borders[-1]:.3g}."
        )
    return (1 - uniform_share) * mass / total + uniform_share / levels.num_train_timesteps


@TIMESTEP_SAMPLERS.register(
    "speed",
    description="`k` times as often below `tau` as above",
    source="SpeeD, arXiv 2405.17403, and its code",
    parameters=(
        Parameter("k", float, 5.0, "how much more often", "(0, inf)"),
        Parameter("tau", float, 0.7, "where the frequency changes, as a share of the timesteps", "(0, 1)"),
    ),
)
def speed(progress: Progress, levels: NoiseLevels, k: float, tau: float) -> np.ndarray:
    return np.where(np.arange(levels.num_train_timesteps) < round(tau * levels.num_train_timesteps), k, 1.0)


def _inside(inside: np.ndarray, problem: str) -> np.ndarray:
    if not inside.any():
        raise LabError(f"{problem} Choose a range that holds some.")
    return inside.astype(np.float64)


@TIMESTEP_SAMPLERS.register(
    "range",
    description="uniform from `low` to `high`",
    source="DreamFusion, arXiv 2209.14988: 0.02 to 0.98",
    parameters=(
        Parameter("low", float, 0.02, "first timestep, as a share of all", "[0, 1)"),
        Parameter("high", float, 0.98, "the timestep that ends the range, as a share of all", "(0, 1]"),
    ),
    traits=("restricted",),
)
def timestep_range(progress: Progress, levels: NoiseLevels, low: float, high: float) -> np.ndarray:
    num = levels.num_train_timesteps
    t = np.arange(num)
    return _inside(
        (t >= round(low * num)) & (t < round(high * num)),
        f"'range' from low={low:g} to high={high:g} holds none of the {counted(num, 'timestep')}.",
    )


@TIMESTEP_SAMPLERS.register(
    "snr_range",
    description="uniform over the timesteps whose signal-to-noise ratio lies in a range",
    source="a plain choice, for comparison",
    parameters=(
        Parameter("min_snr", float, 0.01, "smallest SNR", "[0, inf)"),
        Parameter("max_snr", float, 100.0, "largest SNR", "(0, inf]"),
    ),
    traits=("restricted", "noise_level"),
)
def snr_range(progress: Progress, levels: NoiseLevels, min_snr: float, max_snr: float) -> np.ndarray:
    snr = levels.snr
    return _inside(
        (snr >= min_snr) & (snr <= max_snr),
        f"'snr_range' from min_snr={min_snr:g} to max_snr={max_snr:g} holds none of the {counted(len(snr), 'timestep')}, "
        f"whose SNR goes from {snr.max():.3g} down to {snr.min():.3g}.",
    )
