"""transformers' schedule that follows a metric, in a separate module, since only this schedule needs transformers."""

from typing import Any

from torch.optim import Optimizer

from ..core.environment import require_version
from .feedback import HostFeedback
from .momentum import initial_lrs

require_version("The schedule 'greedy'", "transformers", "5.4")
from transformers.optimization import GreedyLR  # noqa: E402


class GreedyWithWarmup(HostFeedback, GreedyLR):  # type: ignore[misc]
    """
    transformers' `GreedyLR` after a linear warm-up to the optimizer's learning rates.

    `min_lr` is 1e-3 as in transformers, or a hundredth of the learning rate if that is lower.
    """

    _OWN_STATE = ("num_updates", "num_warmup_steps", "peak_lrs")  # the rest is GreedyLR's

    def __init__(self, optimizer: Optimizer, num_warmup_steps: int = 0, min_lr: float | None = None, **kwargs: Any):
        if min_lr is None:
            min_lr = min(1e-3, *(lr / 100 for lr in initial_lrs(optimizer)))
        super().__init__(optimizer, min_lr=min_lr, **kwargs)
        self._init_lrs = initial_lrs(optimizer)
        self._start_warmup(num_warmup_steps, min_lr, kwargs.get("max_lr", 1.0))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **{name: getattr(self, name) for name in self._OWN_STATE}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for name in self._OWN_STATE:
            setattr(self, name, state_dict[name])
