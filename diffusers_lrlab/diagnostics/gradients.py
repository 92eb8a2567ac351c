"""Gradients by noise level: at fixed images, timesteps and noise, or of the images that training draws."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..core.streams import block_randn
from ..data.batch import Batch
from ..objective.process import NoiseProcess

# Fixed for every run, as the validation loss's.
_SEED = 0
_NUM_GROUPS = 4
_GROUP_IMAGES = 8
NUM_PROBES = _NUM_GROUPS * _GROUP_IMAGES


class GradientProbes:
    """
    Gradients of the unweighted loss at fixed probes: a function of the model alone, that leaves it and its gradients as
    they are. `starts` are the first timesteps of the bins, and T. The images of `batch` are used in turn if they are fewer
    than `NUM_PROBES`, and then there is no noise scale.
    """

    def __init__(self, batch: Batch, process: NoiseProcess, starts: np.ndarray, device: torch.device):
        self.process = process
        num = NUM_PROBES
        self.batch = batch[torch.arange(num) % len(batch)].to(device)
        # Groups that share images are not independent, and the estimate of their noise would be too small.
        self.has_noise_scale = len(batch) >= num
        self.noise = block_randn(_SEED, "probe-noise", 0, range(num), tuple(batch.data.shape[1:]), "cpu").to(device)
        # Evenly spread over the bin, in every group.
        spread = (torch.arange(num) * 2 + 1) / (2 * num)
        spread = spread.view(_GROUP_IMAGES, _NUM_GROUPS).T.flatten()
        self.timesteps = [
            (first + spread * (last - first)).long().to(device)
            for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        ]

    def __call__(self, model: Any) -> tuple[list[float], list[float]]:
        """
        Norms of the mean gradient, and noise scales in images, for each bin.

        The noise scale is the batch at which the gradient's noise is as large as the gradient: the trace of the
        covariance over the squared norm, by the unbiased estimates from small and large batches of arXiv 1812.06162,
        appendix A.1. Timesteps are spread over the bin in every group, so their share of the noise is small. NaN where the
        squared norm comes out as nothing but noise.
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
        """Squared norms of the gradient: the mean of those of the groups, and that of all images."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        total = [torch.zeros_like(parameter) for parameter in parameters]
        small = torch.zeros((), device=timesteps.device)
        for start in range(0, len(timesteps), _GROUP_IMAGES):
            part = slice(start, start + _GROUP_IMAGES)
            with torch.enable_grad():
                losses = self.process.losses(model, self.batch[part], self.noise[part], timesteps[part])
                # Not backward(), which would write into the gradients that training uses.
                gradients = torch.autograd.grad(losses.mean(), parameters, allow_unused=True, materialize_grads=True)
            small += torch.stack(torch._foreach_norm(gradients)).square().sum() / _NUM_GROUPS
            torch._foreach_add_(total, gradients, alpha=1 / _NUM_GROUPS)
        return small.item(), torch.stack(torch._foreach_norm(total)).square().sum().item()


def gradient_norms(losses: torch.Tensor, parameters: Sequence[torch.Tensor], scaler: Any = None) -> torch.Tensor:
    """
    Norms of the gradients of single images' losses, a backward pass for each: of shape `(num_images,)`.

    What training accumulates, and the graph that it needs, stay as they are.

    Args:
        losses (`torch.Tensor`): Those of the images, with their graph, of shape `(num_images,)`.
        parameters (`Sequence[torch.Tensor]`): What the gradients are of.
        scaler (`torch.amp.GradScaler`, *optional*): Without its factor, gradients in float16 may vanish.
    """
    scale = scaler.scale if scaler is not None else lambda value: value
    norms = []
    for loss in losses:
        gradients = torch.autograd.grad(scale(loss), parameters, retain_graph=True, allow_unused=True)
        parts = torch._foreach_norm([gradient.float() for gradient in gradients if gradient is not None])
        norms.append(torch.linalg.vector_norm(torch.stack(parts)))
    return torch.stack(norms) / scale(torch.ones((), device=losses.device))
