"""The diagnostics of a run by noise level: its log of losses, and gradients at fixed images, timesteps and noise."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.streams import block_randn
from ..data.batch import Batch
from ..objective.objective import Objective
from ..objective.process import NoiseProcess
from .timestep_log import TimestepLog, expected_probabilities, read_timesteps, write_timesteps

# The same for all runs, as in the validation loss.
_SEED = 0
_NUM_GROUPS = 4
_GROUP_IMAGES = 8
NUM_PROBES = _NUM_GROUPS * _GROUP_IMAGES


class GradientProbes:
    """
    Gradients of the unweighted loss at fixed probes: a function of the model that changes neither it nor its gradients.
    `starts` are the first timesteps of the bins, and T. If `batch` has fewer than `NUM_PROBES` images, they repeat and there
    is no noise scale.
    """

    def __init__(self, batch: Batch, process: NoiseProcess, starts: np.ndarray, device: torch.device):
        self.process = process
        num = NUM_PROBES
        self.batch = batch[torch.arange(num) % len(batch)].to(device)
        # Groups that share images are not independent, which would underestimate the noise.
        self.has_noise_scale = len(batch) >= num
        self.noise = block_randn(_SEED, "probe-noise", 0, range(num), tuple(batch.data.shape[1:]), "cpu").to(device)
        # Each group is evenly spread over the bin.
        spread = (torch.arange(num) * 2 + 1) / (2 * num)
        spread = spread.view(_GROUP_IMAGES, _NUM_GROUPS).T.flatten()
        self.timesteps = [
            (first + spread * (last - first)).long().to(device)
            for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        ]

    def __call__(self, model: Any) -> tuple[list[float], list[float]]:
        """
        Norms of the mean gradient, and noise scales in images, for each bin.

        The noise scale is the batch size at which the gradient's noise equals the gradient: the trace of the covariance over
        the squared norm, by the unbiased estimates of arXiv 1812.06162, appendix A.1. Timesteps are spread over the bin in
        every group, so they add little noise. NaN if the estimated squared norm is not positive.
        """
        was_training = model.training
        model.eval()
        norms, noise_scales = [], []
        for timesteps in self.timesteps:
            small, large = self._squared_norms(model, timesteps)
            squared_norm = (NUM_PROBES * large - _GROUP_IMAGES * small) / (NUM_PROBES - _GROUP_IMAGES)
            trace = (small - large) / (1 / _GROUP_IMAGES - 1 / NUM_PROBES)
            norms.append(math.sqrt(large))
            known = self.has_noise_scale and squared_norm > 0
            noise_scales.append(max(trace, 0.0) / squared_norm if known else math.nan)
        model.train(was_training)
        return norms, noise_scales

    def _squared_norms(self, model: Any, timesteps: torch.Tensor) -> tuple[float, float]:
        """Squared norms of the gradient: the mean over groups, and that of all images."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        total = [torch.zeros_like(parameter) for parameter in parameters]
        small = torch.zeros((), device=timesteps.device)
        for start in range(0, len(timesteps), _GROUP_IMAGES):
            part = slice(start, start + _GROUP_IMAGES)
            with torch.enable_grad():
                losses = self.process.losses(model, self.batch[part], self.noise[part], timesteps[part])
                # backward() would write into the gradients of training.
                gradients = torch.autograd.grad(losses.mean(), parameters, allow_unused=True, materialize_grads=True)
            small += torch.stack(torch._foreach_norm(gradients)).square().sum() / _NUM_GROUPS
            torch._foreach_add_(total, gradients, alpha=1 / _NUM_GROUPS)
        return small.item(), torch.stack(torch._foreach_norm(total)).square().sum().item()


class TimestepObserver:
    """
    The diagnostics of a run by noise level, in equal bins of timesteps. It draws no random numbers and does not affect
    training. Gradients are measured if there are probe images.
    """

    def __init__(self, num_bins: int, objective: Objective, process: NoiseProcess, probe_images: Batch | None, path: Path):
        self.sampler, self.layout, self.path = objective.sampler, objective.layout, path
        self.log = TimestepLog(num_bins, self.sampler.num_train_timesteps, objective.device, objective.gather)
        self.probes = None
        if probe_images is not None and self.layout.rank == 0:
            self.probes = GradientProbes(probe_images, process, self.log.starts, objective.device)

    def add(self, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """Adds the unweighted losses of this process's images, without a device synchronization."""
        self.log.add(timesteps, losses)

    def add_row(self, first: int, last: int) -> list[int]:
        """Logs the losses of the updates from `first` to `last`; returns the bins whose loss is a spike."""
        return self.log.add_row(last, expected_probabilities(self.sampler, first, last))

    def after_validation(self, update: int, timesteps: torch.Tensor, losses: dict[str, np.ndarray]) -> None:
        self.log.add_validation(update, timesteps.cpu().numpy(), losses)

    def measure_gradients(self, update: int, model: Any) -> None:
        """Measures gradients at the probes; other processes do not wait."""
        if self.probes is not None:
            self.log.add_gradients(update, *self.probes(model))

    def write(self) -> None:
        if self.layout.rank == 0:
            write_timesteps(self.log.table, self.path)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The sums of every process that are not in the file yet."""
        return {"sums": self.log.gather(self.log.sums[None])}

    def load_state_dict(self, state: dict[str, torch.Tensor], update: int) -> None:
        """Restores the sums of a checkpoint and the rows before it."""
        sums, rank = state["sums"], self.layout.rank
        if len(sums) != self.layout.num_processes:  # only the total counts
            sums = torch.cat([sums.sum(0, keepdim=True), sums.new_zeros(self.layout.num_processes, *sums.shape[1:])])
        self.log.sums.copy_(sums[rank])
        self.log.restore(read_timesteps(self.path), update)
