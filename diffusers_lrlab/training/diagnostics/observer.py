"""Sight of each noise level during a run: what is summed, measured and written, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from ...timesteps.sampling import TimestepSampler
from .gradients import GradientProbes
from .timestep_file import read_timesteps, write_timesteps
from .timestep_log import TimestepLog, TimestepLosses, asked_probabilities


class TimestepObserver:
    """
    The diagnostics of a run by noise level. It draws no random numbers and changes nothing that training uses.

    Args:
        num_bins (`int`): Equal parts of the timesteps.
        sampler ([`TimestepSampler`]): Whose density is compared with what was drawn.
        noise_scheduler: A diffusers scheduler.
        probe_images (`torch.Tensor` or `None`): Images for gradients, `None` if they are not asked for.
        accelerator (`Accelerator`): Device and processes.
        path (`Path`): `lrlab/timesteps.parquet`.
    """

    def __init__(
        self,
        num_bins: int,
        sampler: TimestepSampler,
        noise_scheduler: Any,
        probe_images: torch.Tensor | None,
        accelerator: Accelerator,
        path: Path,
    ):
        self.sampler, self.accelerator, self.path = sampler, accelerator, path
        self.log = TimestepLog(num_bins, sampler.num_train_timesteps)
        self.losses = TimestepLosses(self.log.starts, accelerator.device)
        self.probes = None
        if probe_images is not None and accelerator.is_main_process:
            self.probes = GradientProbes(probe_images, noise_scheduler, self.log.starts, accelerator.device)

    def add(self, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """Adds the unweighted losses of this process's images; nothing is read off the device."""
        self.losses.add(timesteps, losses)

    def read_sums(self, first: int, last: int) -> list[int]:
        """Reads the sums of the updates from `first` to `last` off the device; returns the bins whose loss is a spike."""
        sums = self.accelerator.reduce(self.losses.sums, "sum").cpu()
        self.losses.sums.zero_()
        if not self.accelerator.is_main_process:
            return []
        return self.log.add_losses(last, sums, asked_probabilities(self.sampler, first, last))

    def after_validation(self, update: int, timesteps: torch.Tensor, losses: dict[str, np.ndarray]) -> None:
        """Keeps the validation losses of images, by name of the column."""
        if self.accelerator.is_main_process:
            self.log.add_validation(update, timesteps.cpu().numpy(), losses)

    def measure_gradients(self, update: int, model: Any) -> None:
        """Measures gradients at the probes; the other processes need not wait."""
        if self.probes is not None:
            self.log.add_gradients(update, *self.probes(model))

    def write(self) -> None:
        """Writes the file."""
        if self.accelerator.is_main_process:
            write_timesteps(self.log.table, self.path)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Sums that are not in the file yet, of every process."""
        return {"sums": self.accelerator.gather(self.losses.sums[None])}

    def load_state_dict(self, state: dict[str, torch.Tensor], update: int) -> None:
        """Goes back to a checkpoint, and to the rows of the file that are older."""
        self.losses.sums.copy_(state["sums"][self.accelerator.process_index])
        if self.accelerator.is_main_process:
            self.log.restore(read_timesteps(self.path), update)
