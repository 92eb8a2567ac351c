"""Loss weightings by name, for what the model predicts."""

from typing import Any

import numpy as np
import torch

from ..core.errors import LabError, must_be
from ..core.registry import Entry
from ..core.spec import resolve_spec
from ..core.values import checked
from ..core.words import counted
from .adaptive import LossFeedback, check_indices, state_of
from .noise_levels import (
    FLOW_VELOCITY,
    NoiseLevels,
    convert_weights,
    find_prediction,
    noise_levels,
    prediction_type_of,
)
from .registries import LOSS_WEIGHTINGS, not_repeated

_WEIGHED = {"image": "sample", "velocity": FLOW_VELOCITY}  # by trait


def list_loss_weightings() -> list[str]:
    """The names `get_loss_weighting` and `--loss_weighting` take."""
    return [*LOSS_WEIGHTINGS, *LOSS_WEIGHTINGS.aliases]


def _weighed_error(entry: Entry) -> str:
    """The prediction whose squared error a weighting was published for."""
    return next((of for trait, of in _WEIGHED.items() if trait in entry.traits), "epsilon")


class LossWeighting(LossFeedback):
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
            with np.errstate(invalid="ignore"):  # reported below
                weights = convert_weights(weights, levels.snr, prediction_type, _weighed_error(entry))
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
        **kwargs: The weighting's own parameters, as `lrlab list weightings --markdown` shows them.
    """
    name, resolved = resolve_spec(name, kwargs, LOSS_WEIGHTINGS)
    if noise_scheduler is None:
        wanted = "a diffusers scheduler with `alphas_cumprod`"
        raise must_be("noise_scheduler", None, wanted, "such as DDPMScheduler()", of="get_loss_weighting()")
    levels = noise_levels(noise_scheduler)
    if prediction_type is None:
        prediction_type = str(prediction_type_of(noise_scheduler) or "epsilon")
    return LossWeighting(name, resolved, levels, prediction_type, device)
