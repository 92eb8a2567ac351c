"""Options that choose the data of a run and how they are prepared; the division of an update's images."""

from dataclasses import dataclass
from typing import Literal

from ..core.errors import LabError
from ..core.options import DATA, DRAWS, OBJECTIVE, SOURCE, SPEED, Need, option
from ..core.words import counted
from .image_sets import IMAGE_DATASETS
from .toy2d import TOY_DATASETS

MOST_CLASSES = 1_000_000  # more is taken for numbers of rows

EMBEDDED_DATASETS = (*IMAGE_DATASETS, *TOY_DATASETS)

IMAGES = ("images",)
SIZED = ("images", "latents")
READ = Need("a data set that is not embedded", lambda config: config.dataset_name not in EMBEDDED_DATASETS)
STREAMING = Need("--streaming", lambda config: config.streaming)
NOT_STREAMING = Need("--streaming", lambda config: not config.streaming, is_absence=True)
NOT_TOY = Need("data read from disk or the Hub", lambda config: config.dataset_name not in TOY_DATASETS)

LABELS = Need("--label_column", lambda config: config.label_column is not None)

# Points are read without workers unless some are asked for.
WORKERS = Need(NOT_TOY.text, lambda config: config.dataloader_num_workers == 0 or NOT_TOY.is_met(config))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Parameters that control the data."""

    _argument_group_name = "data"

    dataset_name: str | None = option(
        None,
        f"Dataset: an image set ({', '.join(IMAGE_DATASETS)}) or toy dataset ({{names}}) that needs no download, a local "
        "folder or a Hub id (default: digits).",
        SOURCE,
        registry="data.toy2d:TOY_DATASETS",
        is_path=True,
        is_first=True,
    )
    dataset_config_name: str | None = option(None, "Configuration of the Hub dataset.", SOURCE, needs=(READ,))
    dataset_split: str = option("train", "Split to train on.", SOURCE, needs=(READ,))
    train_data_dir: str | None = option(
        None,
        "Folder of images (png, jpg, ..., also in subfolders), instead of --dataset_name.",
        SOURCE,
        is_path=True,
        is_first=True,
    )
    cache_dir: str | None = option(
        None, "Folder for downloaded datasets and models (default: the Hub's cache).", SPEED, is_repeated=False
    )
    streaming: bool = option(
        False,
        "Read the dataset as a stream, without downloading all of it; needs --max_train_steps.",
        SOURCE,
        finder="uses",
        needs=(READ,),
    )
    image_column: str | None = option(
        None,
        "Column of the images (default: the only one of that type).",
        SOURCE,
        finder="uses",
        needs=(READ,),
        kinds=IMAGES,
    )
    label_column: str | None = option(
        None,
        "Column of class labels for the model: whole numbers from 0 or a datasets.ClassLabel; for latents, the column that "
        "lrlab data encode stored (default: none).",
        OBJECTIVE,
        kinds=SIZED,
    )
    num_classes: int | None = option(
        None,
        "Classes of --label_column (default: those of its ClassLabel, or one more than the largest label).",
        OBJECTIVE,
        range=f"[1, {MOST_CLASSES}]",
        needs=(LABELS,),
        kinds=SIZED,
    )
    label_dropout: float = option(
        0.0,
        "Probability of training on an image without its label, which guidance needs; 0.1 is usual.",
        DRAWS,
        range="[0, 1)",
        needs=(LABELS,),
        kinds=SIZED,
    )
    data_kind: str | None = option(
        None,
        "Kind of data (default: images if a column holds images, points if one holds lists of numbers). Names: {names}.",
        SOURCE,
        registry="training.kinds:KINDS",
    )
    resolution: int | None = option(
        None,
        "Size in pixels: the shorter side of each image is resized to it, then the image is cropped (default: 64, or the "
        "set's own).",
        SOURCE,
        range="[1, 16384]",
        kinds=SIZED,
        is_first=True,
    )
    image_channels: Literal[1, 3] | None = option(
        None, "1 for grey, 3 for colour (default: 3, or the set's own).", SOURCE, kinds=SIZED
    )
    center_crop: bool = option(False, "Crop at the centre instead of at a random position.", DATA, kinds=IMAGES)
    random_flip: bool = option(False, "Flip half of the images horizontally.", DATA, kinds=IMAGES)
    preserve_input_precision: bool = option(
        True,
        "Keep the precision of 16- and 32-bit images; if off, they are rounded to 8 bits, the default upstream.",
        DATA,
        kinds=IMAGES,
    )
    skip_corrupt_images: bool = option(
        False,
        "Skip images that cannot be decoded, and count and list them, instead of stopping at the first.",
        DATA,
        may_change_on_resume=True,
        kinds=IMAGES,
    )
    num_validation_images: int | None = option(
        None,
        "Images held out for the validation loss, at most a fifth of the data; 0 for no validation (default: 256; "
        "10,000 points).",
        DATA,
        defines_loss=True,
        range="[0, 1e7]",
    )
    in_memory_limit_mb: int = option(
        1024,
        "Largest decoded dataset, in MiB, that each process keeps in memory; larger ones are read from disk.",
        SPEED,
        range="[0, 1e9]",
        needs=(NOT_STREAMING, NOT_TOY),
    )
    stream_shuffle_buffer: int = option(
        1000, "Images in the shuffle buffer of a stream.", DATA, range="[1, 1e7]", needs=(STREAMING,)
    )
    dataloader_num_workers: int | None = option(
        None,
        "Worker processes that read and decode data not in memory; 0 to do this in the main process (default: the spare "
        "cores for runs of 5,000 images or more; 0 for points).",
        SPEED,
        range="[0, 1024]",
        needs=(WORKERS,),
    )

    @property
    def image_shape(self) -> tuple[int, int]:
        """Channels, and pixels of a side; a `ValueError` if they are not resolved yet, or the data are not images."""
        if self.resolution is None or self.image_channels is None:
            raise ValueError("Only a resolved configuration of images has a resolution and channels.")
        return self.image_channels, self.resolution


@dataclass(frozen=True)
class BatchLayout:
    """The division of an update's images among processes and micro-batches, and the rank of this process."""

    micro_batch: int  # images per process and forward pass
    accumulation: int = 1  # forward passes per update
    num_processes: int = 1
    rank: int = 0

    @property
    def global_batch(self) -> int:
        """Images per update, over all processes and micro-batches."""
        return self.micro_batch * self.accumulation * self.num_processes

    def positions(self) -> list[range]:
        """Positions of this process in the global batch, one range per micro-batch."""
        starts = [(step * self.num_processes + self.rank) * self.micro_batch for step in range(self.accumulation)]
        return [range(start, start + self.micro_batch) for start in starts]

    def image_numbers(self, update: int) -> list[int]:
        """The image numbers in the run that this process sees in an update."""
        first = update * self.global_batch
        return [first + position for positions in self.positions() for position in positions]

    def check_fits(self, num_images: int) -> None:
        """Raises a `LabError` if an update needs more images than there are."""
        if self.global_batch <= num_images:
            return
        largest = num_images // (self.accumulation * self.num_processes)
        raise LabError(
            f"The batch of {counted(self.global_batch, 'image')} (--train_batch_size {self.micro_batch} x "
            f"{counted(self.accumulation, 'micro-batch')} x {counted(self.num_processes, 'process')}) is larger than the "
            f"training set of {num_images}. "
            + (f"Use at most --train_batch_size {largest}." if largest else "Use fewer --gradient_accumulation_steps.")
        )
