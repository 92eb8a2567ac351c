"""What each update learns from: timesteps, weights of the losses, noise.

Pure functions of seed and clock, but for samplers and weightings that follow the losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from diffusers import DDPMScheduler

from ..core.streams import block_randn, stream_generator
from ..data.layout import BatchLayout
from ..timesteps.loss_weights import LossWeighting
from ..timesteps.noise_levels import noise_levels
from ..timesteps.registries import TIMESTEP_SAMPLERS
from ..timesteps.sampling import TimestepSampler
from ..training.config import ResolvedConfig
from .noise import NOISES


def make_noise_scheduler(config: ResolvedConfig) -> DDPMScheduler:
    """The diffusion process of a run."""
    return DDPMScheduler(
        num_train_timesteps=config.ddpm_num_steps,
        beta_schedule=config.ddpm_beta_schedule,
        prediction_type=config.prediction_type,
        # Images lie in [-1, 1] and samples are kept there; points lie anywhere.
        clip_sample=config.point_column is None,
    )


def make_sampler(
    config: ResolvedConfig, noise_scheduler: DDPMScheduler, num_updates: int, device: Any = None
) -> TimestepSampler:
    """The timestep sampler of a run; bands that take turns are one."""
    name, kwargs = config.timestep_sampler, dict(config.timestep_sampler_kwargs)
    lr = config.timestep_lr_form
    if lr is not None and lr.form == "banded":
        bands = {"num_bands": len(lr.factors), "edges": lr.edges}
        name, kwargs = "banded", TIMESTEP_SAMPLERS["banded"].resolve({**kwargs, **bands})
    return TimestepSampler(name, kwargs, noise_levels(noise_scheduler), num_updates, device)


def make_weighting(config: ResolvedConfig, noise_scheduler: DDPMScheduler, device: Any = None) -> LossWeighting:
    """The loss weighting of a run."""
    kwargs = dict(config.loss_weighting_kwargs)
    levels = noise_levels(noise_scheduler)
    return LossWeighting(config.loss_weighting, kwargs, levels, config.prediction_type, device)


class Objective:
    """
    Timesteps, weights and noise of the updates of a run.

    Args:
        config ([`ResolvedConfig`]): Resolved.
        noise_scheduler (`DDPMScheduler`): The diffusion process.
        layout ([`BatchLayout`]): How the images of an update are shared out.
        num_updates (`int`): Optimizer updates of the run.
        device (`torch.device`): Where everything is drawn.
        gather (`Callable`): From a tensor of this process to those of all of them, along the first dimension.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        noise_scheduler: DDPMScheduler,
        layout: BatchLayout,
        num_updates: int,
        device: torch.device,
        gather: Callable[[torch.Tensor], torch.Tensor],
    ):
        self.seed, self.layout, self.device, self._gather = config.seed, layout, device, gather
        self.sampler = make_sampler(config, noise_scheduler, num_updates, device)
        self.weighting = make_weighting(config, noise_scheduler, device)
        self._noise, self._noise_kwargs = NOISES[config.noise], dict(config.noise_kwargs)
        # Losses of predicted images come weighted by SNR (see `denoising_losses`); the table is of plain ones.
        levels = noise_levels(noise_scheduler)
        base = torch.from_numpy(levels.snr) if config.prediction_type == "sample" else torch.ones(())
        factors = config.timestep_lr_form.weights(levels.num_train_timesteps) if config.timestep_lr_form else None
        self._factors = None if factors is None else torch.from_numpy(factors).float().to(device)
        self._table: torch.Tensor | None = None
        if not self.weighting.follows_losses:
            table = self.weighting.table.cpu() / base
            self._table = None if (table == 1).all() else table.float().to(device)

    @property
    def is_weighted(self) -> bool:
        """Whether the losses of images are multiplied by anything."""
        own = self._table is not None or self._factors is not None or self.weighting.follows_losses
        return own or self.sampler.unbiased

    @property
    def follows_losses(self) -> bool:
        """Whether anything here has a state, that depends on the losses of the run."""
        return self.sampler.follows_losses or self.weighting.follows_losses

    def draw(self, update: int) -> torch.Tensor:
        """Timesteps of the whole global batch: int64 of shape `(global_batch,)`, the same on every process."""
        generator = stream_generator(self.seed, "timesteps", update, device=self.device)
        return self.sampler.sample(self.layout.global_batch, update, generator)

    def weights(self, timesteps: torch.Tensor, update: int) -> torch.Tensor | None:
        """Factors on the losses of these timesteps, float32; `None` if there are none."""
        parts = [self._weights(timesteps), self.sampler.loss_weights(timesteps, update)]
        found = [part for part in parts if part is not None]
        return None if not found else found[0] if len(found) == 1 else found[0] * found[1]

    def _weights(self, timesteps: torch.Tensor) -> torch.Tensor | None:
        """The factors that belong to the objective itself, without those that make up for the density."""
        table = self.weighting.table if self.weighting.follows_losses else self._table
        if self._factors is not None:
            table = self._factors if table is None else table * self._factors
        return None if table is None else table[timesteps]

    def noise(self, update: int, images: torch.Tensor) -> Iterator[torch.Tensor]:
        """
        The noise of each micro-batch of this process.

        Args:
            update (`int`): The update it is for.
            images (`torch.Tensor`): This process's share of the images of the update, micro-batch after micro-batch.
        """
        shape, positions = tuple(images.shape[1:]), self.layout.positions()
        if self._noise.name == "gaussian":
            for part in positions:
                yield block_randn(self.seed, "noise", update, part, shape, self.device)
            return
        everything = range(self.layout.global_batch)
        noise = block_randn(self.seed, "noise", update, everything, shape, self.device)
        others = self._in_order(images) if "images" in self._noise.traits else None
        generator = stream_generator(self.seed, "noise-kind", update, device=self.device)
        noise = self._noise.factory(noise, others, generator, **self._noise_kwargs)
        for part in positions:
            yield noise[part.start : part.stop]

    def _in_order(self, values: torch.Tensor) -> torch.Tensor:
        """Values of this process's images, as those of the whole global batch in its order."""
        layout = self.layout
        if layout.num_processes == 1:
            return values
        gathered = self._gather(values)
        shares = gathered.view(layout.num_processes, layout.accumulation, layout.micro_batch, *values.shape[1:])
        return shares.transpose(0, 1).reshape(layout.global_batch, *values.shape[1:])

    def observe(self, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """
        Shows samplers and weightings that follow the losses those of an update; the same everywhere.

        Args:
            timesteps (`torch.Tensor`): Of the whole global batch.
            losses (`torch.Tensor`): float32, unweighted, of this process's images, micro-batch after micro-batch.
        """
        if not self.follows_losses:
            return
        losses = self._in_order(losses)
        weights = self._weights(timesteps)
        self.sampler.observe(timesteps, losses if weights is None else losses * weights)
        self.weighting.observe(timesteps, losses)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What followed the losses; empty if nothing does."""
        sampler = {f"sampler.{key}": value for key, value in self.sampler.state_dict().items()}
        return sampler | {f"weighting.{key}": value for key, value in self.weighting.state_dict().items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Goes back to a state."""
        for name, part in (("sampler", self.sampler), ("weighting", self.weighting)):
            own = {key.partition(".")[2]: value for key, value in state.items() if key.startswith(f"{name}.")}
            if own:
                part.load_state_dict(own)
