"""A loss weighting of the registry in a script that is not ours, where it reduces `F.mse_loss` or asks for SD3's weights."""

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
from ..script.source import LOSS, WEIGHTING, HostScript, NotRecognised, called_in
from . import timesteps
from .clock import HostClock, clock_of
from .timesteps import TimestepHook

# Weights of the script's own that cannot be multiplied by another.
_OWN_WEIGHTS = {"snr_gamma": (None,), "weighting_scheme": (None, "none", "logit_normal", "mode")}


def recognise(script: HostScript) -> str:
    """Where a script weighs or reduces its losses; [`NotRecognised`] if it does neither, or draws otherwise."""
    timesteps.recognise(script)  # by which it is known what each loss is of
    if weighted := script.calls(WEIGHTING):
        return f"{WEIGHTING} gives the weights ({called_in(weighted)})"
    timesteps.check_one_loss(script)
    if not script.calls(LOSS):
        raise NotRecognised(f"it reduces no F.{LOSS} and calls no {WEIGHTING}")
    without = [flag for flag in ("snr_gamma", "with_prior_preservation") if script.mentions(flag)]
    but = f", without {' and '.join('--' + flag for flag in without)}" if without else ""
    return f"F.{LOSS} reduces the losses ({called_in(script.calls(LOSS))}){but}"


def make(host: Host) -> Hook | None:
    """Also without a weighting, where a sampler is made up for by weights."""
    timesteps = cast(TimestepHook, host.hooks["timesteps"])
    if not host.options.loss_weighting and not timesteps.is_unbiased:
        return None
    return WeightingHook(host.script, clock_of(host), timesteps, host.options.loss_weighting)


class WeightingHook:
    """Multiplies the loss of each image by the weight of its noise level."""

    def __init__(self, script: HostScript, clock: HostClock, timesteps: TimestepHook, spec: str | None):
        self.script, self.run, self.timesteps = script, clock.run, timesteps
        self.name, self.kwargs = resolve_spec(spec or "none", None, LOSS_WEIGHTINGS)
        self.is_plain = "plain" in LOSS_WEIGHTINGS[self.name].traits
        if "feedback" in LOSS_WEIGHTINGS[self.name].traits:
            raise LabError(
                f"--loss_weighting {self.name!r} follows the losses of single images, which a script does not show. Choose "
                "one that does not."
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

    def check_arguments(self) -> None:
        """Before the first loss: whether the script weighs by itself, or its batches hold something else too."""
        arguments = self.run.arguments
        for name, harmless in _OWN_WEIGHTS.items():
            if arguments.get(name) not in harmless:
                raise LabError(
                    f"The script weighs losses by itself (--{name} {arguments[name]}), and two weights would be multiplied. "
                    "Leave out that or --loss_weighting."
                )
        if arguments.get("with_prior_preservation") and not self.by_sigma:
            raise LabError(
                "With --with_prior_preservation, a batch holds images of the class too, whose losses are apart. Leave out "
                "that or --loss_weighting."
            )

    def _weights(self) -> torch.Tensor:
        """The weights of the images of the last draw: float32 of shape `(batch_size,)`."""
        hook = self.timesteps
        assert hook.levels is not None
        assert hook.timesteps is not None
        if self._table is None:
            # Where the script draws: nothing is copied at every loss.
            self._table = self._make_table(hook.levels, hook.prediction_type).to(hook.timesteps.device)
        weights = self._table[hook.timesteps]
        unbiased = hook.loss_weights()
        self.num_seen += 1
        return weights if unbiased is None else weights * unbiased

    def _make_table(self, levels: NoiseLevels, prediction_type: str) -> torch.Tensor:
        """Weights on the script's own error: float32 of shape `(T,)`."""
        self.check_arguments()
        if self.is_plain:
            return torch.ones(levels.num_train_timesteps)
        table = LossWeighting(self.name, self.kwargs, levels, prediction_type).table
        if self.run.arguments.get("precondition_outputs") and self.by_sigma:
            # SD3's scripts turn the predicted velocity into data, whose squared error is sigma^2 times as large.
            table = table * torch.from_numpy((1 + levels.snr**0.5) ** 2)
        return table.float()

    def _weighted_loss(self, mse_loss: Any, prediction: Any, target: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        reduction = kwargs.get("reduction", "mean")
        timesteps = self.timesteps.timesteps
        if self.script.caller(self.script.calls(LOSS)) is None or timesteps is None:
            return cast(torch.Tensor, mse_loss(prediction, target, *args, **kwargs))
        understood = not args and set(kwargs) <= {"reduction"} and reduction in ("mean", "none")
        if not understood or len(prediction) != len(timesteps):
            raise LabError(
                f"--loss_weighting does not understand this loss: {counted(len(prediction), 'image')} for "
                f"{counted(len(timesteps), 'timestep')}, reduction {reduction!r}. Leave it out."
            )
        if reduction == "none" and self.timesteps.prediction_type == "sample":
            raise LabError(
                "The script predicts images and weighs their losses by itself, and two weights would be multiplied. "
                "Leave out --loss_weighting."
            )
        weights = self._weights().to(prediction.device)
        weights = weights.view(-1, *[1] * (prediction.ndim - 1))
        losses: torch.Tensor = mse_loss(prediction, target, reduction="none") * weights
        return losses if reduction == "none" else losses.mean()

    def _weigh_sigmas(self, weigh: Callable[..., torch.Tensor], weighting_scheme: str, sigmas: Any = None) -> torch.Tensor:
        own = weigh(weighting_scheme, sigmas)
        if self.script.caller(self.script.calls(WEIGHTING)) is None or self.timesteps.timesteps is None:
            return own
        return own * self._weights().to(own).view(-1, *[1] * (own.ndim - 1))

    def report(self) -> str:
        seen = f"{counted(self.num_seen, 'loss')}" if self.num_seen else "no loss"
        return f"--loss_weighting {self.name}: {seen} weighted."
