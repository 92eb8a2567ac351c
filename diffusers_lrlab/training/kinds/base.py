"""A kind of data: all that images, points, latents, ... differ in before a model is trained."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...core.errors import LabError
from ...core.registered import unusable
from ...core.registry import Registry
from ...models.registry import DENOISERS, denoiser_arguments, denoiser_class
from ..config import ResolvedConfig, TrainingConfig

if TYPE_CHECKING:
    import torch

    from ...data.layout import BatchLayout
    from ...data.loading import TrainingData


def _check_kind(value: Any, *_: Any) -> Any:
    if not isinstance(value, DataKind):
        raise unusable("an object of a subclass of DataKind", value)
    return value


KINDS = Registry("kind of data", returns=_check_kind)
"""Entries are subclasses of [`DataKind`]."""


class DataKind(ABC):
    """Data, model, pipeline and defaults of runs on one kind of data."""

    name: ClassVar[str]  # in KINDS, and what people call the items
    results: ClassVar[str]  # "module:class" of a Results, which is heavy to import: what samples are shown by
    model: ClassVar[str]  # likewise, with diffusers' ModelMixin and ConfigMixin
    pipeline: ClassVar[str]  # likewise: it samples, and is saved
    component: ClassVar[str]  # what the pipeline calls the model, and so the folder of its weights
    sampling_batch: ClassVar[int]  # samples per pass of the pipeline
    sampling_cost: ClassVar[float] = 0.4  # a step of sampling over the training of an item: benchmarks/sampling_cost.py
    num_train_timesteps: ClassVar[int] = 1000  # default of the objective's parameter num_steps
    is_bounded: ClassVar[bool]  # whether values lie in [-1, 1], where samples are kept too
    has_neighbours: ClassVar[bool]  # whether values have neighbours, as pixels do, that noise may be correlated over
    default_length: ClassVar[dict[str, int]]  # of a run, as options
    form: ClassVar[str] = ""  # which decides what metrics there are: "images", "points", or one that has none
    # What a study measures if nobody says, the primary one first.
    default_metrics: ClassVar[tuple[str, ...]] = ("validation_loss_ema", "validation_loss")
    # Studies save weights and samples from common noise, and say how far runs agree.
    is_compared_between_runs: ClassVar[bool] = False
    # Why runs cannot be stacked, if they cannot.
    not_stackable: ClassVar[str | None] = "stacks are of MLPDenoisers on points"

    def __init__(self, denoiser: str | None = None):
        self.denoiser = denoiser  # a name; `None` for the kind's own model

    @property
    def item(self) -> str:
        """One of the items, in words."""
        return self.name.removesuffix("s")

    # --- options -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def defaults(self, config: TrainingConfig) -> dict[str, Any]:
        """Options that depend on the kind of data and on the data set, for those that are not given."""

    def check(self, config: TrainingConfig) -> dict[str, Any]:
        """Options whose values follow from others; raises a `LabError` for what cannot be done with these data."""
        return {}

    def measured_samples(self, images_seen: int, num_held_out: int, num_images: int | None) -> dict[str, int]:
        """
        The options that say how many samples are measured at the end of a run, at their defaults: in proportion to the
        images that it sees, so that measuring takes the smaller part of a short run.
        """
        return {}

    def folder_name(self, dataset: str, config: TrainingConfig) -> str:
        """The default of `--output_dir`."""
        return f"{config.objective}-{dataset}"

    # --- data --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def load_data(self, config: ResolvedConfig, num_processes: int) -> TrainingData: ...

    @abstractmethod
    def describe_data(self, config: ResolvedConfig, data: TrainingData) -> str:
        """The shape of an item, in words."""

    def data_warnings(self, data: TrainingData) -> list[str]:
        return []

    def evaluation_batch(self, layout: BatchLayout) -> int:
        """Items per pass of the validation loss."""
        return layout.micro_batch

    # --- model -------------------------------------------------------------------------------------------------------

    def model_class(self) -> Any:
        return pkgutil.resolve_name(self.model) if self.denoiser is None else denoiser_class(self.denoiser)

    def make_model(self, model_config: dict[str, Any]) -> Any:
        """The model with these arguments, and the weights that it begins with."""
        return self.model_class()(**model_config) if self.denoiser is None else DENOISERS[self.denoiser](**model_config)

    @property
    def pipeline_name(self) -> str:
        return self.pipeline.rpartition(":")[2]

    def make_pipeline(self, model: Any, scheduler: Any) -> Any:
        return pkgutil.resolve_name(self.pipeline)(**{self.component: model, "scheduler": scheduler})

    @abstractmethod
    def load_model_config(self, config: ResolvedConfig) -> dict[str, Any] | None:
        """The model's configuration that was asked for, checked without data; `None` for the default."""

    @abstractmethod
    def resolve_model_config(
        self, config: ResolvedConfig, given: dict[str, Any] | None, data: TrainingData
    ) -> dict[str, Any]:
        """Arguments of the kind's own model: those given, checked against the data, or a default that fits them."""

    def arguments_of_data(self, config: ResolvedConfig, data: TrainingData) -> dict[str, Any]:
        """What a denoiser that was chosen by name has to know of the data, by the names that its arguments have."""
        return {}

    def model_arguments(self, config: ResolvedConfig, given: dict[str, Any] | None, data: TrainingData) -> dict[str, Any]:
        """Arguments of the model that is trained."""
        if config.denoiser is None:
            return self.resolve_model_config(config, given, data)
        if config.gradient_checkpointing and not self.model_class()._supports_gradient_checkpointing:
            raise LabError(f"--gradient_checkpointing: the denoiser {config.denoiser!r} does not support it. Leave it out.")
        of_data = self.arguments_of_data(config, data)
        return denoiser_arguments(config.denoiser, config.denoiser_kwargs or {}, of_data, self.name)

    def describe_model(self, model_config: dict[str, Any]) -> str:
        return f"{self.model_class().__name__}({', '.join(f'{key}={value}' for key, value in model_config.items())})"

    # --- samples -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def sample(self, pipeline: Any, num: int, generator: torch.Generator, num_inference_steps: int) -> np.ndarray:
        """Samples of a pipeline: images `(num, height, width, channels)` in [0, 1], or points `(num, dimension)`."""

    def preview(self, samples: np.ndarray) -> np.ndarray:
        """What is kept of the samples of one moment of training."""
        return samples

    def as_samples(self, data: torch.Tensor) -> np.ndarray:
        """Data as [`sample`] gives samples, to compare them with."""
        return data.numpy()

    # --- studies -----------------------------------------------------------------------------------------------------

    def data_depend_on_seed(self, config: ResolvedConfig) -> bool:
        """Whether runs of other seeds cannot share the loaded data."""
        return True

    def lacks_samples(self, config: ResolvedConfig) -> str | None:
        """Why there are no samples to compare with data at the end of a run; `None` if there are."""
        return None

    def num_compared_samples(self, config: ResolvedConfig) -> int | None:
        """How many samples are compared with data, if runs that differ in it cannot be compared."""
        return None

    # --- cards and checks --------------------------------------------------------------------------------------------

    card_task: ClassVar[str] = "other"  # the Hub's name for what the model does
    card_tags: ClassVar[tuple[str, ...]] = ()
    card_example: ClassVar[str] = """```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{location}")
```
"""  # Markdown, with {location}, {inference_steps} and, where there is such a text, {without_package}
    # Markdown, with {location}: how the kind's own model is loaded without this package, if its pipeline is of this package.
    card_without_package: ClassVar[str] = ""
    card_pictures: ClassVar[str] = ""  # Markdown: pictures that only this kind has
    preflight_checks: ClassVar[tuple[str, ...]] = ()  # names of the checks that only some kinds have

    def thumbnails(self, data: torch.Tensor) -> torch.Tensor:
        """What near duplicates are found by, if values have neighbours: `(num, size)`."""
        return data.flatten(1)
