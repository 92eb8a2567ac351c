"""What a metric of a run is given."""

from typing import Any

import numpy as np
import torch

from ..data.batch import Batch

MOST_REAL = 100_000  # samples of a stream, or of data that are not in memory, to compare with
NEIGHBOUR = 5  # k of the nearest-neighbour estimates, as in the study


class Evaluation:
    """Input of metrics: a trained [`RunState`], and samples of its averaged weights if any were drawn."""

    def __init__(self, run: Any, samples: np.ndarray | None):
        self.run = run
        self.samples = np.empty(0) if samples is None else samples  # metrics that need some are not asked without

    def some_real(self, num: int) -> Batch:
        """The first of these images with their conditions; no others are decoded."""
        data = self.run.data
        return data.random_sample(len(data.in_memory) if data.in_memory is not None else num, MOST_REAL)

    @property
    def samples_as_data(self) -> torch.Tensor:
        """Images `(num, height, width, channels)` in [0, 1] as the tensors of training."""
        return torch.from_numpy(self.samples).permute(0, 3, 1, 2) * 2 - 1

    @property
    def held_out(self) -> np.ndarray:
        return self.run.data.held_out.data.numpy()
