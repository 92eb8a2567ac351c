"""What samplers and weightings that follow the losses have in common."""

from __future__ import annotations

import pkgutil
from typing import Any

import torch

from ..core.registry import Entry
from .noise_levels import NoiseLevels


def state_of(entry: Entry, levels: NoiseLevels, kwargs: dict[str, Any], device: Any) -> Any:
    """The object of an entry that follows the losses, on `device`; `None` for others, which are functions of the clock."""
    if "feedback" not in entry.traits:
        return None
    return pkgutil.resolve_name(entry.factory)(levels, **kwargs, device=device)


class MayFollowLosses:
    """A sampler or a weighting, whose `state` is `None` unless it follows the losses."""

    state: Any

    @property
    def follows_losses(self) -> bool:
        """Whether [`observe`] has to be called."""
        return self.state is not None

    def observe(self, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """Takes the unweighted losses of an update, of the images of all processes; without a state it does nothing."""
        if self.state is not None:
            self.state.observe(timesteps, losses)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.state.state_dict() if self.state is not None else {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        if self.state is not None:
            self.state.load_state_dict(state)
