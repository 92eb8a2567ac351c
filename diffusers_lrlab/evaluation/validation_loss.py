"""The loss on held-out images with fixed timesteps and fixed noise: two values differ because the weights do."""

from typing import Any

import numpy as np
import torch

from ..core.streams import block_randn, random_states_kept, stream_generator
from ..data.batch import Batch
from ..objective.process import NoiseProcess

# Fixed for every run, whatever its seed: validation losses of different runs are of the same images, timesteps, noise.
VALIDATION_SEED = 0


class ValidationLoss:
    """
    The loss of a noise process on held-out examples, as a function of the model alone: it has its own random streams, so
    that it does not disturb training. `draw` chooses one of many draws of timesteps and noise.
    """

    def __init__(self, batch: Batch, process: NoiseProcess, batch_size: int, device: torch.device, draw: int = 0):
        self.batch = batch.to(device)
        self.process, self.batch_size = process, batch_size
        num_images, num_timesteps = len(batch), process.num_train_timesteps
        # Evenly spread over all timesteps, in an order that has nothing to do with that of the images.
        spread = (torch.arange(num_images) * 2 + 1) * num_timesteps // (2 * num_images)
        counters = (draw,) if draw else ()
        generator = stream_generator(VALIDATION_SEED, "validation-timesteps", *counters)
        order = torch.randperm(num_images, generator=generator)
        self.timesteps = spread[order].to(device)
        shape = tuple(batch.data.shape[1:])
        self.noise = block_randn(VALIDATION_SEED, "validation-noise", draw, range(num_images), shape, "cpu").to(device)

    @torch.no_grad()
    def try_one(self, model: Any) -> None:
        """Raises a `LabError` if the model, in evaluation mode, predicts what has no loss; one image is enough for that."""
        was_training = model.training
        model.eval()
        one = slice(0, 1)
        with random_states_kept():
            self.process.losses(model, self.batch[one], self.noise[one], self.timesteps[one])
        model.train(was_training)

    @torch.no_grad()
    def __call__(self, model: Any) -> np.ndarray:
        """The loss of each image, float64 `(num_images,)`, in evaluation mode; the model's mode is restored."""
        was_training = model.training
        model.eval()
        losses = []
        for start in range(0, len(self.batch), self.batch_size):
            part = slice(start, start + self.batch_size)
            losses.append(self.process.losses(model, self.batch[part], self.noise[part], self.timesteps[part]))
        model.train(was_training)
        return torch.cat(losses).double().cpu().numpy()
