"""The loss of each image of a third-party script, for a sampler that follows the losses.

`F.mse_loss` gets the predictions and targets of single images.
"""

from typing import Any, cast

import torch

from ...core.errors import LabError
from ...core.words import counted
from ..host.hook import Hook, Host
from ..script.source import LOSS, HostScript, NotRecognised
from .clock import HostClock, clock_of
from .timesteps import TimestepHook, check_one_loss
from .weighting import WeightingHook, check_own_weights


def make(host: Host) -> Hook | None:
    hook = cast(TimestepHook, host.hooks["timesteps"])
    if not hook.follows_losses:
        return None
    check_one_loss(host.script)
    if not host.script.calls(LOSS):
        raise NotRecognised(f"it does not call F.{LOSS}, so the losses of single images are not visible")
    return LossesHook(host.script, clock_of(host), hook, cast(WeightingHook | None, host.hooks.get("weighting")))


class LossesHook:
    """
    Shows a sampler the losses of the images of all processes, once an update, before the timesteps of the next one.

    They are squared errors of what the script predicts, times the weights of `--loss_weighting`. Weights of the script's own
    are refused.
    """

    def __init__(self, script: HostScript, clock: HostClock, timesteps: TimestepHook, weighting: WeightingHook | None):
        self.script, self.run, self.timesteps, self.weighting = script, clock.run, timesteps, weighting
        self.num_seen = 0  # batches of timesteps, up to the last whose losses were seen
        self._seen: list[torch.Tensor] = []  # timesteps and losses of the update's micro-batches, float64 `(2, images)`
        self._update = -1  # of these
        self._begun = False  # whether the sampler knows what the losses are

    def install(self) -> None:
        self.timesteps.before_update.append(self._at_update)
        self.run.patches.wrap(torch.nn.functional, LOSS, self._read_errors)

    def _read_errors(self, mse_loss: Any, prediction: Any, target: Any, /, *args: Any, **kwargs: Any) -> torch.Tensor:
        timesteps = self.timesteps.timesteps
        is_first = self.timesteps.num_seen != self.num_seen  # loss of these timesteps
        if timesteps is not None and is_first and self.script.is_calling(self.script.calls(LOSS)):
            if len(prediction) != len(timesteps):
                of = f"{counted(len(prediction), 'image')} after drawing {counted(len(timesteps), 'timestep')}"
                raise LabError(f"The script computes a loss of {of}. Remove --timestep_sampler {self.timesteps.name}.")
            if kwargs.get("reduction", "mean") != "mean" and self.timesteps.prediction_type == "sample":
                raise LabError(
                    "The script predicts images and weights their losses itself, with unknown weights. Remove "
                    f"--timestep_sampler {self.timesteps.name}."
                )
            with torch.no_grad():
                self._add(timesteps, (prediction - target).float().square().flatten(1).mean(1))
        return cast(torch.Tensor, mse_loss(prediction, target, *args, **kwargs))

    def _add(self, timesteps: torch.Tensor, errors: torch.Tensor) -> None:
        """Keeps the errors of a micro-batch, of all processes."""
        hook = self.timesteps
        if not self._begun:
            self._begin()
        losses = errors.double() if self.weighting is None else errors * self.weighting.table[timesteps].double()
        both = torch.stack([timesteps.double(), losses.double()], dim=1)
        self._seen.append(self.run.accelerator.gather(both).T)
        self.num_seen, self._update = hook.num_seen, hook.last_update

    def _begin(self) -> None:
        """Before the first loss: tells the sampler what the losses are."""
        hook, option = self.timesteps, f"--timestep_sampler {self.timesteps.name}"
        check_own_weights(self.run, option, by_sigma=False)
        assert hook.sampler is not None
        weighting = self.weighting
        hook.sampler.losses_are(hook.prediction_type, None if weighting is None else lambda: weighting.table)
        hook.check_beginning(hook.sampler)
        self._begun = True

    def _at_update(self, update: int) -> None:
        """Shows the sampler the losses of the last update. Those of one that a gradient scaler skipped are left out."""
        sampler = self.timesteps.sampler
        if sampler is None:
            return
        if self._seen and self._update != update:
            timesteps, losses = torch.cat(self._seen, dim=1).cpu()  # where the sampler is
            sampler.observe(timesteps.long(), losses)
        self._seen = []

    def report(self) -> str:
        return "" if self.num_seen else f"--timestep_sampler {self.timesteps.name}: no losses were seen."
