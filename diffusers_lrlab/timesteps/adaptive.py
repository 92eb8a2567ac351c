"""A sampler and a weighting that follow the losses.

Their state stays on the device and is never read back. It is a function of the losses of the whole global batch, so that it
is the same on every process.
"""

import math
from typing import Any

import torch

from ..core.errors import LabError
from ..core.streams import stream_generator
from ..core.words import counted
from .noise_levels import NoiseLevels


def finite_losses(losses: torch.Tensor, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses as float32, 0 where they are not finite, and where they are finite."""
    if losses.shape != timesteps.shape:
        raise LabError(
            f"Got {counted(len(losses), 'loss')} for {counted(len(timesteps), 'timestep')}. Give one loss for each image."
        )
    losses = losses.detach().float()
    usable = losses.isfinite()
    return torch.where(usable, losses, 0.0), usable


class LossSecondMoment:
    """
    Probabilities in proportion to the root mean square of the last `history` losses of each timestep.

    A share of `uniform_share` stays uniform.
    """

    def __init__(self, levels: NoiseLevels, history: int, uniform_share: float, device: Any = None):
        num = levels.num_train_timesteps
        self.uniform_share = uniform_share
        self.losses = torch.zeros(num, history, device=device)
        self.counts = torch.zeros(num, dtype=torch.int64, device=device)

    def probabilities(self) -> torch.Tensor:
        """float64 of shape `(T,)` on the device: uniform until every timestep has its history."""
        num, history = self.losses.shape
        flat = torch.full((num,), 1 / num, dtype=torch.float64, device=self.losses.device)
        root = self.losses.double().square().mean(dim=1).sqrt()
        root = (1 - self.uniform_share) * root / root.sum().clamp(min=1e-300) + self.uniform_share * flat
        return torch.where((self.counts >= history).all() & (self.losses != 0).any(), root / root.sum(), flat)

    @torch.no_grad()
    def observe(self, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """Stores the losses of a batch, each in place of the oldest of its timestep."""
        history = self.losses.shape[1]
        losses, usable = finite_losses(losses, timesteps)
        same = (timesteps[:, None] == timesteps[None, :]) & usable
        earlier = torch.tril(same, diagonal=-1).sum(dim=1)
        # Of more than `history` losses of one timestep, the first would be overwritten in an undefined order.
        stored = usable & (same.sum(dim=1) - earlier <= history)
        place = (self.counts[timesteps] + earlier) % history
        # The others are written to a spare row.
        padded = torch.cat([self.losses, self.losses[:1]])
        padded[torch.where(stored, timesteps, len(self.losses)), place] = losses
        self.losses = padded[:-1]
        self.counts.index_add_(0, timesteps, usable.long())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"losses": self.losses.clone(), "counts": self.counts.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.losses.copy_(state["losses"])
        self.counts.copy_(state["counts"])


class LearnedLogVariance:
    """
    Weights `exp(-u_t)` with `u_t` trained to minimise `loss_t exp(-u_t) + u_t` (arXiv 2312.02696).

    The minimum is at `exp(u_t) = E[loss_t]`, or below where single losses are more than ten times that: their pull is
    limited. `u` is linear in random Fourier features of `log(sigma) / 4`, as in the paper, and starts at 0. A separate Adam
    trains it, whatever optimizer trains the model; its gradient is written out, since it needs no graph.
    """

    def __init__(self, levels: NoiseLevels, num_features: int, learning_rate: float, device: Any = None):
        generator = stream_generator(0, "log-variance-features")
        frequencies = 2 * math.pi * torch.randn(num_features, generator=generator, dtype=torch.float64)
        phases = 2 * math.pi * torch.rand(num_features, generator=generator, dtype=torch.float64)
        borders = torch.from_numpy(levels.log_sigma_borders).clamp(-20, 20)
        noise = (borders[1:] + borders[:-1]) / 8  # log(sigma) / 4
        features = math.sqrt(2) * torch.cos(noise[:, None] * frequencies + phases)
        self.features = features.float().to(device)
        self.coefficients = torch.zeros(num_features, device=device, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.coefficients], lr=learning_rate)

    @torch.no_grad()
    def weights(self) -> torch.Tensor:
        """float32 of shape `(T,)` on the device."""
        return torch.exp(-(self.features @ self.coefficients / math.sqrt(len(self.coefficients))))

    @torch.no_grad()
    def observe(self, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """One step of `u` on the losses of a batch."""
        losses, usable = finite_losses(losses, timesteps)
        features = self.features[timesteps] / math.sqrt(len(self.coefficients))
        slope = usable * (1 - losses * torch.exp(-features @ self.coefficients))
        # A loss far above exp(u) pulls hard, and Adam's mean of squares would remember that for long.
        self.coefficients.grad = (slope.clamp(min=-10)[:, None] * features).mean(dim=0)
        self.optimizer.step()

    def state_dict(self) -> dict[str, torch.Tensor]:
        adam = self.optimizer.state_dict()["state"].get(0, {})
        state = {"coefficients": self.coefficients.detach(), **{f"adam_{key}": value for key, value in adam.items()}}
        return {key: value.clone() for key, value in state.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            self.coefficients.copy_(state["coefficients"])
        adam = {key.removeprefix("adam_"): value.clone() for key, value in state.items() if key.startswith("adam_")}
        current = self.optimizer.state_dict()
        self.optimizer.load_state_dict({**current, "state": {0: adam} if adam else {}})
