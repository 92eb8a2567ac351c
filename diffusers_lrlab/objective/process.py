"""
The noise process: how data become noise, and the target of the model.

Code outside this package uses the noise level of a timestep (alpha, sigma, SNR) and asks the process for the rest.
`processes.py` has those of this package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..core.errors import LabError
from ..core.plugins import described, registered_code_located, titled, unusable, unwrapped, where
from ..core.registry import Parameter, Registry
from ..timesteps.noise_levels import NoiseLevels

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..data.batch import Batch

NUM_STEPS = "[1, 1e5]"  # the range of numbers of timesteps
BetaSchedule = Literal["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid", "laplace"]
PredictionType = Literal["epsilon", "sample", "v_prediction"]


def _check_process(value: Any, *_: Any) -> Any:
    if not isinstance(value, NoiseProcess):
        raise unusable("an object of a subclass of NoiseProcess", value)
    return value


OBJECTIVES = Registry(
    "objective",
    common=(
        Parameter("num_steps", int, None, "timesteps; derived from the kind of data: 1000, or 100 for points", NUM_STEPS),
    ),
    returns=_check_process,
)
"""
Entries are functions `f(**parameters, is_bounded) -> NoiseProcess`, where `is_bounded` says whether the data lie in [-1, 1].
"""

DEFAULT_OBJECTIVE = "ddpm"


def make_process(objective: str, *, is_bounded: bool, **parameters: Any) -> NoiseProcess:
    """The noise process of an objective in `OBJECTIVES`, by all its parameters and a fact of the data."""
    return OBJECTIVES[objective](is_bounded=is_bounded, **parameters)


def check_shape(model: Any, prediction: Any, data: torch.Tensor) -> None:
    """Raises a `LabError` unless a prediction is one of real numbers for each of the data. Reads nothing off a device."""
    # Other shapes would be broadcast: one coordinate compared with each of two is a loss, too.
    if getattr(prediction, "shape", None) != data.shape or not prediction.is_floating_point():
        wanted = f"a tensor of real numbers of shape {tuple(data.shape)}, like its input"
        raise _refused(model, f"must return .sample as {wanted}, not {described(prediction)}.")


def check_first(model: Any, prediction: torch.Tensor, noisy: torch.Tensor) -> None:
    """Raises a `LabError` for a prediction at the first update that cannot be learned from. Reads off the device."""
    import torch

    if torch.is_grad_enabled() and not prediction.requires_grad:
        raise _refused(
            model,
            "returns a prediction without a gradient, so nothing would be learned. Do not detach it, and make it depend on "
            "trained parameters.",
        )
    if not prediction.isfinite().all() and noisy.isfinite().all():
        raise _refused(
            model,
            "returns predictions that are not finite (nan or inf) before the first update, for finite input. Look at its "
            "forward() and its initial weights, or use another --mixed_precision.",
        )


def _refused(model: Any, problem: str) -> LabError:
    """The error for a model, with the file and line of a third-party one."""
    title, kind = titled(model), type(unwrapped(model))
    return LabError(f"{title or f'The model {kind.__name__}'} {problem}{where(kind.forward) if title else ''}")


class NoiseProcess(ABC):
    """Data with noise at timesteps `0 ... T - 1`, which grow with the noise, and the loss of a prediction."""

    levels: NoiseLevels  # of each timestep
    prediction_type: str  # in `timesteps.noise_levels.PREDICTIONS`
    scheduler: Any  # of diffusers, saved with the pipeline
    # Keys of the scheduler's configuration that decide what a model learns, and the options that set them.
    scheduler_options: ClassVar[Mapping[str, str]] = {}
    # The remedy for a last timestep that keeps much of the data.
    terminal_noise_hint: ClassVar[str] = "Choose other parameters of --objective."

    @property
    def num_train_timesteps(self) -> int:
        return self.levels.num_train_timesteps

    @property
    @abstractmethod
    def built_in_weights(self) -> np.ndarray:
        """Weights that [`prediction_losses`] has on the squared error of each timestep: float64 of shape `(T,)`."""

    @abstractmethod
    def add_noise(self, data: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """The input of the model, from data and standard normal noise of one shape, and timesteps int64 `(batch,)`."""

    @abstractmethod
    def model_time(self, timesteps: torch.Tensor) -> torch.Tensor:
        """
        The time that the model is called with, as the scheduler gives it in sampling: of the shape of the timesteps.

        Timesteps are int64, or float between two of them: there, log sigma is interpolated linearly.
        """

    def sampling_scheduler(self) -> Any:
        """A new scheduler like that of the pipeline."""
        return type(self.scheduler).from_config(self.scheduler.config)

    @abstractmethod
    def describe(self) -> list[tuple[str, str]]:
        """Labels and values for plan and card."""

    def contradictions(self, saved: Mapping[str, Any]) -> list[str]:
        """Differences to the scheduler configuration `saved` beside a model, each with a remedy; empty if there are none."""
        own, found = self.scheduler.config, []
        for key, option in self.scheduler_options.items():
            if key in saved and saved[key] != own[key]:
                found.append(
                    f"has {key}={saved[key]!r}, this run has {option} {own[key]}. If the model is to stay comparable, give "
                    f"{option} {saved[key]}."
                )
        return found

    @abstractmethod
    def prediction_losses(
        self, prediction: torch.Tensor, data: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """The loss of each prediction, means over pixels or coordinates: float32 of shape `(batch,)`."""

    def losses(
        self, model: Any, batch: Batch, noise: torch.Tensor, timesteps: torch.Tensor, is_first: bool = False
    ) -> torch.Tensor:
        """
        [`prediction_losses`] of a model that is called as
        `model(noisy, model_time(timesteps), **batch.conditions).sample`.

        Raises a `LabError` for a prediction that is not of the shape of the data; with `is_first`, which reads off the
        device, also for one that is not finite though the data are, or that has no gradient.
        """
        data = batch.data
        noisy = self.add_noise(data, noise, timesteps)
        with registered_code_located(model):
            output = model(noisy, self.model_time(timesteps), **batch.conditions)
        if not hasattr(output, "sample"):
            wanted = "an object with .sample, such as diffusers' UNet2DOutput"
            raise _refused(model, f"must return {wanted}, not {described(output)}.")
        prediction = output.sample
        check_shape(model, prediction, data)
        if is_first:
            check_first(model, prediction, noisy)
        return self.prediction_losses(prediction, data, noise, timesteps)

    # --- at any noise level, between timesteps too: `scaled` is data + sigma * noise, sigma = 1 / sqrt(SNR) --------------

    @abstractmethod
    def model_input(self, scaled: torch.Tensor, sigma: float) -> torch.Tensor:
        """The input of the model that corresponds to `scaled`."""

    @abstractmethod
    def predicted_noise(self, prediction: torch.Tensor, scaled: torch.Tensor, sigma: float) -> torch.Tensor:
        """The noise in `scaled` that a prediction implies."""
