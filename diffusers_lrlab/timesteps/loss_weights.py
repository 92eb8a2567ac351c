"""Loss weightings by name, for what the model predicts."""

from typing import Any

import numpy as np
import torch

from ..core.errors import LabError, failures_located
from ..core.spec import checked_name, resolve_spec
from ..core.words import counted
from .adaptive import MayFollowLosses, state_of
from .noise_levels import NoiseLevels, convert_weights, find_prediction, noise_levels
from .registries import LOSS_WEIGHTINGS


def list_loss_weightings() -> list[str]:
    """The names `get_loss_weighting` and `--loss_weighting` take."""
    return [*LOSS_WEIGHTINGS, *LOSS_WEIGHTINGS.aliases]


class LossWeighting(MayFollowLosses):
    """
    A weight for each timestep, on the mean squared error of what the model predicts.

    `kwargs` are all its parameters, resolved; the weights are looked up on `device`.
    """

    def __init__(
        self, name: str, kwargs: dict[str, Any], levels: NoiseLevels, prediction_type: str = "epsilon", device: Any = None
    ):
        entry = LOSS_WEIGHTINGS[name]
        self.name, self.kwargs = name, kwargs
        own = {key: value for key, value in kwargs.items() if key not in ("normalize", "max_weight")}
        prediction, self.state = find_prediction(prediction_type), state_of(entry, levels, own, device)
        if self.state is not None:
            return
        with failures_located(f"The loss weighting {name!r}"):
            weights = np.asarray(entry.factory(levels, **own), np.float64)
        if weights.shape != levels.snr.shape or not (weights >= 0).all():
            raise LabError(
                f"The loss weighting {name!r} has to give {counted(len(levels.snr), 'weight')} of 0 or more, one for each "
                f"timestep, not {np.array2string(weights, threshold=5)}."
            )
        if "plain" in entry.traits:
            weights = weights * prediction.plain(levels.snr)
        else:
            weights = convert_weights(weights, levels.snr, prediction_type, of_images="image" in entry.traits)
        self._table = self._finish(torch.from_numpy(np.ascontiguousarray(weights))).to(device)

    def _finish(self, weights: torch.Tensor) -> torch.Tensor:
        if self.kwargs["max_weight"] is not None:
            weights = weights.clamp(max=self.kwargs["max_weight"])
        return weights / weights.mean() if self.kwargs["normalize"] else weights

    @property
    def table(self) -> torch.Tensor:
        """The weights of all timesteps: `(T,)`; float64, or float32 as learned so far."""
        return self._table if self.state is None else self._finish(self.state.weights())

    def weights(self, timesteps: torch.Tensor) -> torch.Tensor:
        """The weights of these timesteps (int64 of any shape): float32 of their shape."""
        return self.table.float().to(timesteps.device)[timesteps]


def get_loss_weighting(
    name: str, noise_scheduler: Any, prediction_type: str | None = None, device: Any = None, **kwargs: Any
) -> LossWeighting:
    """
    A loss weighting by name.

        weighting = get_loss_weighting("min_snr", noise_scheduler)
        errors = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
        loss = (weighting.weights(timesteps) * errors).mean()

    Args:
        name (`str`): A name of [`list_loss_weightings`] or a spec string such as `"min_snr:gamma=1"`.
        noise_scheduler: A diffusers scheduler with `alphas_cumprod`.
        prediction_type (`str`, *optional*): `"epsilon"`, `"sample"` or `"v_prediction"`; the scheduler's if not given.
        device (*optional*): Where the weights are looked up.
        **kwargs: The weighting's own parameters, as `lrlab list weightings --markdown` shows them.
    """
    name, resolved = resolve_spec(checked_name(name), kwargs, LOSS_WEIGHTINGS)
    prediction_type = prediction_type or noise_scheduler.config.prediction_type
    return LossWeighting(name, resolved, noise_levels(noise_scheduler), prediction_type, device)
