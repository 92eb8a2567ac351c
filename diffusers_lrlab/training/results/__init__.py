"""Results of a trained model: samples, plots of them, metrics."""

import functools
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ..kinds.base import DataKind
from ..pipeline import draw_samples
from ..run_state import RunState


class Results(ABC):
    """Samples, metrics and plots of runs on one kind of data, which names its subclass."""

    num_recorded: ClassVar[int] = 16  # most samples in the record of a study's run
    stream: ClassVar[str] = "samples to evaluate"  # name of their random stream

    @abstractmethod
    def as_pictures(self, run: RunState, samples: np.ndarray) -> np.ndarray:
        """Samples as 8-bit images `(num, height, width, channels)`, for trackers."""

    def preview(self, samples: np.ndarray) -> np.ndarray:
        """Samples as they are kept during training."""
        return samples

    def as_samples(self, run: RunState, data: torch.Tensor) -> np.ndarray:
        """Data in the form of samples, which are compared with them."""
        return data.numpy()

    def samples_to_show(self, run: RunState) -> np.ndarray:
        """Samples of the model as it is, for the plots at the end of a run."""
        return draw_samples(run, run.config.eval_batch_size)

    def samples_to_evaluate(self, run: RunState) -> np.ndarray | None:
        """Samples of the averaged weights; `None` if none are measured."""
        if not run.config.distance_samples:
            return None
        with run.averaged_weights():
            return draw_samples(run, run.config.distance_samples, self.stream, show_progress=True)

    def evaluate(self, run: RunState, samples: np.ndarray | None, metrics: Collection[str] | None = None) -> dict[str, Any]:
        """
        Metrics of a finished run beside the losses in its log: the named ones, or those of every run. `samples` are those of
        [`samples_to_evaluate`].
        """
        from ...evaluation.metrics import evaluate  # needs scipy, training does not

        return evaluate(run, samples, metrics, functools.partial(self.as_samples, run))

    def recorded(self, samples: np.ndarray) -> dict[str, Any]:
        """Samples for the record of a study's run, as "points" or a "png"; empty if it keeps none."""
        return {}

    @abstractmethod
    def draw(self, run: RunState, samples: np.ndarray, lab: Path) -> None:
        """Plots [`samples_to_show`], and samples over training, into the folder `lab`."""


def results_of(kind: DataKind) -> Results:
    return pkgutil.resolve_name(kind.results)()
