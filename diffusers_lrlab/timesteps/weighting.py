"""Loss weightings that are functions of the noise level, and one that is learned.

Each is on the squared error that it was published for: of the image with the trait "image", of the velocity of flow
matching with "velocity", else of the noise. For another prediction it is multiplied by the ratio of the two errors.
"""

import math

import numpy as np

from ..core.registry import Parameter
from .noise_levels import NoiseLevels
from .registries import LOSS_WEIGHTINGS

MIN_SNR = "Min-SNR, arXiv 2303.09556"


@LOSS_WEIGHTINGS.register(
    "none",
    description="the plain error of the prediction; times SNR if the model predicts images, as in diffusers' example",
    source="DDPM, arXiv 2006.11239, eq. 14; arXiv 2202.00512, section 4",
    traits=("plain",),
)
def none(levels: NoiseLevels) -> np.ndarray:
    return np.ones(levels.num_train_timesteps)


@LOSS_WEIGHTINGS.register(
    "min_snr",
    description="min(SNR, gamma) on the error of images: less weight on almost clean ones",
    source=MIN_SNR,
    parameters=(Parameter("gamma", float, 5.0, "the SNR above which the weight of an image no longer rises", "(0, inf)"),),
    traits=("image", "middle"),
)
def min_snr(levels: NoiseLevels, gamma: float) -> np.ndarray:
    r"""\(w = \min(\text{SNR}, \gamma)\) on the error of the image."""
    return np.minimum(levels.snr, gamma)


@LOSS_WEIGHTINGS.register(
    "soft_min_snr",
    description="SNR gamma / (SNR + gamma) on the error of images: min_snr without the kink",
    source="Hourglass Diffusion Transformers, arXiv 2401.11605",
    parameters=(Parameter("gamma", float, 4.0, "the SNR around which the weight of an image levels off", "(0, inf)"),),
    traits=("image", "middle"),
)
def soft_min_snr(levels: NoiseLevels, gamma: float) -> np.ndarray:
    r"""\(w = \gamma \text{SNR} / (\text{SNR} + \gamma)\) on the error of the image."""
    return levels.snr * gamma / (levels.snr + gamma)


@LOSS_WEIGHTINGS.register(
    "max_snr",
    description="max(SNR, gamma) on the error of images: the noisiest count as much as those at gamma",
    source=MIN_SNR,
    parameters=(Parameter("gamma", float, 5.0, "the SNR below which the weight of an image no longer falls", "(0, inf)"),),
    traits=("image",),
)
def max_snr(levels: NoiseLevels, gamma: float) -> np.ndarray:
    r"""\(w = \max(\text{SNR}, \gamma)\) on the error of the image."""
    return np.maximum(levels.snr, gamma)


@LOSS_WEIGHTINGS.register(
    "truncated_snr", description="max_snr with a gamma of 1", source="arXiv 2202.00512, section 4", traits=("image",)
)
def truncated_snr(levels: NoiseLevels) -> np.ndarray:
    r"""\(w = \max(\text{SNR}, 1)\) on the error of the image."""
    return max_snr(levels, 1.0)


@LOSS_WEIGHTINGS.register(
    "p2",
    description="1 / (k + SNR)^gamma: less weight on low noise",
    source="P2, arXiv 2204.00227",
    parameters=(
        Parameter("gamma", float, 1.0, "0 is plain; with k = 1, 0.5 weights by the noise rate", "[0, inf)"),
        Parameter("k", float, 1.0, "limits the weight of pure noise", "(0, inf)"),
    ),
)
def p2(levels: NoiseLevels, gamma: float, k: float) -> np.ndarray:
    r"""\(w = (k + \text{SNR})^{-\gamma}\) on the error of the noise."""
    return (k + levels.snr) ** -gamma


@LOSS_WEIGHTINGS.register(
    "debiased",
    description="1 / sqrt(SNR): more weight on high noise, by a factor of 150 at the end of the linear noise schedule",
    source="arXiv 2310.08442",
    parameters=(Parameter("min_snr", float, 0.0, "the SNR below which weights no longer rise", "[0, inf)"),),
)
def debiased(levels: NoiseLevels, min_snr: float) -> np.ndarray:
    r"""\(w = 1 / \sqrt{\text{SNR}}\) on the error of the noise."""
    # A terminal SNR of zero would weigh infinitely.
    return np.maximum(np.maximum(levels.snr, min_snr), 1e-12) ** -0.5


@LOSS_WEIGHTINGS.register(
    "edm",
    description="EDM's weight, made for its sampler: SNR + 1 / sigma_data^2 on the error of images",
    source="EDM, arXiv 2206.00364, table 1",
    parameters=(Parameter("sigma_data", float, 0.5, "standard deviation of the images", "[0.001, 1000]"),),
    traits=("image",),
)
def edm(levels: NoiseLevels, sigma_data: float) -> np.ndarray:
    r"""\(w = \text{SNR} + 1 / \sigma_\text{data}^2\) on the error of the image.

    As published, it is \((\sigma^2 + \sigma_\text{data}^2) / (\sigma \sigma_\text{data})^2\) with
    \(\sigma^2 = 1 / \text{SNR}\).
    """
    return levels.snr + 1 / sigma_data**2


@LOSS_WEIGHTINGS.register(
    "sigma_sqrt",
    description="1 / sigma^2 on the velocity of flow matching: more weight on low noise, by a factor of T^2",
    source="Stable Diffusion 3, arXiv 2403.03206; diffusers' compute_loss_weighting_for_sd3",
    traits=("velocity",),
)
def sigma_sqrt(levels: NoiseLevels) -> np.ndarray:
    r"""\(w = \sigma^{-2}\) on the error of the velocity, with \(\sigma\) of flow matching."""
    return levels.flow_sigma**-2


@LOSS_WEIGHTINGS.register(
    "cosmap",
    description="2 / (pi (1 - 2 sigma + 2 sigma^2)) on the velocity of flow matching: slightly more weight on the middle",
    source="Stable Diffusion 3, arXiv 2403.03206, section 3.1; diffusers' compute_loss_weighting_for_sd3",
    traits=("velocity", "middle"),
)
def cosmap(levels: NoiseLevels) -> np.ndarray:
    r"""\(w = 2 / (\pi (1 - 2 \sigma + 2 \sigma^2))\) on the error of the velocity, with \(\sigma\) of flow matching."""
    sigma = levels.flow_sigma
    return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))


LOSS_WEIGHTINGS.register(
    "learned_log_variance",
    description="1 / exp(u), with u learned as the log of the expected loss at each noise level, so that all count equally",
    source="EDM2, arXiv 2312.02696; here with an Adam of its own",
    parameters=(
        Parameter(
            "num_features",
            int,
            128,
            "number of random Fourier features of the noise level, in which u is linear",
            "[1, inf)",
        ),
        Parameter("learning_rate", float, 0.01, "of u", "(0, inf)"),
    ),
    traits=("feedback",),
)("diffusers_lrlab.timesteps.adaptive:LearnedLogVariance")
