"""Timesteps, weights of the losses and noise of each update.

They are pure functions of seed and clock, except for samplers and weightings that follow the losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core.errors import LabError
from ..core.streams import block_randn, random_states, stream_generator
from ..data.options import BatchLayout
from ..timesteps.bands import TimestepLR
from ..timesteps.registries import TIMESTEP_SAMPLERS
from ..timesteps.sampling import TimestepSampler
from ..timesteps.weighting import LossWeighting
from .noise import NOISES
from .process import NoiseProcess, make_process


@dataclass(frozen=True, kw_only=True)
class ObjectiveSpec:
    """
    Sampler, weighting, noise and noise process of a run: names in `TIMESTEP_SAMPLERS`, `LOSS_WEIGHTINGS`, `NOISES` and
    `OBJECTIVES` with all their parameters, and whether the data lie in [-1, 1].
    """

    seed: int
    timestep_sampler: str
    timestep_sampler_kwargs: Mapping[str, Any]
    loss_weighting: str
    loss_weighting_kwargs: Mapping[str, Any]
    noise: str
    noise_kwargs: Mapping[str, Any]
    timestep_lr: TimestepLR | None = None
    objective: str
    objective_kwargs: Mapping[str, Any]
    is_bounded: bool

    def make_process(self) -> NoiseProcess:
        return make_process(self.objective, is_bounded=self.is_bounded, **self.objective_kwargs)

    def make_sampler(self, process: NoiseProcess, num_updates: int, device: Any = None) -> TimestepSampler:
        name, kwargs, lr = self.timestep_sampler, dict(self.timestep_sampler_kwargs), self.timestep_lr
        if lr is not None and lr.form == "banded":
            bands = {"num_bands": len(lr.factors), "edges": lr.edges}
            name, kwargs = "banded", TIMESTEP_SAMPLERS["banded"].resolve({**kwargs, **bands})
        return TimestepSampler(name, kwargs, process.levels, num_updates, device)

    def make_weighting(self, process: NoiseProcess, device: Any = None) -> LossWeighting:
        kwargs = dict(self.loss_weighting_kwargs)
        return LossWeighting(self.loss_weighting, kwargs, process.levels, process.prediction_type, device)


@dataclass(eq=False)
class Objective:
    """Timesteps, weights and noise of the updates of a run."""

    spec: ObjectiveSpec
    layout: BatchLayout
    device: torch.device  # where everything is drawn
    gather: Callable[[torch.Tensor], torch.Tensor]  # from this process's to those of all, along the first dimension
    sampler: TimestepSampler
    weighting: LossWeighting
    table: torch.Tensor | None  # weights of all timesteps, if they are fixed and not all 1
    factors: torch.Tensor | None  # on these weights, of a learning rate per timestep

    _has_tried_noise = False  # of a third-party noise function

    @classmethod
    def of(
        cls,
        spec: ObjectiveSpec,
        process: NoiseProcess,
        layout: BatchLayout,
        num_updates: int,
        device: torch.device,
        gather: Callable[[torch.Tensor], torch.Tensor],
    ) -> Objective:
        """The objective of a spec and its noise process, for a run of `num_updates`."""
        sampler, weighting = spec.make_sampler(process, num_updates, device), spec.make_weighting(process, device)
        factors = None if spec.timestep_lr is None else spec.timestep_lr.weights(process.num_train_timesteps)
        built_in, table = torch.from_numpy(process.built_in_weights), None
        if not weighting.follows_losses:
            # The losses include the built-in weights already; where a weight is 0, so is the loss.
            table = torch.where(built_in > 0, weighting.table.cpu() / built_in, 1)
            table = None if (table == 1).all() else table.float().to(device)
        scales = None if factors is None else torch.from_numpy(factors).float().to(device)
        objective = Objective(spec, layout, device, gather, sampler, weighting, table, scales)
        of_process = built_in.to(device)

        def table_of_losses() -> torch.Tensor:
            own = objective._own_table()
            return of_process if own is None else of_process * own

        sampler.losses_are(process.prediction_type, table_of_losses)
        return objective

    @property
    def is_weighted(self) -> bool:
        """Whether the losses of images are multiplied by anything."""
        own = self.table is not None or self.factors is not None or self.weighting.follows_losses
        return own or self.sampler.unbiased

    @property
    def follows_losses(self) -> bool:
        """Whether anything here has a state, that depends on the losses of the run."""
        return self.sampler.follows_losses or self.weighting.follows_losses

    def draw(self, update: int) -> torch.Tensor:
        """Timesteps of the whole global batch: int64 of shape `(global_batch,)`, the same on every process."""
        generator = stream_generator(self.spec.seed, "timesteps", update, device=self.device)
        return self.sampler.sample(self.layout.global_batch, update, generator)

    def weights(self, timesteps: torch.Tensor, update: int) -> torch.Tensor | None:
        """Factors on the losses of these timesteps, float32; `None` if there are none."""
        table, of_density = self._own_table(), self.sampler.loss_weights(timesteps, update)
        own = None if table is None else table[timesteps]
        return of_density if own is None else own if of_density is None else own * of_density

    def _own_table(self) -> torch.Tensor | None:
        """The factors of all timesteps, `(T,)`, without those that make up for the density; `None` if there are none."""
        table = self.weighting.table if self.weighting.follows_losses else self.table
        if self.factors is not None:
            table = self.factors if table is None else table * self.factors
        return table

    def noise(self, update: int, images: torch.Tensor) -> Iterator[torch.Tensor]:
        """The noise of each micro-batch of this process, whose images of the update are given in the same order."""
        seed, shape, positions = self.spec.seed, tuple(images.shape[1:]), self.layout.positions()
        if self.spec.noise == "gaussian":
            for part in positions:
                yield block_randn(seed, "noise", update, part, shape, self.device)
            return
        everything = range(self.layout.global_batch)
        noise = block_randn(seed, "noise", update, everything, shape, self.device)
        generator = stream_generator(seed, "noise-kind", update, device=self.device)
        noise = self._noise_of_kind(noise, images, generator)
        for part in positions:
            yield noise[part.start : part.stop]

    def _noise_of_kind(self, noise: torch.Tensor, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        entry, kwargs = NOISES[self.spec.noise], self.spec.noise_kwargs
        others = self._in_order(images) if "images" in entry.traits else None
        if self._has_tried_noise or not entry.is_foreign:
            return entry(noise, others, generator, **kwargs)
        # Once, since this reads off the device: later draws are of the same function.
        self._has_tried_noise, before = True, random_states()
        found = entry(noise, others, generator, **kwargs)
        if random_states() != before:
            raise LabError(
                f"{entry.title} draws global random numbers, which differ between processes and shift those of dropout. "
                f"Draw from the given `generator`.{entry.where}"
            )
        if not found.isfinite().all():
            raise LabError(f"{entry.title} gives numbers that are not finite, such as nan.{entry.where}")
        return found

    def _in_order(self, values: torch.Tensor) -> torch.Tensor:
        """Values of this process's images, as those of the whole global batch in its order."""
        layout = self.layout
        if layout.num_processes == 1:
            return values
        shares = self.gather(values).view(layout.num_processes, layout.accumulation, layout.micro_batch, *values.shape[1:])
        return shares.transpose(0, 1).reshape(layout.global_batch, *values.shape[1:])

    def observe(self, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """
        Shows the losses of an update to samplers and weightings that follow them, identically in all processes. `timesteps`
        are those of the whole global batch; `losses` are the unweighted losses of this process's images, micro-batch after
        micro-batch.
        """
        if not self.follows_losses:
            return
        losses = self._in_order(losses)
        table = self._own_table()
        self.sampler.observe(timesteps, losses if table is None else losses * table[timesteps])
        self.weighting.observe(timesteps, losses)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state of sampler and weighting; empty if neither follows the losses."""
        sampler = {f"sampler.{key}": value for key, value in self.sampler.state_dict().items()}
        return sampler | {f"weighting.{key}": value for key, value in self.weighting.state_dict().items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, part in (("sampler", self.sampler), ("weighting", self.weighting)):
            own = {key.partition(".")[2]: value for key, value in state.items() if key.startswith(f"{name}.")}
            if own:
                part.load_state_dict(own)
