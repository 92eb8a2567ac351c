"""Kinds of data, such as images, points or latents: their registry and base class, and which one a configuration means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from ...core.plugins import unusable
from ...core.registry import Registry
from ...models.registry import architecture_of, architectures
from ..config import ResolvedConfig, TrainingConfig

if TYPE_CHECKING:
    import torch

    from ...data.loading import TrainingData
    from ...data.options import BatchLayout


def _check_kind(value: Any, *_: Any) -> Any:
    if not isinstance(value, DataKind):
        raise unusable("an object of a subclass of DataKind", value)
    return value


KINDS = Registry("kind of data", returns=_check_kind)
"""Entries are subclasses of [`DataKind`]."""


class DataKind(ABC):
    """Data, default model, pipeline and default options of runs on one kind of data; it has no state."""

    name: ClassVar[str]  # in KINDS, and in messages: the plural of an item
    form: ClassVar[str] = ""  # of its samples, which decides what metrics there are: "images", "points", or one of its own
    results: ClassVar[str]  # "module:class" of its Results, which are heavy to import
    model: ClassVar[str]  # "module:class" of the default model, with diffusers' ModelMixin and ConfigMixin
    pipeline: ClassVar[str]  # "module:class" of the pipeline that samples, and is saved
    labelled_pipeline: ClassVar[str] = ""  # that of runs with class labels, if it is another one
    component: ClassVar[str]  # the default model's name in the pipeline, and so the folder of its weights
    sampling_batch: ClassVar[int]  # samples per pass of the pipeline
    num_train_timesteps: ClassVar[int] = 1000  # default of the objective's parameter num_steps
    is_bounded: ClassVar[bool]  # whether values lie in [-1, 1], where samples are kept too
    has_neighbours: ClassVar[bool]  # whether values have neighbours, as pixels do, that noise may be correlated over

    @abstractmethod
    def defaults(self, config: TrainingConfig) -> dict[str, Any]:
        """
        Values of options that are not given, among them the length of a run as `num_epochs` or `max_train_steps`. Raises a
        `LabError` for options that these data cannot have.
        """

    def measured_samples(self, images_seen: int, num_held_out: int, num_images: int | None) -> int | None:
        """
        Default of `distance_samples`: in proportion to the images that a run sees, so that measuring takes the smaller part
        of a short run.
        """
        return None

    @abstractmethod
    def load_data(self, config: ResolvedConfig, num_processes: int) -> TrainingData: ...

    def evaluation_batch(self, layout: BatchLayout) -> int:
        """Items per pass of the validation loss."""
        return layout.micro_batch

    @abstractmethod
    def data_arguments(self, config: ResolvedConfig, data: TrainingData) -> dict[str, Any]:
        """Arguments of any model for these data, by name, that the data decide."""

    def default_model_config(self, config: ResolvedConfig, data: TrainingData) -> dict[str, Any]:
        """Arguments of the default model."""
        return self.data_arguments(config, data)

    def check_model_config(self, config: ResolvedConfig, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """The configuration given for the default model, if any, checked and completed without data."""
        return given

    def pipeline_parts(self, config: ResolvedConfig) -> dict[str, Any]:
        """
        Parts of the pipeline beside model and scheduler, by its names for them: models that are not trained, and plain
        values such as `id2label`. Beside a `vae_source`, the `vae` is not saved; the pipeline loads it from there.
        """
        return {}

    @abstractmethod
    def sample(
        self, pipeline: Any, num: int, generator: torch.Generator, num_inference_steps: int, **conditions: torch.Tensor
    ) -> np.ndarray:
        """
        Samples of a pipeline: images `(num, height, width, channels)` in [0, 1], or points `(num, dimension)`. `conditions`
        are theirs, by the model's keyword; none if the data have no labels.
        """


_Row = TypeVar("_Row")


def row_for(kind: DataKind, rows: Mapping[str, _Row], default: _Row) -> _Row:
    """The row of a table by kinds; a kind without one uses that of its base class, or the default."""
    names = [getattr(base, "name", "") for base in type(kind).__mro__]
    return next((rows[name] for name in names if name in rows), default)


def components() -> tuple[str, ...]:
    """The folders of weights that runs on any kind of data write."""
    of_kinds = [entry.factory.component for entry in KINDS.values()]
    return tuple(dict.fromkeys([*of_kinds, *(each.component for each in architectures() if each.component)]))


def component_of(config: TrainingConfig | dict[str, Any]) -> str:
    """The model's name in the pipeline of a run, and so the folder of its weights."""
    known = config if isinstance(config, dict) else config.__dict__
    return architecture_of(known.get("denoiser")).component or kind_of(config).component


def kind_of(config: TrainingConfig | dict[str, Any]) -> DataKind:
    """The kind of data of a resolved configuration, or of a recorded one."""
    known = config if isinstance(config, dict) else config.__dict__
    return KINDS[known.get("data_kind") or "images"]()


from . import images, points  # noqa: E402, F401  (they register their kinds)
