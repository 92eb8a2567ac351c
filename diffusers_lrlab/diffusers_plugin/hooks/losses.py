"""The losses of single images in a third-party script, at its `F.mse_loss`: weighted, and shown to a sampler and to the log.

Scripts for flow matching reduce their losses by hand, with the weights of SD3's function, which are multiplied there.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch

from ...core.errors import LabError
from ...core.spec import choose
from ...core.words import counted
from ...timesteps.registries import LOSS_WEIGHTINGS
from ...timesteps.weighting import LossWeighting
from ..host.source import LOSS, WEIGHTING, HostScript, NotRecognised, lines_of
from ..installed_hooks import Hook, Host
from . import timesteps
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


def recognise_images(script: HostScript) -> str:
    """For hooks that look at the losses of single images."""
    timesteps.recognise(script)
    timesteps.check_one_loss(script)
    if not script.calls(LOSS):
        raise NotRecognised(f"it does not call F.{LOSS}, so the losses of single images are not visible")
    return f"F.{LOSS} shows the loss of each image ({lines_of(script.calls(LOSS))})"


def make(host: Host) -> Hook:
    recognise(host.script)
    hook: TimestepHook = host.need("timesteps")
    losses = LossHook(host.script, hook, host.options.loss_weighting, host.given("timesteps", "weighting"))
    if hook.follows_losses:
        recognise_images(host.script)
        LossFeedback(losses)
    return losses


class LossHook:
    """
    Multiplies the loss of each image by the weight of its noise level, and by that which corrects a sampler's density.

    Before, `on_losses` get the timesteps of a batch and the squared errors of what the script predicts, `(batch_size,)`.
    """

    def __init__(self, script: HostScript, timesteps: TimestepHook, spec: str | None, requested: str):
        self.script, self.run, self.timesteps, self.requested = script, timesteps.run, timesteps, requested
        self.weighs = bool(spec) or timesteps.is_unbiased
        choice = choose(spec or "none", None, LOSS_WEIGHTINGS)
        self.name, self.kwargs, traits = choice.name, choice.kwargs, choice.entry.traits
        self.is_plain = "plain" in traits
        if "feedback" in traits:
            raise LabError(
                f"--loss_weighting {self.name!r} needs the loss of each image before it is weighted. Choose a weighting "
                "that follows no losses."
            )
        self.by_sigma = bool(script.calls(WEIGHTING))
        self.num_seen = 0  # losses that were weighted
        self.on_losses: list[Callable[[torch.Tensor, torch.Tensor], None]] = []
        self._num_batches = 0  # of timesteps, up to the last whose losses were seen

    def install(self) -> None:
        if self.weighs and self.by_sigma:
            from diffusers import training_utils

            self.run.patches.wrap(training_utils, WEIGHTING, self._weigh_sigmas, self.script.calling(WEIGHTING))
        if self.on_losses or not self.by_sigma:
            self.run.patches.wrap(torch.nn.functional, LOSS, self._loss, self.script.calling(LOSS))

    # --- weights ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def table(self) -> torch.Tensor:
        """The weights of all timesteps on the script's own error, without those for a density: float32 `(T,)`."""
        self.check_own_weights("--loss_weighting", self.by_sigma)
        levels, drawn = self.timesteps.levels, self.timesteps.timesteps
        assert levels is not None
        assert drawn is not None
        table = torch.ones(levels.num_train_timesteps)
        if not self.is_plain:
            table = LossWeighting(self.name, self.kwargs, levels, self.timesteps.prediction_type).table
            if self.by_sigma and self.run.arguments.get("precondition_outputs"):
                # SD3's scripts convert the predicted velocity to data, whose squared error is sigma^2 times as large.
                table = table * torch.from_numpy((1 + levels.snr**0.5) ** 2)
        return table.float().to(drawn.device)  # so that nothing is copied for each loss

    def check_own_weights(self, option: str, by_sigma: bool = False) -> None:
        """Before the first loss: an error if the script weights losses itself, or a batch holds other images as well."""
        arguments = self.run.arguments
        for name, harmless in _OWN_WEIGHTS.items():
            if arguments.get(name) not in harmless:
                raise LabError(
                    f"The script weights losses itself (--{name} {arguments[name]}), and two weights would be multiplied. "
                    f"Remove that or {option}."
                )
        if arguments.get("with_prior_preservation") and not by_sigma:
            raise LabError(
                "With --with_prior_preservation, a batch also holds class images, whose losses are separate. Remove that or "
                f"{option}."
            )

    def _weights(self) -> torch.Tensor:
        """The weights of the images of the last batch: float32 of shape `(batch_size,)`."""
        weights, unbiased = self.table[self.timesteps.timesteps], self.timesteps.loss_weights()
        self.num_seen += 1
        return weights if unbiased is None else weights * unbiased

    def _weigh_sigmas(
        self, weigh: Callable[..., torch.Tensor], weighting_scheme: str, sigmas: Any = None, /
    ) -> torch.Tensor:
        own = weigh(weighting_scheme, sigmas)
        if self.timesteps.timesteps is None:
            return own
        return own * self._weights().to(own).view(-1, *[1] * (own.ndim - 1))

    # --- F.mse_loss ---------------------------------------------------------------------------------------------------

    def _loss(self, mse_loss: Any, prediction: Any, target: Any, /, *args: Any, **kwargs: Any) -> torch.Tensor:
        drawn, weighs = self.timesteps.timesteps, self.weighs and not self.by_sigma
        if drawn is None:
            return cast(torch.Tensor, mse_loss(prediction, target, *args, **kwargs))
        reduction = kwargs.get("reduction", "mean")
        if weighs or self.timesteps.follows_losses:
            self._check(len(prediction), len(drawn), reduction, is_plain=not args and {*kwargs} <= {"reduction"})
        if self._num_batches != self.timesteps.num_seen:  # the first loss of these timesteps
            self._num_batches = self.timesteps.num_seen
            with torch.no_grad():
                for call in self.on_losses:
                    call(drawn, (prediction - target).float().square().flatten(1).mean(1))
        if not weighs:
            return cast(torch.Tensor, mse_loss(prediction, target, *args, **kwargs))
        weights = self._weights().to(prediction.device).view(-1, *[1] * (prediction.ndim - 1))
        losses: torch.Tensor = mse_loss(prediction, target, reduction="none") * weights
        return losses if reduction == "none" else losses.mean()

    def _check(self, num_images: int, num_drawn: int, reduction: str, is_plain: bool) -> None:
        """Refuses losses whose images are not those of the timesteps, and those with unknown weights."""
        if num_images != num_drawn or not is_plain or reduction not in ("mean", "none"):
            raise LabError(
                f"The script computes a loss of {counted(num_images, 'image')} after drawing "
                f"{counted(num_drawn, 'timestep')}, with reduction {reduction!r}, which cannot be weighted. Remove "
                f"{self.requested}."
            )
        if reduction == "none" and self.timesteps.prediction_type == "sample":
            raise LabError(
                "The script predicts images and weights their losses itself, and two weights would be multiplied. Remove "
                f"{self.requested}."
            )

    def report(self) -> str:
        if self.timesteps.follows_losses and not self._num_batches:
            return f"--timestep_sampler {self.timesteps.name}: no losses were seen."
        return f"--loss_weighting {self.name}: {counted(self.num_seen, 'loss')} weighted." if self.weighs else ""


