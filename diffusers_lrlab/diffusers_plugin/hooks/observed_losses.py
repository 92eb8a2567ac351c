"""The loss of each image of a third-party script, for a sampler that follows the losses.

`F.mse_loss` gets the predictions and targets of single images. Scripts for flow matching ask for weights and multiply the
squared errors by them; there, the gradient with respect to the weight of an image is its squared error, up to a factor that
the loss itself determines.
"""

from typing import Any, cast

import torch

from ...core.errors import LabError
from ...core.words import counted
from ..host.hook import Host, StatefulHook
from ..script.source import LOSS, WEIGHTING, HostScript, NotRecognised
from .clock import HostClock, clock_of
from .timesteps import TimestepHook, check_one_loss
from .weighting import WeightingHook, check_own_weights, converts_to_data


def make(host: Host) -> StatefulHook | None:
    hook = cast(TimestepHook, host.hooks["timesteps"])
    if not hook.follows_losses:
        return None
    check_one_loss(host.script)
    if not host.script.calls(LOSS) and not host.script.calls(WEIGHTING):
        raise NotRecognised(f"it calls neither F.{LOSS} nor {WEIGHTING}, so the losses of single images are not visible")
    return LossesHook(host.script, clock_of(host), hook, cast(WeightingHook | None, host.hooks.get("weighting")))


class LossesHook:
    """
    Shows a sampler the losses of the images of all processes, once an update, before the timesteps of the next one.

    They are squared errors of what the script predicts, times the weights of `--loss_weighting`. Weights of the script's own
    are refused.
    """

    def __init__(self, script: HostScript, clock: HostClock, timesteps: TimestepHook, weighting: WeightingHook | None):
        self.script, self.run, self.timesteps, self.weighting = script, clock.run, timesteps, weighting
        self.by_sigma = bool(script.calls(WEIGHTING))
        self.num_seen = 0  # batches of timesteps, up to the last whose losses were seen
        self._leaf: torch.Tensor | None = None  # weights that the script multiplies the errors of a batch by
        self._seen: list[torch.Tensor] = []  # timesteps and losses of the update's micro-batches, float64 `(2, images)`
        self._update = -1  # of these
        self._begun = False  # whether the sampler knows what the losses are
        self._resumed: dict[str, Any] = {}

    def install(self) -> None:
        self.timesteps.before_update.append(self._at_update)
        if self.by_sigma:
            from accelerate import Accelerator
            from diffusers import training_utils

            self.run.patches.wrap(training_utils, WEIGHTING, self._follow_weights)
            self.run.patches.wrap(Accelerator, "backward", self._read_gradients)
        else:
            self.run.patches.wrap(torch.nn.functional, LOSS, self._read_errors)

    # --- seen ---------------------------------------------------------------------------------------------------------

    def _new_timesteps(self, name: str) -> torch.Tensor | None:
        """The last timesteps at their first loss, for a call of the script to a function of this name."""
        hook = self.timesteps
        if hook.num_seen == self.num_seen or self.script.caller(self.script.calls(name)) is None:
            return None
        return hook.timesteps

    def _read_errors(self, mse_loss: Any, prediction: Any, target: Any, /, *args: Any, **kwargs: Any) -> torch.Tensor:
        timesteps = self._new_timesteps(LOSS)
        if timesteps is not None:
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

    def _follow_weights(self, weigh: Any, /, *args: Any, **kwargs: Any) -> torch.Tensor:
        weights = cast(torch.Tensor, weigh(*args, **kwargs))
        if self._new_timesteps(WEIGHTING) is None or not torch.is_grad_enabled():
            return weights
        # In float32, since its gradient is read: scripts multiply by `weights.float()`, of the same values.
        self._leaf = weights.detach().float().requires_grad_()
        return self._leaf

    def _read_gradients(self, backward: Any, accelerator: Any, loss: torch.Tensor, /, **kwargs: Any) -> None:
        leaf, timesteps, self._leaf = self._leaf, self.timesteps.timesteps, None
        backward(accelerator, loss, **kwargs)
        if leaf is None or timesteps is None:
            return
        if leaf.grad is None or leaf.numel() != len(timesteps):
            raise LabError(
                f"The loss does not depend on the weights of {counted(len(timesteps), 'image')} that the script asked for. "
                f"Remove --timestep_sampler {self.timesteps.name}."
            )
        # Loss scaling and accumulation multiply all gradients alike; the loss is the mean of weights times errors.
        weights, slopes = leaf.detach().flatten().double(), leaf.grad.flatten().double()
        self._add(timesteps, slopes * (loss.detach().double() * len(slopes) / (weights * slopes).sum()))

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
        converts = converts_to_data(self.run, self.by_sigma)
        weighting = self.weighting
        hook.sampler.losses_are(
            "sample" if converts else hook.prediction_type, None if weighting is None else lambda: weighting.table
        )
        hook.check_beginning(hook.sampler)
        self._begun = True

    # --- shown --------------------------------------------------------------------------------------------------------

    def _at_update(self, update: int) -> None:
        """Shows the sampler the losses of the last update. Those of one that a gradient scaler skipped are left out."""
        sampler = self.timesteps.sampler
        if sampler is None:
            return
        if self._resumed:
            self._restore(self._resumed)
        if self._seen and self._update != update:
            timesteps, losses = torch.cat(self._seen, dim=1).cpu()  # where the sampler is
            sampler.observe(timesteps.long(), losses)
        self._seen = []

    def state_dict(self, is_at_end: bool) -> dict[str, Any]:
        """
        The sampler's state and the losses that it has not seen: the same in all processes, so only the first process returns
        it.
        """
        sampler = self.timesteps.sampler
        if sampler is None or not self.run.accelerator.is_main_process:
            return self._resumed if sampler is None else {}
        return {
            "sampler": {name: _as_lists(value) for name, value in sampler.state_dict().items()},
            "seen": torch.cat(self._seen, dim=1).tolist() if self._seen else [],
            "update": self._update,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = state

    def _restore(self, state: dict[str, Any]) -> None:
        sampler = self.timesteps.sampler
        assert sampler is not None
        saved = {name: _as_tensor(value) for name, value in state["sampler"].items()}
        if {name: value.shape for name, value in saved.items()} != {k: v.shape for k, v in sampler.state_dict().items()}:
            raise LabError(
                f"--timestep_sampler {self.timesteps.name}: the checkpoint has the state of this sampler with other "
                "arguments. Resume with the same arguments."
            )
        sampler.load_state_dict(saved)
        self._seen, self._update = [torch.tensor(state["seen"], dtype=torch.float64)] * bool(state["seen"]), state["update"]
        self._begin()
        self._resumed = {}

    def report(self) -> str:
        return "" if self.num_seen else f"--timestep_sampler {self.timesteps.name}: no losses were seen."


def _as_lists(value: torch.Tensor) -> dict[str, Any]:
    return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}


def _as_tensor(saved: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(saved["values"], dtype=getattr(torch, saved["dtype"]))
