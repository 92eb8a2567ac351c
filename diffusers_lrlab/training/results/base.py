"""What a trained model is shown by: samples, pictures of them, figures that say how good they are."""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ..base_run import BaseRun
from ..config import ResolvedConfig
from ..kinds.base import DataKind
from ..samples import draw_samples


class Results(ABC):
    """Samples, figures and pictures of runs on one kind of data, which names its subclass."""

    num_recorded: ClassVar[int] = 16  # samples in the record of a study's run, at most
    stream: ClassVar[str] = "samples to evaluate"  # of random numbers

    @abstractmethod
    def as_pictures(self, run: BaseRun, samples: np.ndarray) -> np.ndarray:
        """8-bit pictures `(num, height, width, channels)` of samples, for trackers."""

    def preview(self, samples: np.ndarray) -> np.ndarray:
        """Samples as they are kept during training."""
        return samples

    def as_samples(self, data: torch.Tensor) -> np.ndarray:
        """Data in the form of samples, which are compared with them."""
        return data.numpy()

    def num_samples(self, config: ResolvedConfig, num_held_out: int, num_images: int | None) -> int:
        """The number of samples to evaluate at the end of a run; 0 for none."""
        return 0

    def samples_to_show(self, run: BaseRun) -> np.ndarray:
        """Samples of the model as it is, for the pictures at the end of a run."""
        return draw_samples(run, run.config.eval_batch_size)

    def samples_to_evaluate(self, run: BaseRun) -> np.ndarray | None:
        """Samples of the averaged weights; `None` if there are to be none."""
        num_samples = self.num_samples(run.config, len(run.data.held_out), run.data.num_images)
        if not num_samples:
            return None
        with run.averaged_weights():
            return draw_samples(run, num_samples, self.stream, show_progress=True)

    def evaluate(self, run: BaseRun, samples: np.ndarray | None, metrics: Collection[str] | None = None) -> dict[str, Any]:
        """
        Results of a finished run, from [`samples_to_evaluate`], besides the losses in its log: these metrics, or those of
        every run if none are named.
        """
        from ...evaluation.evaluate import evaluate  # and scipy, which training does without

        return evaluate(run, samples, metrics, self.as_samples)

    def recorded(self, samples: np.ndarray) -> dict[str, Any]:
        """Samples for the record of a study's run: "points" or a "png", or nothing."""
        return {}

    @abstractmethod
    def draw(self, run: BaseRun, samples: np.ndarray, lab: Path) -> None:
        """Pictures of [`samples_to_show`], and of samples over training, into the folder `lab`."""


def results_of(kind: DataKind) -> Results:
    return pkgutil.resolve_name(kind.results)()
