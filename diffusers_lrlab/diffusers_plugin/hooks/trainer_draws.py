"""Timesteps that a trainer draws with its own functions, replaced by a [`hooks.timesteps.TimestepHook`]."""

from typing import Any, Protocol

import numpy as np
import torch

from ...timesteps.noise_levels import NoiseLevels
from ...timesteps.registries import TIMESTEP_SAMPLERS
from ...timesteps.sampling import TimestepSampler
from ..host.run import HostRun
from ..trainer_table import TrainerRow
from ..trainers.find import Refused
from ..trainers.install import install
from ..trainers.shapes import timesteps as shapes
from .clock import HostClock


class _TimestepHook(Protocol):
    """The part of [`hooks.timesteps.TimestepHook`] that is used here."""

    run: HostRun
    clock: HostClock
    requested: str
    name: str | None
    kwargs: dict[str, Any]
    levels: NoiseLevels | None
    sampler: TimestepSampler | None
    num_seen: int

    def begin(self, levels: NoiseLevels) -> None: ...
    def replaced(self, own: torch.Tensor) -> torch.Tensor: ...


class TrainerDraws:
    """Gives the shapes of a trainer's rows the timesteps of a hook."""

    def __init__(self, hook: _TimestepHook, rows: list[TrainerRow], spec: str | None):
        self.hook, self.run, self.rows = hook, hook.run, rows
        self.prediction_type = ""  # from the first batch on
        self.converts_to_data = False  # a predicted velocity, so that the trainer's error is of data
        self.seed: int | None = None  # of a trainer whose arguments do not have it
        self.layout: tuple[int, int, int] | None = None  # of a trainer without accelerate: see `set_layout`
        self.has_table = any(getattr(shapes, row.shape) in shapes.TABLES for row in rows)
        if self.has_table:
            self._check_table(spec)

    def _check_table(self, spec: str | None) -> None:
        """Of a trainer that draws from a table itself, only the density can be replaced."""
        hook, trainer = self.hook, self.rows[0].trainer
        if hook.name is None:
            raise Refused(
                f"{hook.requested}: needs the timesteps of each batch, which {trainer} draws from a table. Hint: remove it."
            )
        wanted = "a density without unbiased=true, drawn independently"
        is_fixed = any(getattr(shapes, row.shape) in shapes.STATIC for row in self.rows)
        moves = "curriculum" in TIMESTEP_SAMPLERS[hook.name].traits
        if is_fixed and moves:
            wanted = "a density that does not change over the run"
        if is_fixed and moves or hook.kwargs["unbiased"] or hook.kwargs["draw"] != "independent":
            raise Refused(
                f"--timestep_sampler {spec}: must be {wanted}, got another. Hint: {trainer} draws from a table of its own."
            )

    def install(self) -> None:
        install(self.run, self.rows, shapes, self)
        self.hook.clock.real_updates.before_first.append(self._check_drawn)

    def _check_drawn(self) -> None:
        """Before the first update."""
        if not self.hook.num_seen:
            names = " or ".join(f"{row.module}.{row.attribute} ({row.programs})" for row in self.rows)
            raise Refused(
                f"{self.hook.requested}: must be used with a program that draws timesteps by {names}, got another. "
                "Hint: remove it."
            )

    def is_training(self) -> bool:
        """False while a trainer computes its own validation loss."""
        return not self.run.models or any(model.training for model in self.run.models)

    def argument(self, name: str) -> Any:
        return self.run.arguments.get(name)

    def begin(self, levels: NoiseLevels, prediction_type: str, converts_to_data: bool = False) -> None:
        if self.hook.levels is None:
            self.prediction_type, self.converts_to_data = prediction_type, converts_to_data
            self.hook.begin(levels)

    def set_layout(self, accumulation: int) -> None:
        """Sets the number of micro-batches of an update; the number of processes is torch's."""
        parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
        of_processes = (torch.distributed.get_world_size(), torch.distributed.get_rank()) if parallel else (1, 0)
        self.layout = (accumulation, *of_processes)

    def replaced(self, own: torch.Tensor) -> torch.Tensor:
        """Timesteps in place of a trainer's `own`, which is returned itself if nothing is replaced."""
        return self.hook.replaced(own)

    def density(self) -> np.ndarray:
        """The probabilities of the timesteps of the next update."""
        self.hook.num_seen += 1
        assert self.hook.sampler is not None
        return self.hook.sampler.probabilities(self.hook.clock.update).numpy()
