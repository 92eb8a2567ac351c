"""A loss weighting of the registry in a third-party script, at its `F.mse_loss` or its request for SD3's weights."""

from collections.abc import Callable
from typing import Any, cast

import torch

from ...core.errors import LabError
from ...core.spec import resolve_spec
from ...core.words import counted
from ...timesteps.loss_weights import LossWeighting
from ...timesteps.noise_levels import NoiseLevels
from ...timesteps.registries import LOSS_WEIGHTINGS
from ..host.hook import Hook, Host
from ..host.run import HostRun
from ..script.source import LOSS, WEIGHTING, HostScript, NotRecognised, lines_of
from . import timesteps
from .clock import HostClock, clock_of
from .timesteps import TimestepHook

# The script's own weightings, with the values that leave all weights at 1.
_OWN_WEIGHTS = {"snr_gamma": (None,), "weighting_scheme": (None, "none", "uniform", "logit_normal", "mode")}


def recognise(script: HostScript) -> str:
    timesteps.recognise(script)  # they tell which loss is of which noise level
    if weighted := script.calls(WEIGHTING):
        return f"{WEIGHTING} gives the weights ({lines_of(weighted)})"
    timesteps.check_one_loss(script)
    if not script.calls(LOSS):
        raise NotRecognised(f"it calls neither F.{LOSS} nor {WEIGHTING}")
    without = [flag for flag in ("snr_gamma", "with_prior_preservation") if script.mentions(flag)]
    but = f", without {' and '.join('--' + flag for flag in without)}" if without else ""
    return f"F.{LOSS} reduces the losses ({lines_of(script.calls(LOSS))}){but}"


def make(host: Host) -> Hook | None:
    """The hook; it is also made without a weighting, for a sampler whose density is corrected by weights."""
    timestep_hook = cast(TimestepHook, host.hooks["timesteps"])
    if not host.options.loss_weighting and not timestep_hook.is_unbiased:
        return None
    return WeightingHook(host.script, clock_of(host), timestep_hook, host.options.loss_weighting)


def check_own_weights(run: HostRun, option: str, by_sigma: bool) -> None:
    """Before the first loss: an error if the script weights losses itself, or a batch holds other images as well."""
    for name, harmless in _OWN_WEIGHTS.items():
        if run.arguments.get(name) not in harmless:
            own = f"--{name} {run.arguments[name]}"
            raise LabError(
                f"The script weights losses itself ({own}), and two weights would be multiplied. Remove that or {option}."
            )
    if run.arguments.get("with_prior_preservation") and not by_sigma:
        raise LabError(
            "With --with_prior_preservation, a batch also holds class images, whose losses are separate. Remove that or "
            f"{option}."
        )


def converts_to_data(run: HostRun, by_sigma: bool) -> bool:
    """Whether the loss is of data that the script computes from what its model predicts, as SD3's scripts do."""
    return bool(by_sigma and run.arguments.get("precondition_outputs"))


class WeightingHook:
    """Multiplies the loss of each image by the weight of its noise level."""

    def __init__(self, script: HostScript, clock: HostClock, timesteps: TimestepHook, spec: str | None):
        self.script, self.run, self.timesteps = script, clock.run, timesteps
        self.name, self.kwargs = resolve_spec(spec or "none", None, LOSS_WEIGHTINGS)
        traits = LOSS_WEIGHTINGS[self.name].traits
        self.is_plain = "plain" in traits
        if "feedback" in traits:
            raise LabError(
                f"--loss_weighting {self.name!r} needs the loss of each image before it is weighted. Choose a weighting "
                "that follows no losses."
            )
        recognise(script)
        self.by_sigma = bool(script.calls(WEIGHTING))
        self.num_seen = 0
        self._table: torch.Tensor | None = None

    def install(self) -> None:
        if self.by_sigma:
            from diffusers import training_utils

            self.run.patches.wrap(training_utils, WEIGHTING, self._weigh_sigmas)
        else:
            self.run.patches.wrap(torch.nn.functional, "mse_loss", self._weighted_loss)

    @property
    def table(self) -> torch.Tensor:
        """The weights of all timesteps on the script's own error, without those for a density: float32 `(T,)`."""
        hook = self.timesteps
        assert hook.levels is not None
        assert hook.timesteps is not None
        if self._table is None:
            # On the device of the timesteps, so that nothing is copied for each loss.
            self._table = self._make_table(hook.levels, hook.prediction_type).to(hook.timesteps.device)
        return self._table

    def _weights(self) -> torch.Tensor:
        """The weights of the images of the last batch: float32 of shape `(batch_size,)`."""
        hook = self.timesteps
        assert hook.timesteps is not None
        weights = self.table[hook.timesteps]
        unbiased = hook.loss_weights()
        self.num_seen += 1
        return weights if unbiased is None else weights * unbiased

    def _make_table(self, levels: NoiseLevels, prediction_type: str) -> torch.Tensor:
        """Weights of the script's own error: float32 of shape `(T,)`."""
        check_own_weights(self.run, "--loss_weighting", self.by_sigma)
        if self.is_plain:
            return torch.ones(levels.num_train_timesteps)
        table = LossWeighting(self.name, self.kwargs, levels, prediction_type).table
        if converts_to_data(self.run, self.by_sigma):
            # SD3's scripts convert the predicted velocity to data, whose squared error is sigma^2 times as large.
            table = table * torch.from_numpy((1 + levels.snr**0.5) ** 2)
        return table.float()

    def _weighted_loss(self, mse_loss: Any, prediction: Any, target: Any, /, *args: Any, **kwargs: Any) -> torch.Tensor:
        reduction = kwargs.get("reduction", "mean")
        timesteps = self.timesteps.timesteps
        if timesteps is None or not self.script.is_calling(self.script.calls(LOSS)):
            return cast(torch.Tensor, mse_loss(prediction, target, *args, **kwargs))
        understood = not args and set(kwargs) <= {"reduction"} and reduction in ("mean", "none")
        if not understood or len(prediction) != len(timesteps):
            raise LabError(
                f"--loss_weighting does not understand this loss: {counted(len(prediction), 'image')} for "
                f"{counted(len(timesteps), 'timestep')}, reduction {reduction!r}. Remove --loss_weighting."
            )
        if reduction == "none" and self.timesteps.prediction_type == "sample":
            raise LabError(
                "The script predicts images and weights their losses itself, and two weights would be multiplied. Remove "
                "--loss_weighting."
            )
        weights = self._weights().to(prediction.device)
        weights = weights.view(-1, *[1] * (prediction.ndim - 1))
        losses: torch.Tensor = mse_loss(prediction, target, reduction="none") * weights
        return losses if reduction == "none" else losses.mean()

    def _weigh_sigmas(
        self, weigh: Callable[..., torch.Tensor], weighting_scheme: str, sigmas: Any = None, /
    ) -> torch.Tensor:
        own = weigh(weighting_scheme, sigmas)
        if self.timesteps.timesteps is None or not self.script.is_calling(self.script.calls(WEIGHTING)):
            return own
        return own * self._weights().to(own).view(-1, *[1] * (own.ndim - 1))

    def report(self) -> str:
        return f"--loss_weighting {self.name}: {counted(self.num_seen, 'loss')} weighted."
