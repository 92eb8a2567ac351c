"""The objective of a run frozen at one update, for trial updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from typing_extensions import Self

from ..core.streams import block_randn, stream_generator, stream_seed
from ..objective.objective import Objective
from ..timesteps.bands import TimestepLR

if TYPE_CHECKING:
    from ..training.trainer import Trainer


@dataclass(eq=False, kw_only=True)
class FixedNoiseObjective(Objective):
    """
    The objective of a run frozen at one update, with its own random numbers.

    The density of timesteps and the loss weights are those of this update, except that bands take turns. Nothing here learns
    from losses.
    """

    at: int  # the update
    evenly: bool  # stratified timesteps and antithetic noise

    @classmethod
    def now(cls, trainer: Trainer, repeat: int, evenly: bool) -> Self:
        """The current objective of a trainer, with samplers and their state, for one of several tests."""
        seed = stream_seed(trainer.run.config.seed, "finder", repeat)
        objective = trainer.run.objective
        parts = {part.name: getattr(objective, part.name) for part in dataclasses.fields(Objective)}
        parts["spec"] = dataclasses.replace(objective.spec, seed=seed)
        return cls(**parts, at=trainer.run.update, evenly=evenly)

    @property
    def _bands(self) -> TimestepLR | None:
        return self.spec.timestep_lr if self.sampler.name == "banded" else None

    def _moment(self, update: int) -> int:
        return self.at if self._bands is None else self.at + update

    def lr_factor(self, update: int) -> float | None:
        """The factor of an update's band on its learning rate."""
        if self._bands is None:
            return None
        factors = self._bands.lr_factors(np.array([self._moment(update)]), self.sampler.num_train_timesteps)
        return None if factors is None else float(factors[0])

    def draw(self, update: int) -> torch.Tensor:
        sampler, generator = self.sampler, stream_generator(self.spec.seed, "timesteps", update, device=self.device)
        before, sampler.draw = sampler.draw, "stratified" if self.evenly else sampler.draw
        try:
            return sampler.sample(self.layout.global_batch, self._moment(update), generator)
        finally:
            sampler.draw = before

    def weights(self, timesteps: torch.Tensor, update: int) -> torch.Tensor | None:
        return super().weights(timesteps, self._moment(update))

    def noise(self, update: int, images: torch.Tensor) -> Iterator[torch.Tensor]:
        """Noise whose second half is the negative of its first."""
        if not self.evenly or self.spec.noise != "gaussian":
            yield from super().noise(update, images)
            return
        batch = self.layout.global_batch
        half = block_randn(self.spec.seed, "noise", update, range(batch - batch // 2), tuple(images.shape[1:]), self.device)
        whole = torch.cat([half, -half[: batch // 2]])
        for part in self.layout.positions():
            yield whole[part.start : part.stop]

    def observe(self, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """Does nothing."""
