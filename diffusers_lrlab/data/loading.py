"""From a name, a folder or a Hub id to data: loaded, checked, and split into training and held-out ones.

Images are here, with what points share; the rest of points is in `points.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..core.errors import LabError
from ..core.streams import SPLIT_SEED, split_rows, stream_seed
from .batch import Batch, Conditions
from .conditions import (
    ConditionColumns,
    ConditionedCells,
    conditioned,
    find_conditions,
    fingerprint_with,
    no_conditions,
    read_conditions,
    split,
)
from .decoded import DecodedImages, decoded_images
from .image_sets import IMAGE_DATASETS
from .images import ImageTransform, normalise
from .layout import BatchLayout
from .options import DataConfig
from .shard_rows import digest_of
from .shards import open_shards
from .sources import columns_of, open_dataset
from .streams import ShardedStream

if TYPE_CHECKING:
    import datasets


class Transform(Protocol):
    """How a cell of the dataset becomes a tensor, as [`ImageTransform`] and [`PointTransform`] do."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a tensor that is trained on."""

    def read(self, cell: Any) -> torch.Tensor:
        """The deterministic part; raises a `LabError` that names a cell that cannot be read."""

    def read_compact(self, cell: Any) -> torch.Tensor:
        """What [`normalise`] makes the same from."""

    def augment(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """The random part, a function of the number of the image in the run."""

    def augment_all(self, tensors: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """The same for several of one size."""

    def fixed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same for held-out data, without randomness."""


@dataclass
class TrainingData:
    """The data of a run: images or points. What is said of images here holds for points."""

    name: str  # for cards and logs
    train: Any  # `datasets.Dataset` of undecoded images, or `ShardedStream`; not needed if they are in memory
    held_out: Batch  # float32 `(num_held_out, channels, resolution, resolution)` in [-1, 1], or `(..., dimension)`
    column: str  # of `train`, that is read
    fingerprint: str  # changes when the data do
    transform: Transform  # how a cell of that column becomes a tensor
    in_memory: Batch | None = None  # the resized training images in float32, if they fit
    decoded: DecodedImages | None = None  # the resized training images in a file
    conditions: Conditions = field(default_factory=dict)  # of the rows of `train`; cells of a stream have their own
    skipped: list[str] = field(default_factory=list)  # corrupt images that were skipped on request
    known: dict[Any, Any] = field(default_factory=dict)  # a cache of results that depend on the data alone

    @property
    def num_images(self) -> int | None:
        """Training images, `None` for a stream."""
        if self.in_memory is not None:
            return len(self.in_memory)
        return len(self.train) if hasattr(self.train, "__len__") else None

    def all_in_memory(self, most: int | None = None) -> Batch:
        """The training images, cropped in the middle; at most `most` of those that must be decoded."""
        if self.in_memory is not None:
            return self.in_memory.with_data(self.transform.fixed(self.in_memory.data))
        cells = (row[self.column] for row in self.train) if self.decoded is None else iter(self.decoded)
        return self._stacked(itertools.islice(conditioned(cells, self.conditions), most))

    def random_sample(self, num: int, most: int) -> Batch:
        """The first `num` of a random order of the training images, or of the first `most`; few are decoded for them."""
        if self.num_images is None:
            return self.all_in_memory(num)
        total = self.num_images if self.in_memory is not None else min(self.num_images, most)
        rows = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:num]
        if self.in_memory is not None:
            return self.in_memory.with_data(self.transform.fixed(self.in_memory.data))[rows]
        return self._stacked(self.cells[row] for row in rows.tolist())

    def _stacked(self, cells: Iterable[Any]) -> Batch:
        return Batch.stack([self.read_fixed(cell) for cell in cells])

    @property
    def cells(self) -> Any:
        """What the training images and their conditions are read from, by their row."""
        cells = self.train[self.column] if self.decoded is None else self.decoded
        return ConditionedCells(cells, self.conditions) if self.conditions else cells

    def read_compact(self, cell: Any) -> tuple[torch.Tensor, Conditions]:
        """An image as the transform reads it from a cell, or as it was kept, and the conditions of its row."""
        cell, conditions = split(cell)
        return cell if isinstance(cell, torch.Tensor) else self.transform.read_compact(cell), conditions

    def read_fixed(self, cell: Any) -> tuple[torch.Tensor, Conditions]:
        """An image without randomness, in float32, and the conditions of its row."""
        pixels, conditions = self.read_compact(cell)
        return self.transform.fixed(normalise(pixels)), conditions

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.transform.shape


def load_image_data(
    config: DataConfig, seed: int, layout: BatchLayout, conditions: Mapping[str, str] | None = None
) -> TrainingData:
    """
    Loads the images of a resolved configuration, holds out some for validation, and decodes what fits into memory.

    `conditions` names columns of numbers by the keyword that the model takes them by: `{"class_labels": "label"}`.
    """
    import datasets as hf_datasets

    dataset = open_dataset(config)
    column = find_image_column(dataset, config.image_column)
    columns = find_conditions(dataset, conditions)
    values = {} if config.streaming else read_conditions(dataset, columns)
    names = dict.fromkeys([column, *(each.name for each in columns.values() if config.streaming)])
    dataset = dataset.cast_column(column, hf_datasets.Image(decode=False)).select_columns(list(names))
    channels, resolution = config.image_shape
    transform = ImageTransform(
        resolution=resolution,
        channels=channels,
        center_crop=config.center_crop,
        random_flip=config.random_flip,
        eight_bit=not config.preserve_input_precision,
        seed=seed,
        decoding=config.decoding,
    )
    name = config.dataset_name or config.train_data_dir or ""
    if config.streaming:
        return stream_data(config, seed, dataset, column, transform, name, columns)
    fingerprint = fingerprint_with(_fingerprint_of(config, dataset), values)
    data = TrainingData(name, dataset, Batch(torch.empty(0)), column, fingerprint, transform)
    held_out_rows, training_rows = split_rows(len(dataset), config.num_validation_images or 0)
    cells = (row[column] for row in dataset.select(held_out_rows))
    own = {keyword: some[held_out_rows] for keyword, some in values.items()}
    _hold_out(data, config, conditioned(cells, own), columns)
    data.conditions = {keyword: some[training_rows] for keyword, some in values.items()}
    if held_out_rows:
        data.train = dataset.select(training_rows)
    layout.check_fits(len(data.train))
    if config.cache_decoded:
        data.decoded = decoded_images(data.train[column], data.train._fingerprint, transform, config)
        data.skipped += data.decoded.problems.values() if config.skip_corrupt_images else []
    elif len(data.train) * 4 * transform.channels * transform.resolution**2 <= config.in_memory_limit_mb * 2**20:
        _keep_in_memory(data, config, columns)
    if not data.num_images:
        raise LabError(f"{name!r} has no images to train on.")
    return data


def _fingerprint_of(config: DataConfig, dataset: Any) -> str:
    if (name := config.dataset_name) not in IMAGE_DATASETS:
        return dataset._fingerprint
    return f"{name}-{config.resolution}" if "made" in IMAGE_DATASETS[name].traits else name


def find_image_column(dataset: datasets.Dataset, asked: str | None) -> str:
    """The column to read images from: the one asked for, or the only one of type `datasets.Image`."""
    from datasets import Image

    features, listing = columns_of(dataset)
    columns = [name for name, feature in features.items() if isinstance(feature, Image)]
    if asked is not None:
        if asked not in columns:
            raise LabError(f"--image_column {asked!r} is not a column of images. Columns: {listing}.")
        return asked
    if not columns:
        raise LabError(
            f"The dataset has no column of images. Columns: {listing}. Use a dataset with an Image column; points are "
            "read from one column of lists of numbers."
        )
    if len(columns) > 1:
        raise LabError(f"The dataset has several columns of images: {', '.join(columns)}. Choose by --image_column.")
    return columns[0]


def _decoded(data: TrainingData, config: DataConfig, cells: Iterable[Any]) -> Iterator[tuple[torch.Tensor, Conditions]]:
    """Resized images with the conditions of their rows; corrupt ones are skipped if that was asked for."""
    from tqdm.auto import tqdm

    for given in tqdm(cells, desc="decode images", disable=None, leave=False, delay=2):
        cell, conditions = split(given)
        try:
            pixels = data.transform.read(cell)
        except LabError as error:
            if not config.skip_corrupt_images:
                raise
            data.skipped.append(str(error))
        else:
            yield pixels, conditions


def _hold_out(data: TrainingData, config: DataConfig, cells: Iterable[Any], columns: ConditionColumns) -> None:
    images = [(data.transform.fixed(pixels), conditions) for pixels, conditions in _decoded(data, config, cells)]
    data.held_out = _batch_of(images, data, columns)


def _keep_in_memory(data: TrainingData, config: DataConfig, columns: ConditionColumns) -> None:
    """Decodes all training images, unless their sizes differ, as those of oblong images for random crops do."""
    images: list[tuple[torch.Tensor, Conditions]] = []
    cells = (row[data.column] for row in data.train)
    for pixels, conditions in _decoded(data, config, conditioned(cells, data.conditions)):
        images.append((data.transform.fixed(pixels) if config.center_crop else pixels, conditions))
        if images[-1][0].shape != images[0][0].shape:
            return
    data.in_memory = _batch_of(images, data, columns)


def _batch_of(images: list[tuple[torch.Tensor, Conditions]], data: TrainingData, columns: ConditionColumns) -> Batch:
    return Batch.stack(images) if images else Batch(torch.empty(0, *data.image_shape), no_conditions(columns))


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
    _hold_out(data, config, (row[column] for row in train.held_out_rows()), columns)
    return data
