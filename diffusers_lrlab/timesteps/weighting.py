"""Loss weightings by name: functions of the noise level, and one that is learned.

Each is on the squared error that it was published for: of the image with the trait "image", of the velocity of flow
matching with "velocity", else of the noise. For another prediction it is multiplied by the ratio of the two errors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import LabError, must_be
from ..core.registry import Parameter
from ..core.spec import choose
from ..core.values import checked
from ..core.words import counted
from .noise_levels import FLOW_VELOCITY, NoiseLevels, convert_weights, find_prediction, noise_levels, prediction_type_of
from .registries import LOSS_WEIGHTINGS, LossFeedback, check_indices, not_repeated

if TYPE_CHECKING:
    import torch

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


# --- for what the model predicts ----------------------------------------------------------------------------------------

_WEIGHED = {"image": "sample", "velocity": FLOW_VELOCITY}  # by trait: the prediction whose error a weighting is for


def list_loss_weightings() -> list[str]:
    """The names `get_loss_weighting` and `--loss_weighting` take."""
    return [*LOSS_WEIGHTINGS, *LOSS_WEIGHTINGS.aliases]


class LossWeighting(LossFeedback):
    """
    A weight for each timestep, on the mean squared error of what the model predicts.

    `kwargs` are all its parameters, resolved; the weights are looked up on `device`.
    """

    def __init__(
        self, name: str, kwargs: dict[str, Any], levels: NoiseLevels, prediction_type: str = "epsilon", device: Any = None
    ):
        import torch

        entry = LOSS_WEIGHTINGS[name]
        self.name, self.kwargs = name, kwargs
        own = {key: value for key, value in kwargs.items() if key not in ("normalize", "max_weight")}
        prediction = find_prediction(prediction_type)
        self.state = entry(levels, **own, device=device) if "feedback" in entry.traits else None
        if self.state is not None:
            return
        weights = np.asarray(entry(levels, **own), np.float64)
        if entry.is_foreign and not np.array_equal(weights, np.asarray(entry(levels, **own)), equal_nan=True):
            raise not_repeated(entry.title, "weight", entry.where)
        if not (weights >= 0).all() or not weights.any():
            raise LabError(
                f"{entry.title} has to give {counted(len(levels.snr), 'weight')} of 0 or more, one for each timestep and "
                f"not all of them zero, not {np.array2string(weights, threshold=5)}.{entry.where}"
            )
        if "plain" in entry.traits:
            weights = weights * prediction.plain(levels.snr)
        else:
            of = next((of for trait, of in _WEIGHED.items() if trait in entry.traits), "epsilon")
            with np.errstate(invalid="ignore"):  # reported below
                weights = convert_weights(weights, levels.snr, prediction_type, of)
        table = self._finish(torch.from_numpy(np.ascontiguousarray(weights)))
        if not table.isfinite().all():
            timestep = int(table.isfinite().logical_not().nonzero()[0])
            snr = levels.snr[timestep]
            remedy = (
                "Limit it by max_weight." if table[timestep] > 0 else "It has no meaning there: choose another weighting."
            )
            raise LabError(
                f"{entry.title} gives timestep {timestep}, whose SNR is {snr:.3g}, a weight of {table[timestep]:g} on the "
                f"error of {prediction_type}. {remedy}{entry.where}"
            )
        self._table = table.to(device)

    def _finish(self, weights: torch.Tensor) -> torch.Tensor:
        if self.kwargs["max_weight"] is not None:
            weights = weights.clamp(max=self.kwargs["max_weight"])
        return weights / weights.mean() if self.kwargs["normalize"] else weights

    @property
    def table(self) -> torch.Tensor:
        """The weights of all timesteps: `(T,)`; float64, or float32 as learned so far."""
        return self._table if self.state is None else self._finish(self.state.weights())

    @checked
    def weights(self, timesteps: torch.Tensor) -> torch.Tensor:
        """The weights of these timesteps (int64 of any shape): float32 of their shape."""
        check_indices(timesteps)
        return self.table.float().to(timesteps.device)[timesteps]


@checked
def get_loss_weighting(
    name: str,
    noise_scheduler: Any,
    prediction_type: str | None = None,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> LossWeighting:
    """
    A loss weighting by name.

        weighting = get_loss_weighting("min_snr", noise_scheduler)
        errors = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
        loss = (weighting.weights(timesteps) * errors).mean()

    Args:
        name (`str`): A name of [`list_loss_weightings`] or a spec string such as `"min_snr:gamma=1"`.
        noise_scheduler: A diffusers scheduler with `alphas_cumprod`, or of flow matching. Timesteps count from the least
            noise: of flow matching, they are `T - 1 - index` in its table.
        prediction_type (`str`, *optional*): `"epsilon"`, `"sample"`, `"v_prediction"` or `"flow_velocity"`; the scheduler's
            if not given.
        device (*optional*): Where the weights are looked up.
        **kwargs: The weighting's own parameters, as `lrlab list weightings --json` shows them.
    """
    choice = choose(name, kwargs, LOSS_WEIGHTINGS)
    if noise_scheduler is None:
        wanted = "a diffusers scheduler with `alphas_cumprod`"
        raise must_be("noise_scheduler", None, wanted, "such as DDPMScheduler()", of="get_loss_weighting()")
    levels = noise_levels(noise_scheduler)
    if prediction_type is None:
        prediction_type = str(prediction_type_of(noise_scheduler) or "epsilon")
    return LossWeighting(choice.name, choice.kwargs, levels, prediction_type, device)
