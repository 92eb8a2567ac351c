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
from .options import BatchLayout, DataConfig
from .shards import open_shards
from .sources import columns_of, open_dataset
from .streams import ShardedStream

if TYPE_CHECKING:
    import datasets


class Transform(Protocol):
    """From a cell of the dataset to a tensor, as [`ImageTransform`], [`PointTransform`] and [`LatentTransform`] do."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a training tensor."""

    def read(self, cell: Any) -> torch.Tensor:
        """The deterministic part, before [`normalise`]; a `LabError` names a cell that cannot be read."""

    def augment(self, tensors: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """The random part, of tensors of one size: a function of their image numbers in the run."""

    def fixed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replaces `augment` for held-out data, without randomness; of one tensor or of several."""


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
    skips_corrupt: bool = False  # images that cannot be decoded
    skipped: list[str] = field(default_factory=list)  # errors of these, each once
    known: dict[Any, Any] = field(default_factory=dict)  # a cache for results that depend on the data only

    @property
    def num_images(self) -> int | None:
        """The number of training images; `None` for a stream."""
        if self.in_memory is not None:
            return len(self.in_memory)
        return len(self.train) if hasattr(self.train, "__len__") else None

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.transform.shape

    @property
    def examples(self) -> Any:
        """The training images with their conditions: a sequence, or an iterable for a stream."""
        if self.num_images is None:
            return self.train
        return Examples(self.train[self.column], self.conditions)

    def all_in_memory(self, most: int | None = None) -> Batch:
        """The training images, centre-cropped; at most `most` if they must be decoded."""
        if self.in_memory is not None:
            return self.in_memory.with_data(self.transform.fixed(self.in_memory.data))
        return self.decoded(itertools.islice(self.examples, most))

    def random_sample(self, num: int, most: int) -> Batch:
        """`num` random training images, of the first `most` if they must be decoded."""
        if self.num_images is None:
            return self.all_in_memory(num)
        total = self.num_images if self.in_memory is not None else min(self.num_images, most)
        rows = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:num]
        if self.in_memory is not None:
            return self.all_in_memory()[rows]
        return self.decoded(self.examples[row] for row in rows.tolist())

    def read_fixed(self, example: Example) -> tuple[torch.Tensor, Conditions]:
        """An image without randomness, in float32, and its conditions."""
        return self.transform.fixed(normalise(self.transform.read(example.cell))), example.conditions

    def decoded(self, examples: Iterable[Example]) -> Batch:
        """Images without randomness, without corrupt ones if these are to be skipped."""
        images = [(self.transform.fixed(image), conditions) for image, conditions in self.resized(examples)]
        return Batch.stack(images) if images else self.held_out[:0]

    def resized(self, examples: Iterable[Example]) -> Iterator[tuple[torch.Tensor, Conditions]]:
        """Resized images in float32 with their conditions, without corrupt ones if these are to be skipped."""
        from tqdm.auto import tqdm

        for cell, conditions in tqdm(examples, desc="decode images", disable=None, leave=False, delay=2):
            try:
                yield normalise(self.transform.read(cell)), conditions
            except LabError as error:
                if not self.skips_corrupt:
                    raise
                self.note([str(error)])

    def note(self, problems: Iterable[str]) -> None:
        """Lists each corrupt image once, though it comes again every epoch."""
        self.skipped += [problem for problem in dict.fromkeys(problems) if problem not in self.skipped]

    def hold_out(self, examples: Iterable[Example], label: LabelColumn | None) -> None:
        """Makes these examples the held-out ones."""
        nothing = {} if label is None else {KEYWORD: torch.empty(0, dtype=torch.int64)}
        self.held_out = Batch(torch.empty(0, *self.image_shape), nothing)
        self.held_out = self.decoded(examples)


def stream_data(
    config: DataConfig, seed: int, stream: Any, column: str, transform: Transform, name: str, label: LabelColumn | None
) -> TrainingData:
    """The data of a stream, whose held-out rows (a fifth at most) come from a few of its shards."""
    names = dict.fromkeys([column, *([] if label is None else [label.name])])
    source = open_shards(config, stream.select_columns(list(names)), column, name, label)
    num_held_out = min(config.num_validation_images or 0, int(source.lengths.sum()) // 5)
    generator_seed, buffer = stream_seed(seed, "stream"), config.stream_shuffle_buffer
    train = ShardedStream(source, column, num_held_out, SPLIT_SEED, generator_seed, buffer)
    data = TrainingData(name, train, Batch(torch.empty(0)), column, source.fingerprint, transform)
    if label is not None:  # whose values are in it, but not what they are to the model
        data.fingerprint = digest_of([source.fingerprint, (KEYWORD, label.name)])
    data.classes = find_classes(label, None, config.label_dropout, seed)
    data.skips_corrupt = config.skip_corrupt_images
    data.hold_out(train.held_out_examples(), label)
    return data


def table_data(
    config: DataConfig, seed: int, dataset: datasets.Dataset, column: str, transform: Transform, fingerprint: str
) -> TrainingData:
    """Data with random access, divided into rows to hold out and rows to train on, with their labels."""
    label = find_label_column(dataset, config)
    labels = None if label is None else label.read_all(dataset)
    rows, name = dataset.select_columns([column]), config.dataset_name or config.train_data_dir or ""
    data = TrainingData(name, rows, Batch(torch.empty(0)), column, fingerprint, transform)
    data.skips_corrupt = config.skip_corrupt_images
    held_out, training = split_rows(len(rows), config.num_validation_images or 0)
    own = {}
    if labels is not None:
        data.fingerprint = digest_of([fingerprint, (KEYWORD, labels.numpy().tobytes())])
        data.conditions, own = {KEYWORD: labels[training]}, {KEYWORD: labels[held_out]}
    data.classes = find_classes(label, labels, config.label_dropout, seed)
    data.hold_out(Examples(rows.select(held_out)[column], own), label)
    if held_out:
        data.train = rows.select(training)
    return data


# --- images -------------------------------------------------------------------------------------------------------------


def load_image_data(config: DataConfig, seed: int, layout: BatchLayout) -> TrainingData:
    """Loads the images of a resolved configuration, holds out some, and decodes them if they fit into memory."""
    import datasets as hf_datasets

    dataset = open_dataset(config)
    column = find_image_column(dataset, config.image_column)
    dataset = dataset.cast_column(column, hf_datasets.Image(decode=False))
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
        return stream_data(config, seed, dataset, column, transform, name, find_label_column(dataset, config))
    if (embedded := image_set(config.dataset_name)) is None:
        fingerprint = dataset.select_columns([column])._fingerprint
    else:
        fingerprint = f"{name}-{resolution}" if "made" in embedded.traits else name
    data = table_data(config, seed, dataset, column, transform, fingerprint)
    data.image_set = None if embedded is None else name
    layout.check_fits(len(data.train))
    if len(data.train) * 4 * channels * resolution**2 <= config.in_memory_limit_mb * 2**20:
        _keep_in_memory(data, config)
    if not data.num_images:
        raise LabError(f"{name!r} has no images to train on.")
    return data


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


def _keep_in_memory(data: TrainingData, config: DataConfig) -> None:
    """Decodes all training images, unless their sizes differ, as those of oblong images for random crops do."""
    images: list[tuple[torch.Tensor, Conditions]] = []
    for pixels, conditions in data.resized(data.examples):
        images.append((data.transform.fixed(pixels) if config.center_crop else pixels, conditions))
        if images[-1][0].shape != images[0][0].shape:
            return
    data.in_memory = Batch.stack(images) if images else data.held_out[:0]
