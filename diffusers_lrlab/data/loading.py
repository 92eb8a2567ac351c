"""From a name, a folder or a Hub id to images: found, checked, and split into training and held-out ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import LabError
from ..streams import stream_generator, stream_seed
from .digits import load_digits_dataset
from .images import ImageTransform
from .layout import BatchLayout

if TYPE_CHECKING:
    import datasets

    from ..training.config import TrainingConfig

# The held-out images are the same for every seed of a study: losses on different images cannot be compared.
SPLIT_SEED = 0


@dataclass
class ImageData:
    """
    The data of a run.

    Args:
        name (`str`): For cards and logs.
        train: `datasets.Dataset` or `datasets.IterableDataset` of undecoded images to train on.
        held_out (`torch.Tensor`): float32 `(num_held_out, channels, resolution, resolution)` in [-1, 1].
        column (`str`): The image column of `train`.
        fingerprint (`str`): Changes when the data do.
        transform ([`ImageTransform`]): How an image becomes a tensor.
        pixels (`torch.Tensor` or `None`): The resized training images as one float32 tensor, when they fit in memory.
        skipped (`list` of `str`): Corrupt images that were left out on request.
    """

    name: str
    train: Any
    held_out: torch.Tensor
    column: str
    fingerprint: str
    transform: ImageTransform
    pixels: torch.Tensor | None = None
    skipped: list[str] = field(default_factory=list)

    @property
    def num_images(self) -> int | None:
        """Training images, `None` for a stream."""
        if self.pixels is not None:
            return len(self.pixels)
        return len(self.train) if hasattr(self.train, "__len__") else None

    def all_pixels(self) -> torch.Tensor:
        """The training images, cropped in the middle, as one tensor; decoded anew if they are not in memory."""
        if self.pixels is not None:
            return self.transform.fixed(self.pixels)
        return torch.stack([self.transform.fixed(self.transform.read(row[self.column])) for row in self.train])

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape of one training image."""
        return (self.transform.channels, self.transform.resolution, self.transform.resolution)


