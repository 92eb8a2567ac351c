"""The diagnostics of a run by noise level: sums, measurements and their file."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.batch import Batch
from ..objective.objective import Objective
from ..objective.process import NoiseProcess
from .gradients import GradientProbes
from .timestep_log import TimestepLog, TimestepLosses, expected_probabilities, read_timesteps, write_timesteps


class TimestepObserver:
    """
    The diagnostics of a run by noise level, in equal bins of timesteps. It draws no random numbers and does not affect
    training. Gradients are measured if there are probe images.
    """

    def __init__(self, num_bins: int, objective: Objective, process: NoiseProcess, probe_images: Batch | None, path: Path):
        self.sampler, self.rank, self.path = objective.sampler, objective.layout.rank, path
        self._gather, self._num_processes = objective.gather, objective.layout.num_processes
        self.log = TimestepLog(num_bins, self.sampler.num_train_timesteps)
        self.losses = TimestepLosses(self.log.starts, objective.device)
        self.probes = None
        if probe_images is not None and self.rank == 0:
            self.probes = GradientProbes(probe_images, process, self.log.starts, objective.device)

    def add(self, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """Adds the unweighted losses of this process's images, without a device synchronization."""
        self.losses.add(timesteps, losses)

    def read_sums(self, first: int, last: int) -> list[int]:
        """Logs the sums of the updates from `first` to `last`; returns the bins whose loss is a spike."""
        sums = self._gather(self.losses.sums[None]).sum(0).cpu()
        self.losses.sums.zero_()
        if self.rank != 0:
            return []
        return self.log.add_losses(last, sums, expected_probabilities(self.sampler, first, last))

    def after_validation(self, update: int, timesteps: torch.Tensor, losses: dict[str, np.ndarray]) -> None:
        if self.rank == 0:
            self.log.add_validation(update, timesteps.cpu().numpy(), losses)

    def measure_gradients(self, update: int, model: Any) -> None:
        """Measures gradients at the probes; other processes do not wait."""
        if self.probes is not None:
            self.log.add_gradients(update, *self.probes(model))

    def write(self) -> None:
        if self.rank == 0:
            write_timesteps(self.log.table, self.path)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The sums of every process that are not in the file yet."""
        return {"sums": self._gather(self.losses.sums[None])}

    def load_state_dict(self, state: dict[str, torch.Tensor], update: int) -> None:
        """Restores the sums of a checkpoint and the rows before it."""
        sums = state["sums"]
        if len(sums) == self._num_processes:
            self.losses.sums.copy_(sums[self.rank])
        else:  # another number of processes: only the total counts
            self.losses.sums.copy_(sums.sum(0) if self.rank == 0 else torch.zeros_like(sums[0]))
        if self.rank == 0:
            self.log.restore(read_timesteps(self.path), update)