class LossFeedback:
    """
    Shows a sampler the losses of the images of all processes, once an update, before the timesteps of the next one.

    They are times the weights of `--loss_weighting`. Weights of the script's own are refused.
    """

    def __init__(self, losses: LossHook):
        self.losses, self.timesteps, self.run = losses, losses.timesteps, losses.run
        self.option = f"--timestep_sampler {self.timesteps.name}"
        self._seen: list[torch.Tensor] = []  # timesteps and losses of the update's micro-batches, float64 `(2, images)`
        self._update = -1  # of these
        self.has_begun = False  # whether the sampler knows what the losses are
        losses.on_losses.append(self._add)
        self.timesteps.before_update.append(self._at_update)

    def _add(self, timesteps: torch.Tensor, errors: torch.Tensor) -> None:
        """Keeps the errors of a micro-batch, of all processes."""
        if not self.has_begun:
            self._begin()
        losses = errors * self.losses.table[timesteps].double() if self.losses.weighs else errors.double()
        both = torch.stack([timesteps.double(), losses.double()], dim=1)
        self._seen.append(self.run.accelerator.gather(both).T)
        self._update = self.timesteps.last_update

    def _begin(self) -> None:
        """Before the first loss: tells the sampler what the losses are."""
        hook, losses = self.timesteps, self.losses
        losses.check_own_weights(self.option)
        assert hook.sampler is not None
        hook.sampler.losses_are(hook.prediction_type, (lambda: losses.table) if losses.weighs else None)
        hook.check_beginning(hook.sampler)
        self.has_begun = True

    def _at_update(self, update: int) -> None:
        """Shows the sampler the losses of the last update. Those of one that a gradient scaler skipped are left out."""
        sampler = self.timesteps.sampler
        if sampler is None:
            return
        if self._seen and self._update != update:
            timesteps, losses = torch.cat(self._seen, dim=1).cpu()  # where the sampler is
            sampler.observe(timesteps.long(), losses)
        self._seen = []