def load_image_data(config: TrainingConfig, num_processes: int = 1) -> ImageData:
    """
    Loads the dataset of a resolved configuration, holds out validation images, and decodes what fits into memory.

    Raises:
        LabError: for a dataset that cannot be found or read, without an image column, with corrupt images, or with
            fewer images than needed.
    """
    import datasets as hf_datasets

    dataset = _open(config)
    column = find_image_column(dataset, config.image_column)
    dataset = dataset.cast_column(column, hf_datasets.Image(decode=False)).select_columns([column])
    transform = ImageTransform(
        resolution=config.resolution,
        channels=config.image_channels,
        center_crop=config.center_crop,
        random_flip=config.random_flip,
        eight_bit=not config.preserve_input_precision,
        seed=config.seed,
    )
    name = config.dataset_name or config.train_data_dir or ""
    if config.streaming:
        return _stream_data(config, dataset, column, transform, name)

    fingerprint = dataset._fingerprint if name != "digits" else "digits"
    data = ImageData(name, dataset, torch.empty(0), column, fingerprint, transform)
    num_held_out = min(config.num_validation_images, len(dataset) // 5)
    order = torch.randperm(len(dataset), generator=stream_generator(SPLIT_SEED, "held-out")).tolist()
    held_out = _decode_rows(data, config, dataset, sorted(order[:num_held_out]), fixed=True)
    assert held_out is not None  # fixed crops have one shape
    data.held_out = held_out
    if num_held_out:
        data.train = dataset.select(sorted(order[num_held_out:]))
    layout = BatchLayout(config.train_batch_size, config.gradient_accumulation_steps, num_processes)
    layout.check_fits(len(data.train))
    if len(data.train) * 4 * transform.channels * transform.resolution**2 <= config.in_memory_limit_mb * 2**20:
        data.pixels = _decode_rows(data, config, data.train, range(len(data.train)), fixed=config.center_crop)
    if not data.num_images:
        raise LabError(f"{name!r} has no images to train on.")
    return data


def _open(config: TrainingConfig) -> Any:
    import datasets as hf_datasets

    if config.dataset_name == "digits":
        return load_digits_dataset()
    name = config.train_data_dir or config.dataset_name or ""
    folder = Path(name).expanduser()
    try:
        if (folder / "state.json").is_file():
            if config.dataset_config_name is not None or config.dataset_split != "train":
                raise LabError(
                    f"{name!r} was written by save_to_disk and has neither configurations nor splits to choose from. "
                    "Leave --dataset_config_name and --dataset_split out."
                )
            saved = hf_datasets.load_from_disk(str(folder))
            return saved.to_iterable_dataset() if config.streaming else saved
        source = {"path": name}
        if folder.is_dir():
            # By itself, `load_dataset` takes a folder for what most of its files are: captions beside images, say.
            images = _holds_images(folder)
            source = {"path": "imagefolder", "data_dir": str(folder)} if images else {"path": str(folder)}
        return hf_datasets.load_dataset(
            **source,
            name=config.dataset_config_name,
            split=config.dataset_split,
            cache_dir=config.cache_dir,
            streaming=config.streaming,
        )
    except LabError:
        raise
    except Exception as error:  # datasets raises some twenty kinds here, of its own, of fsspec and of the Hub client
        raise LabError(f"Cannot load the dataset {name!r} (split {config.dataset_split!r}): {error}") from error


def _holds_images(folder: Path) -> bool:
    """Whether a folder is one of image files (`True`) or of data sets (`False`); neither is an error."""
    from PIL import Image

    endings = {path.suffix.lower() for path in folder.rglob("*") if path.is_file()}
    if endings & {".parquet", ".arrow", ".tar"}:
        return False
    if endings & set(Image.registered_extensions()):
        return True
    if endings & {".csv", ".json", ".jsonl", ".zip"}:
        return False
    raise LabError(f"The data folder {str(folder)!r} holds no images and no dataset files (png, jpg, parquet, ...).")


def find_image_column(dataset: datasets.Dataset, asked: str | None) -> str:
    """The column to read images from: the one asked for, or the only one of type `datasets.Image`."""
    from datasets import Image

    features = dataset.features
    if features is None:
        raise LabError("The stream does not declare its columns, so none can be checked. Train without --streaming.")
    columns = [name for name, feature in features.items() if isinstance(feature, Image)]
    listing = ", ".join(f"{name} ({getattr(feature, 'dtype', '?')})" for name, feature in features.items())
    if asked is not None:
        if asked not in columns:
            raise LabError(f"--image_column {asked!r} is not a column of images. Columns: {listing}.")
        return asked
    if not columns:
        raise LabError(f"The dataset has no column of images. Columns: {listing}. Use a dataset with an Image column.")
    if len(columns) > 1:
        raise LabError(f"The dataset has several columns of images: {', '.join(columns)}. Choose by --image_column.")
    return columns[0]


def _decode_rows(data: ImageData, config: TrainingConfig, dataset: Any, rows: Any, fixed: bool) -> torch.Tensor | None:
    """Resized images as one tensor; `None` if their sizes differ, which only random crops of oblong images do."""
    from tqdm.auto import tqdm

    images = []
    transform = data.transform
    for row in tqdm(rows, desc="decode images", disable=None, leave=False, delay=2):
        try:
            pixels = transform.read(dataset[row][data.column])
        except LabError as error:
            if not config.skip_corrupt_images:
                raise
            data.skipped.append(str(error))
            continue
        images.append(transform.fixed(pixels) if fixed else pixels)
        if images[-1].shape != images[0].shape:
            return None
    return torch.stack(images) if images else torch.empty(0, *data.image_shape)


def _stream_data(config: TrainingConfig, stream: Any, column: str, transform: ImageTransform, name: str) -> ImageData:
    """A stream, whose first images are held out."""
    train = stream.skip(config.num_validation_images).shuffle(
        seed=stream_seed(config.seed, "stream") % 2**32, buffer_size=config.stream_shuffle_buffer
    )
    data = ImageData(name, train, torch.empty(0), column, name, transform)
    rows = list(stream.take(config.num_validation_images))
    held_out = _decode_rows(data, config, rows, range(len(rows)), fixed=True)
    assert held_out is not None  # fixed crops have one shape
    data.held_out = held_out
    return data
