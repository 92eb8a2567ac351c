"""
The registries of timestep samplers and loss weightings, which importing the package (`timesteps/__init__.py`) fills, and
what those that follow the losses have in common.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import LabError, must_be
from ..core.plugins import real_values
from ..core.registry import Parameter, Registry
from ..core.values import checked
from ..core.words import counted

if TYPE_CHECKING:
    import torch


DRAWS = ("independent", "stratified", "antithetic")


def _check_density(value: Any, clock_or_levels: Any, levels: Any = None) -> Any:
    """The value of a sampler that does not follow the losses; one that does is an object."""
    if levels is None:
        return value
    num, shape = levels.num_train_timesteps, np.shape(clock_or_levels.update)
    wanted = f"{num} densities of 0 or more, one for each timestep" + (f", or an array of {(*shape, num)}" if shape else "")
    return real_values(value, wanted, (num,), (*shape, num), (*(1 for _ in shape), num))


def _check_weights(value: Any, levels: Any) -> Any:
    """The value of a weighting; one that follows the losses is an object."""
    if hasattr(value, "weights"):
        return value
    num = levels.num_train_timesteps
    return real_values(value, f"{counted(num, 'weight')} of 0 or more, one for each timestep", (num,))


def not_repeated(title: str, what: str, where: str) -> LabError:
    """The error for a function whose value is another one each time, so that a resumed run would differ."""
    return LabError(
        f"{title} gives another {what} at the second call with the same arguments, so a resumed run would differ. Hint: "
        f"compute it from the arguments alone; for random numbers, use a generator with a fixed seed.{where}"
    )


TIMESTEP_SAMPLERS = Registry(
    "timestep sampler",
    returns=_check_density,
    common=(
        Parameter(
            "draw", str, "independent",
                "how the timesteps of a batch depend on each other: not at all, one from each equal part of the density, "
                "or in pairs from its opposite ends; the density of a single timestep is always the same",
            choices=DRAWS,
        ),
        Parameter(
            "unbiased", bool, False,
            "weight each loss by 1 / (T p), so that the expected gradient is that of uniform timesteps",
        ),
    ),
    traits={
        "uniform": "all timesteps are equally likely",
        "curriculum": "moves with the clock, and needs the length of the run",
        "restricted": "some timesteps have no probability",
        "epsilon": "assumes that high noise is easy, as for models that predict the noise",
        "middle": "favours the middle of the noise levels",
        "noise_level": "a density over the noise level; others without feedback are over shares of the timesteps",
        "feedback": "follows the losses; registered as `module:Class`",
    },
)  # fmt: skip
"""
Entries are functions `f(progress, levels, **parameters) -> weights`, not necessarily normalised, of shape `(T,)`, or
`(num_updates, T)` where the clock reads an array and the density moves.
"""

register_timestep_sampler = TIMESTEP_SAMPLERS.register
"""Registers a timestep sampler, such a function, with the arguments of [`Registry.register`]."""

LOSS_WEIGHTINGS = Registry(
    "loss weighting",
    returns=_check_weights,
    common=(
        Parameter("normalize", bool, False, "divide by the mean weight over all timesteps, so that the mean is 1"),
        Parameter(
            "max_weight", float, None,
            "largest weight on the error of what the model predicts, before normalize; no limit if not given", "(0, inf)",
        ),
    ),
    traits={
        "image": "weighs the squared error of the predicted image, not of the noise",
        "velocity": "weighs the squared error of the velocity of flow matching, not of the noise",
        "plain": "relative to a prediction's plain weights",
        "middle": "favours the middle of the noise levels",
        "feedback": "learns from the losses; registered as `module:Class`",
    },
)  # fmt: skip
"""
Entries are functions `f(levels, **parameters) -> weights` of shape `(T,)` on the squared error of the predicted noise, as
they were published; [`convert_weights`] converts them for other predictions.
"""

register_loss_weighting = LOSS_WEIGHTINGS.register
"""Registers a loss weighting, such a function, with the arguments of [`Registry.register`]."""


def check_indices(timesteps: torch.Tensor) -> None:
    """Raises a `LabError` for timesteps that are not whole numbers; it does not wait for their device."""
    import torch

    if timesteps.dtype not in (torch.int64, torch.int32):
        raise must_be("timesteps", timesteps.dtype, "a tensor of int64", "use timesteps.long()")


class LossFeedback:
    """A sampler or a weighting, whose `state` is `None` unless it follows the losses."""

    state: Any

    @property
    def follows_losses(self) -> bool:
        """Whether [`observe`] has to be called."""
        return self.state is not None

    @checked
    def observe(self, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """Takes the unweighted losses of an update, of the images of all processes; without a state it does nothing."""
        if self.state is not None:
            check_indices(timesteps)
            self.state.observe(timesteps, losses)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.state.state_dict() if self.state is not None else {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        if self.state is not None:
            self.state.load_state_dict(state)
