"""What depends on whether a run is about images or points. All the rest of training is the same code for both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import TrainingConfig

if TYPE_CHECKING:
    import torch

    from ...data.layout import BatchLayout
    from ...data.loading import TrainingData
    from ..run_state import RunCore
    from ..trainer import Trainer


class RunKind(ABC):
    """
    Data, model, pipeline and results of runs on one kind of data.

    Attributes:
        things (`str`): "images" or "points".
        component (`str`): What the pipeline calls the model, and so the folder of its weights.
        pipeline_name (`str`): For people.
        sampling_batch (`int`): Samples per pass of the pipeline.
    """

    things: str
    component: str
    pipeline_name: str
    sampling_batch: int

    @abstractmethod
    def model_class(self) -> Any:
        """The class of the model."""

    @abstractmethod
    def make_pipeline(self, model: Any, scheduler: Any) -> Any:
        """The pipeline that samples, and that is saved."""

    @abstractmethod
    def load_data(self, config: TrainingConfig, num_processes: int) -> TrainingData:
        """The data of a resolved configuration."""

    @abstractmethod
    def load_model_config(self, config: TrainingConfig) -> dict[str, Any] | None:
        """The model's configuration that was asked for, checked without data; `None` for the default."""

    @abstractmethod
    def settle_model_config(
        self, config: TrainingConfig, given: dict[str, Any] | None, data: TrainingData
    ) -> dict[str, Any]:
        """Arguments of the model: those given, checked against the data, or a default that fits them."""

    @abstractmethod
    def describe_data(self, config: TrainingConfig, data: TrainingData) -> str:
        """The shape of an image or a point, in words."""

    @abstractmethod
    def describe_model(self, model_config: dict[str, Any]) -> str:
        """The model, in words."""

    @abstractmethod
    def sample(self, pipeline: Any, num: int, generator: torch.Generator, num_inference_steps: int) -> np.ndarray:
        """Samples of a pipeline: images `(num, height, width, channels)` in [0, 1], or points `(num, dimension)`."""

    @abstractmethod
    def preview(self, samples: np.ndarray) -> np.ndarray:
        """What is kept of the samples of one moment of training."""

    @abstractmethod
    def as_pictures(self, trainer: Trainer, samples: np.ndarray) -> np.ndarray:
        """8-bit pictures `(num, height, width, channels)` of samples, for trackers."""

    @abstractmethod
    def samples_to_evaluate(self, run: RunCore) -> np.ndarray | None:
        """Samples of the averaged weights, for the distances at the end of a run; `None` if there are to be none."""

    @abstractmethod
    def evaluate(self, run: RunCore, samples: np.ndarray | None, metrics: Collection[str] | None = None) -> dict[str, Any]:
        """
        Results of a finished run besides the losses in its log.

        Args:
            run ([`RunCore`]): The run.
            samples (`np.ndarray` or `None`): Of [`samples_to_evaluate`].
            metrics (`Collection[str]`, *optional*): Names of results to compute; all that there are if not given.
        """

    @abstractmethod
    def draw(self, trainer: Trainer, samples: np.ndarray) -> None:
        """Pictures of samples, and of samples over training, into `lrlab/`."""

    def evaluation_batch(self, layout: BatchLayout) -> int:
        """Images per pass of the validation loss."""
        return layout.micro_batch

    def data_warnings(self, data: TrainingData) -> list[str]:
        """What is odd about the data."""
        return []


def kind_of(config: TrainingConfig) -> RunKind:
    """The kind of run that a resolved configuration means."""
    from .images import ImageRuns
    from .points import PointRuns

    return ImageRuns() if config.point_column is None else PointRuns()
