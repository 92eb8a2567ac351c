"""How trainers weight losses, a function for each shape of call."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ....core.errors import LabError
from ....core.words import counted
from .timesteps import trainer_frame


class Weights(Protocol):
    """An object that gives the weights of the images of the last batch."""

    def has_batch(self) -> bool: ...
    def batch_weights(self) -> torch.Tensor: ...


def _wide(hook: Weights, losses: torch.Tensor) -> torch.Tensor:
    """The weights in the shape of losses, whose first dimension is that of the images."""
    weights = hook.batch_weights()
    if len(weights) != len(losses):
        raise LabError(
            f"--loss_weighting: the losses must be of {counted(len(weights), 'image')}, as its timesteps are, got "
            f"{len(losses)}. Hint: remove options that add images to a batch."
        )
    return weights.to(losses.device).view(-1, *[1] * (losses.ndim - 1))


def losses_of_images(
    hook: Weights,
    loss: Callable[..., torch.Tensor],
    model_pred: torch.Tensor,
    target: torch.Tensor,
    loss_type: str,
    reduction: str,
    huber_c: Any = None,
) -> torch.Tensor:
    """sd-scripts: the loss of each element, or their mean."""
    if not hook.has_batch() or reduction not in ("none", "mean"):
        return loss(model_pred, target, loss_type, reduction, huber_c)
    losses = loss(model_pred, target, loss_type, "none", huber_c)
    losses = losses * _wide(hook, losses)
    return losses if reduction == "none" else losses.mean()


def factor_of_losses(hook: Weights, weigh: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """musubi-tuner: factors on the loss of each element, or none."""
    own = weigh(*args, **kwargs)
    output = trainer_frame().f_locals.get("output")
    if not hook.has_batch():
        return own
    if output is None:
        raise LabError("--loss_weighting: musubi-tuner computes this loss in another way. Hint: remove it.")
    weights = _wide(hook, output.target)
    return weights if own is None else own * weights
