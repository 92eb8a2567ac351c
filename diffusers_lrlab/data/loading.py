"""The data of a run, and the steps of loading that images (`image_loading.py`) and points (`points.py`) share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..core.errors import LabError
from ..core.streams import SPLIT_SEED, split_rows, stream_seed
from .batch import Batch, Conditions
from .conditions import ConditionColumns, Example, Examples, no_conditions, read_conditions
from .images import normalise
from .labels import Classes, find_classes
from .options import DataConfig
from .shard_rows import digest_of
from .shards import open_shards
from .streams import ShardedStream


class Transform(Protocol):
    """Transforms a cell of the dataset to a tensor; [`ImageTransform`] and [`PointTransform`] are transforms."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a training tensor."""

    def read(self, cell: Any) -> torch.Tensor:
        """The deterministic part; a `LabError` names a cell that cannot be read."""

    def read_compact(self, cell: Any) -> torch.Tensor:
        """`read` before [`normalise`]."""

    def augment(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """The random part, a function of the image number in the run."""

    def augment_all(self, tensors: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """`augment` for several tensors of one size."""

    def fixed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replaces `augment` for held-out data, without randomness."""


@dataclass
class TrainingData:
    """The data of a run: images or points. Comments on images here apply to points too."""

    name: str  # for cards and logs
    train: Any  # `datasets.Dataset` of undecoded images, or `ShardedStream`; unused if they are in memory
    held_out: Batch  # float32 `(num_held_out, channels, resolution, resolution)` in [-1, 1], or `(..., dimension)`
    column: str  # of `train`, with the images
    fingerprint: str  # changes with the data
    transform: Transform  # from a cell of that column to a tensor
    in_memory: Batch | None = None  # the resized training images in float32, if they fit
    conditions: Conditions = field(default_factory=dict)  # of the rows of `train`; those of a stream are in its examples
    classes: Classes | None = None  # of labelled data
    image_set: str | None = None  # the embedded set whose images these are, or were encoded to these latents
    autoencoder: dict[str, Any] | None = None  # that encoded them, with the hash of its weights
    skipped: list[str] = field(default_factory=list)  # errors of corrupt images that were skipped on request
    known: dict[Any, Any] = field(default_factory=dict)  # a cache for results that depend on the data only

    @property
    def num_images(self) -> int | None:
        """The number of training images; `None` for a stream."""
        if self.in_memory is not None:
            return len(self.in_memory)
        return len(self.train) if hasattr(self.train, "__len__") else None

    def all_in_memory(self, most: int | None = None) -> Batch:
        """The training images, centre-cropped; at most `most` if they must be decoded."""
        if self.in_memory is not None:
            return self.in_memory.with_data(self.transform.fixed(self.in_memory.data))
        return self._stacked(itertools.islice(self.examples, most))

    def random_sample(self, num: int, most: int) -> Batch:
        """`num` random training images, of the first `most` if they must be decoded."""
        if self.num_images is None:
            return self.all_in_memory(num)
        total = self.num_images if self.in_memory is not None else min(self.num_images, most)
        rows = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:num]
        if self.in_memory is not None:
            return self.in_memory.with_data(self.transform.fixed(self.in_memory.data))[rows]
        return self._stacked(self.examples[row] for row in rows.tolist())

    def _stacked(self, examples: Iterable[Example]) -> Batch:
        return Batch.stack([self.read_fixed(example) for example in examples])

    @property
    def examples(self) -> Any:
        """The training images with their conditions: a sequence, or an iterable for a stream."""
        if self.num_images is None:
            return self.train
        return Examples(self.train[self.column], self.conditions)

    def read_compact(self, example: Example) -> tuple[torch.Tensor, Conditions]:
        """An image as the transform reads it, and its conditions."""
        cell, conditions = example
        return self.transform.read_compact(cell), conditions

    def read_fixed(self, example: Example) -> tuple[torch.Tensor, Conditions]:
        """An image without randomness, in float32, and its conditions."""
        pixels, conditions = self.read_compact(example)
        return self.transform.fixed(normalise(pixels)), conditions

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.transform.shape


def select_columns(
    dataset: Any, column: str, columns: ConditionColumns, is_stream: bool
) -> tuple[Any, dict[str, torch.Tensor]]:
    """
    A dataset with only `column` (for a stream also those of the conditions), and the conditions' values (none for a stream).
    """
    values = {} if is_stream else read_conditions(dataset, columns)
    names = dict.fromkeys([column, *(each.name for each in columns.values() if is_stream)])
    return dataset.select_columns(list(names)), values


def stream_data(
    config: DataConfig,
    seed: int,
    stream: Any,
    column: str,
    transform: Transform,
    name: str,
    columns: ConditionColumns,
) -> TrainingData:
    """The data of a stream, whose held-out rows (a fifth at most) come from a few of its shards."""
    source = open_shards(config, stream, column, name, columns)
    num_held_out = min(config.num_validation_images or 0, int(source.lengths.sum()) // 5)
    generator_seed, buffer = stream_seed(seed, "stream"), config.stream_shuffle_buffer
    train = ShardedStream(source, column, num_held_out, SPLIT_SEED, generator_seed, buffer)
    fingerprint = source.fingerprint
    if columns:  # which are in it, but not what they are to the model
        fingerprint = digest_of([fingerprint, *sorted((keyword, each.name) for keyword, each in columns.items())])
    data = TrainingData(name, train, Batch(torch.empty(0)), column, fingerprint, transform)
    hold_out(data, config, train.held_out_examples(), columns)
    return data


def decoded_rows(
    data: TrainingData, config: DataConfig, examples: Iterable[Example]
) -> Iterator[tuple[torch.Tensor, Conditions]]:
    """Resized images with their conditions, without corrupt ones if these are to be skipped."""
    from tqdm.auto import tqdm

    for cell, conditions in tqdm(examples, desc="decode images", disable=None, leave=False, delay=2):
        try:
            pixels = data.transform.read(cell)
        except LabError as error:
            if not config.skip_corrupt_images:
                raise
            data.skipped.append(str(error))
        else:
            yield pixels, conditions


def hold_out_rows(data: TrainingData, config: DataConfig, columns: ConditionColumns, values: Conditions, seed: int) -> None:
    """Divides data with random access, whose conditions are `values`, into rows to hold out and rows to train on."""
    held_out, training = split_rows(len(data.train), config.num_validation_images or 0)
    own = {keyword: some[held_out] for keyword, some in values.items()}
    hold_out(data, config, Examples(data.train.select(held_out)[data.column], own), columns)
    data.conditions = {keyword: some[training] for keyword, some in values.items()}
    data.classes = find_classes(columns, values, config.label_dropout, seed)
    if held_out:
        data.train = data.train.select(training)


def hold_out(data: TrainingData, config: DataConfig, examples: Iterable[Example], columns: ConditionColumns) -> None:
    """Makes these examples the held-out ones."""
    images = [(data.transform.fixed(pixels), conditions) for pixels, conditions in decoded_rows(data, config, examples)]
    data.held_out = batch_of(images, data, columns)


def batch_of(images: list[tuple[torch.Tensor, Conditions]], data: TrainingData, columns: ConditionColumns) -> Batch:
    """Images with their conditions as a batch, which may be empty."""
    return Batch.stack(images) if images else Batch(torch.empty(0, *data.image_shape), no_conditions(columns))
