"""Timestep samplers by name: a density over noise levels at each update, and draws from it."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..core.errors import LabError, must_be
from ..core.progress import Progress
from ..core.spec import choose
from ..core.values import Range, checked
from ..schedules.schedule import ENDLESS
from .noise_levels import FLOW_VELOCITY, NoiseLevels, noise_levels, prediction_type_of
from .registries import TIMESTEP_SAMPLERS, LossFeedback, check_indices, not_repeated

_LENGTH, _BATCH = Range(f"[1, {ENDLESS}]", whole=True), Range(f"[0, {ENDLESS}]", whole=True)
_EARLY = (1, 2, 3, 10, 100, 1000, 10_000)  # updates at which a density may change however long the run is
_BELOW_ONE = float(np.nextafter(1.0, 0.0))


def list_timestep_samplers() -> list[str]:
    """The names `get_timestep_sampler` and `--timestep_sampler` take."""
    return [*TIMESTEP_SAMPLERS, *TIMESTEP_SAMPLERS.aliases]


class TimestepSampler(LossFeedback):
    """
    A density over noise levels (timesteps) at each update, and draws from it.

    `kwargs` are all its parameters, resolved; a sampler that follows the losses stores them on `device`.
    """

    def __init__(
        self,
        name: str,
        kwargs: dict[str, Any],
        levels: NoiseLevels,
        num_training_steps: int | None = None,
        device: Any = None,
    ):
        entry = TIMESTEP_SAMPLERS[name]
        self.name, self.kwargs, self.levels = name, kwargs, levels
        self.num_train_timesteps = levels.num_train_timesteps
        self.unbiased, self.draw = kwargs["unbiased"], kwargs["draw"]
        self.moves = "curriculum" in entry.traits or name == "banded"  # over the run
        if "curriculum" in entry.traits and num_training_steps is None:
            raise LabError(
                f"{name!r} moves over the run and needs its length: give num_training_steps, in optimizer updates."
            )
        _LENGTH.check("num_training_steps", num_training_steps, "it is the number of optimizer updates of the run")
        self.num_training_steps = num_training_steps or ENDLESS  # what does not move needs no length
        if self.unbiased and "restricted" in entry.traits:
            raise LabError(
                f"{name!r} never draws some timesteps, so no weight makes up for them: unbiased=True cannot hold. Drop it."
            )
        own = {key: value for key, value in kwargs.items() if key not in ("draw", "unbiased")}
        self._entry, self._own = entry, own
        self.state = entry(levels, **own, device=device) if "feedback" in entry.traits else None
        self._cached: dict[Any, torch.Tensor] = {}
        self._check_density()

    def losses_are(self, prediction_type: str, table: Callable[[], torch.Tensor] | None = None) -> None:
        """
        Sets what [`observe`] gets: squared errors of a prediction (of the noise, unless this is called), times the weights
        `table()` of all timesteps, `(T,)`, if given. Only samplers that need the error of the data ask for it.
        """
        if hasattr(self.state, "losses_are"):
            self.state.losses_are(prediction_type, table)

    def held(self) -> str:
        """The spec string of a sampler with the current density, fixed; empty if there is none."""
        return str(self.state.held()) if hasattr(self.state, "held") else ""

    def check_length(self, num_updates: int, batch_size: int) -> str | None:
        """A `LabError` if a density that waits for losses cannot begin in a run; a warning if it is not likely to."""
        if not hasattr(self.state, "check_length"):
            return None
        return self.state.check_length(self.name, str(self.kwargs["before"]), num_updates, batch_size)

    def began(self) -> int | None:
        """The update at which it began, 0 before; `None` for samplers that wait for nothing. Waits for the device."""
        return int(self.state.began) if hasattr(self.state, "began") else None

    def _check_density(self) -> None:
        """Evaluates the density over the run, for the errors that only it can raise."""
        updates = np.linspace(0, self.num_training_steps, 9).astype(np.int64) if self.moves else 0
        probabilities = self.probabilities(updates)
        lowest = probabilities.min().item()
        if self._entry.is_foreign and self.state is None:
            self._check_repeats()
        if probabilities.shape[-1] != self.num_train_timesteps or lowest < 0:
            raise LabError(
                f"{self._entry.title} has to give {self.num_train_timesteps} densities of 0 or more, one for each timestep, "
                f"not {np.array2string(probabilities.numpy(), threshold=5)} (normalised).{self._entry.where}"
            )
        if self.unbiased and not 1 / np.finfo(np.float32).max < self.num_train_timesteps * lowest:
            raise LabError(
                f"{self.name!r} with {self._own} gives some timesteps next to no probability, and no weight makes up for "
                "that: unbiased=True cannot hold. Drop it, or make the density wider."
            )

    def _check_repeats(self) -> None:
        """Raises a `LabError` for a density that a resumed run would not have again."""
        first, title, where = self.probabilities(0), self._entry.title, self._entry.where
        if not first.equal(self.probabilities(0)):
            raise not_repeated(title, "density", where)
        spread = {*np.linspace(0, self.num_training_steps, 9).astype(np.int64).tolist(), *_EARLY}
        if not self.moves and any(
            not first.equal(self.probabilities(update)) for update in spread if update <= self.num_training_steps
        ):
            raise LabError(
                f"{title} changes with the update, but it is computed once, since it does not say so. Hint: register it "
                f"with traits=('curriculum',).{where}"
            )

    def probabilities(self, update: Any) -> torch.Tensor:
        """
        The probability of each timestep at an update.

        Args:
            update (`int` or integer array): Updates done so far; 0 at the first one. Past the end of the run a density
                stays where it is.

        Returns:
            `torch.Tensor`: float64 of shape `(T,)` that sums to 1; `(num_updates, T)` for an array. A pure function of the
            update, except for samplers that follow the losses, which return their current density.
        """
        if not np.issubdtype(np.asarray(update).dtype, np.integer) or np.min(update, initial=0) < 0:
            wanted = "a whole number in [0, inf), or an array of them"
            raise must_be("update", update, wanted, "it is the number of optimizer updates done so far")
        if self.state is not None:
            return self.state.probabilities().expand(*np.shape(update), -1)
        progress = Progress(update if np.ndim(update) == 0 else np.asarray(update), self.num_training_steps)
        weights = self._entry(progress, self.levels, **self._own)
        with np.errstate(over="ignore"):  # reported below
            total = weights.sum(axis=-1, keepdims=True)
        if not ((total > 0) & np.isfinite(total)).all():
            raise LabError(
                f"{self.name!r} with {self._own} gives no timestep any probability that can be computed. Choose "
                f"less extreme values.{self._entry.where}"
            )
        return torch.from_numpy(np.broadcast_to(weights / total, (*np.shape(update), weights.shape[-1])).copy())

    @checked
    def sample(
        self,
        batch_size: int,
        update: int,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """
        Timesteps for the images of an update, after `update` updates: int64 of shape `(batch_size,)`, in `[0, T)`.

        The first draw is that of diffusers' scripts; where the density is uniform, it is the result. Other densities push
        the same numbers through their inverse distribution function, so that two samplers with one generator draw timesteps
        of the same rank. The result is on `device`, else on the generator's.
        """
        _BATCH.check("batch_size", batch_size, "it is the number of images of the update")
        num = self.num_train_timesteps
        where = generator.device if generator is not None else torch.device(device or "cpu")
        drawn = torch.randint(0, num, (batch_size,), generator=generator, device=where)
        if self.draw != "independent" or not self._is_uniform(update):
            inside = torch.rand(batch_size, generator=generator, device=where, dtype=torch.float64)
            # Rounding can turn it into 1.
            u = self._spread((drawn + inside) / num, generator).clamp(max=_BELOW_ONE)
            drawn = torch.searchsorted(self._cumulative(update, where), u, right=True).clamp(max=num - 1)
        return drawn if device is None else drawn.to(device, non_blocking=True)

    def _spread(self, u: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        """Independent numbers in [0, 1) as stratified or antithetic ones."""
        if self.draw == "stratified":
            strata = torch.randperm(len(u), generator=generator, device=u.device)
            return (strata + u) / len(u)
        if self.draw == "antithetic":
            pairs = len(u) // 2
            return torch.cat([u[: len(u) - pairs], 1 - u[:pairs]])
        return u

    def _is_uniform(self, update: int) -> bool:
        # Whether a sampler that follows the losses is still uniform is known only on the device.
        if self.state is not None:
            return False
        probabilities = self._now(update).numpy()  # on the CPU: no device is waited for
        return bool((probabilities == probabilities[0]).all())

    def _now(self, update: int) -> torch.Tensor:
        """[`probabilities`] of one update, cached until the next."""
        if self.state is not None:
            return self.probabilities(update)
        key = update if self.moves else 0
        if key not in self._cached:
            self._cached = {key: self.probabilities(update)}
        return self._cached[key]

    def _cumulative(self, update: int, device: torch.device) -> torch.Tensor:
        probabilities = self._now(update)
        if self.state is not None or device not in self._cached:
            cumulative = probabilities.cumsum(0)
            self._cached[device] = (cumulative / cumulative[-1]).to(device, non_blocking=True)
        return self._cached[device]

    @checked
    def loss_weights(self, timesteps: torch.Tensor, update: int) -> torch.Tensor | None:
        """Factors on the losses of timesteps drawn after `update` updates: `1 / (T p)` if `unbiased`, else `None`."""
        if not self.unbiased or (self.state is None and self._is_uniform(update)):
            return None
        check_indices(timesteps)
        weights = 1 / (self.num_train_timesteps * self._now(update))
        return weights.float().to(timesteps.device, non_blocking=True)[timesteps]


@checked
def get_timestep_sampler(
    name: str,
    num_train_timesteps: int | None = None,
    num_training_steps: int | None = None,
    noise_scheduler: Any = None,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> TimestepSampler:
    """
    A timestep sampler by name.

    Args:
        name (`str`): A name of [`list_timestep_samplers`] or a spec string such as `"clts:sigma=0.5"`.
        num_train_timesteps (`int`, *optional*): T; known from `noise_scheduler` if that is given.
        num_training_steps (`int`, *optional*): Optimizer updates of the run; curricula need it.
        noise_scheduler (*optional*): A diffusers scheduler with `alphas_cumprod`, or of flow matching, whose table begins
            with the most noise: timestep t is its entry T - 1 - t. Densities over the noise level need to know the noise;
            without a scheduler it is that of `DDPMScheduler()`, linear betas from 1e-4 to 0.02.
        device (*optional*): Where a sampler that follows the losses stores them.
        **kwargs: The sampler's own parameters, as `lrlab list timesteps --json` shows them.

    Raises:
        LabError: for unknown names and parameters, values out of range, and densities that are 0 everywhere.
    """
    choice = choose(name, kwargs, TIMESTEP_SAMPLERS)
    levels = noise_levels(noise_scheduler, num_train_timesteps)
    sampler = TimestepSampler(choice.name, choice.kwargs, levels, num_training_steps, device)
    prediction_type = prediction_type_of(noise_scheduler)
    sampler.losses_are(prediction_type or "epsilon")
    if prediction_type and (warning := contradiction(choice.name, prediction_type)):
        warnings.warn(warning, stacklevel=2)
    return sampler


def contradiction(name: str, prediction_type: str) -> str | None:
    """A warning if a sampler's premise does not hold for what the model predicts, else `None`."""
    if "epsilon" not in TIMESTEP_SAMPLERS[name].traits or prediction_type == "epsilon":
        return None
    here = (
        "The velocity of flow matching is as hard to predict at high noise as at low"
        if prediction_type == FLOW_VELOCITY
        else f"For prediction_type={prediction_type!r} high noise is the hard end"
    )
    return (
        f"{name!r} assumes that high noise is easy. That holds for a model that predicts the noise, as the noisy image is "
        f"nearly the answer. {here}. Use 'uniform' or 'stratified'."
    )
