"""The data of a run; loading of images, by steps that latents and points share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..core.errors import LabError
from ..core.streams import SPLIT_SEED, split_rows, stream_seed
from .batch import Batch, Conditions
from .image_folder import digest_of
from .image_sets import image_set
from .images import ImageTransform, normalise
from .labels import KEYWORD, Classes, Example, Examples, LabelColumn, find_classes, find_label_column
from .layout import BatchLayout
from .options import DataConfig
from .shards import open_shards
from .sources import columns_of, open_dataset
from .streams import ShardedStream

if TYPE_CHECKING:
    import datasets


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


def stream_data(
    config: DataConfig, seed: int, stream: Any, column: str, transform: Transform, name: str, label: LabelColumn | None
) -> TrainingData:
    """The data of a stream, whose held-out rows (a fifth at most) come from a few of its shards."""
    names = dict.fromkeys([column, *([] if label is None else [label.name])])
    source = open_shards(config, stream.select_columns(list(names)), column, name, label)
    num_held_out = min(config.num_validation_images or 0, int(source.lengths.sum()) // 5)
    generator_seed, buffer = stream_seed(seed, "stream"), config.stream_shuffle_buffer
    train = ShardedStream(source, column, num_held_out, SPLIT_SEED, generator_seed, buffer)
    fingerprint = source.fingerprint
    if label is not None:  # whose values are in it, but not what they are to the model
        fingerprint = digest_of([fingerprint, (KEYWORD, label.name)])
    data = TrainingData(name, train, Batch(torch.empty(0)), column, fingerprint, transform)
    data.classes = find_classes(label, None, config.label_dropout, seed)
    hold_out(data, config, train.held_out_examples(), label)
    return data


def hold_out_rows(
    data: TrainingData, config: DataConfig, label: LabelColumn | None, labels: torch.Tensor | None, seed: int
) -> None:
    """Divides data with random access, and their labels, into rows to hold out and rows to train on."""
    held_out, training = split_rows(len(data.train), config.num_validation_images or 0)
    if labels is not None:
        data.fingerprint = digest_of([data.fingerprint, (KEYWORD, labels.numpy().tobytes())])
        data.conditions = {KEYWORD: labels[training]}
    data.classes = find_classes(label, labels, config.label_dropout, seed)
    own = {} if labels is None else {KEYWORD: labels[held_out]}
    hold_out(data, config, Examples(data.train.select(held_out)[data.column], own), label)
    if held_out:
        data.train = data.train.select(training)


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


def hold_out(data: TrainingData, config: DataConfig, examples: Iterable[Example], label: LabelColumn | None) -> None:
    """Makes these examples the held-out ones."""
    images = [(data.transform.fixed(pixels), conditions) for pixels, conditions in decoded_rows(data, config, examples)]
    data.held_out = batch_of(images, data, label)


def batch_of(images: list[tuple[torch.Tensor, Conditions]], data: TrainingData, label: LabelColumn | None) -> Batch:
    """Images with their conditions as a batch, which may be empty."""
    if images:
        return Batch.stack(images)
    return Batch(torch.empty(0, *data.image_shape), {} if label is None else {KEYWORD: torch.empty(0, dtype=torch.int64)})


# --- images -------------------------------------------------------------------------------------------------------------


def load_image_data(config: DataConfig, seed: int, layout: BatchLayout) -> TrainingData:
    """Loads the images of a resolved configuration, holds out some, and decodes them if they fit into memory."""
    import datasets as hf_datasets

    dataset = open_dataset(config)
    column = find_image_column(dataset, config.image_column)
    dataset = dataset.cast_column(column, hf_datasets.Image(decode=False))
    label = find_label_column(dataset, config)
    channels, resolution = config.image_shape
    transform = ImageTransform(
        resolution=resolution,
        channels=channels,
        center_crop=config.center_crop,
        random_flip=config.random_flip,
        eight_bit=not config.preserve_input_precision,
        seed=seed,
    )
    name = config.dataset_name or config.train_data_dir or ""
    if config.streaming:
        return stream_data(config, seed, dataset, column, transform, name, label)
    labels = None if label is None else label.read_all(dataset)
    rows = dataset.select_columns([column])
    data = TrainingData(name, rows, Batch(torch.empty(0)), column, fingerprint_of(config, rows), transform)
    data.image_set = name if image_set(config.dataset_name) is not None else None
    hold_out_rows(data, config, label, labels, seed)
    layout.check_fits(len(data.train))
    if len(data.train) * 4 * transform.channels * transform.resolution**2 <= config.in_memory_limit_mb * 2**20:
        _keep_in_memory(data, config, label)
    if not data.num_images:
        raise LabError(f"{name!r} has no images to train on.")
    return data


def fingerprint_of(config: DataConfig, dataset: datasets.Dataset) -> str:
    """A text that changes with the data."""
    if (embedded := image_set(config.dataset_name)) is None:
        return dataset._fingerprint
    return f"{embedded.name}-{config.resolution}" if "made" in embedded.traits else embedded.name


def find_image_column(dataset: datasets.Dataset, asked: str | None) -> str:
    """The column of images: the given one, or the only one of type `datasets.Image`."""
    from datasets import Image

    features, listing = columns_of(dataset)
    columns = [name for name, feature in features.items() if isinstance(feature, Image)]
    remedy = (
        "Hint: for bytes, or structs of bytes and path, dataset.cast_column('NAME', datasets.Image()) in Python makes one, "
        "and dataset.save_to_disk('images') a folder for --dataset_name; points are read from a column of lists of numbers."
    )
    if asked is not None and asked not in columns:
        raise LabError(f"--image_column {asked!r} is not a column of images. Columns: {listing}. {remedy}")
    if asked is None and not columns:
        raise LabError(f"The dataset has no column of images. Columns: {listing}. {remedy}")
    if asked is None and len(columns) > 1:
        raise LabError(f"The dataset has several columns of images: {', '.join(columns)}. Choose one with --image_column.")
    return asked or columns[0]


def _keep_in_memory(data: TrainingData, config: DataConfig, label: LabelColumn | None) -> None:
    """Decodes all training images, unless their sizes differ, as those of oblong images for random crops do."""
    images: list[tuple[torch.Tensor, Conditions]] = []
    for pixels, conditions in decoded_rows(data, config, data.examples):
        images.append((data.transform.fixed(pixels) if config.center_crop else pixels, conditions))
        if images[-1][0].shape != images[0][0].shape:
            return
    data.in_memory = batch_of(images, data, label)
