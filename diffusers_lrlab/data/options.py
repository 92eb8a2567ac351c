"""The options that say which data a run learns from, and how they are prepared."""

from dataclasses import dataclass
from typing import Literal

from ..core.options import DATA, SOURCE, SPEED, Need, option
from .image_sets import IMAGE_DATASETS
from .toy2d_entries import TOY_DATASETS

EMBEDDED_DATASETS = (*IMAGE_DATASETS, *TOY_DATASETS)

IMAGES = ("images",)
READ = Need("data that are not embedded", lambda config: config.dataset_name not in EMBEDDED_DATASETS)
STREAMING = Need("--streaming", lambda config: config.streaming)
NOT_STREAMING = Need("--streaming", lambda config: not config.streaming, is_absence=True)
EIGHT_BITS = Need("--decoding uint8 or draft", lambda config: config.decoding != "float")
NOT_TOY = Need("data that are read, and toy sets are made", lambda config: config.dataset_name not in TOY_DATASETS)

# 0 is how points are read unless workers are asked for.
WORKERS = Need(NOT_TOY.text, lambda config: config.dataloader_num_workers == 0 or NOT_TOY.is_met(config))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Parameters that control the data."""

    _argument_group_name = "data"

    dataset_name: str | None = option(
        None,
        f"A set of images ({', '.join(IMAGE_DATASETS)}; digits by default) or of 2-D points ({{names}}) that needs no "
        "download, a local folder, or a Hub id.",
        SOURCE,
        registry="data.toy2d_entries:TOY_DATASETS",
        is_path=True,
    )
    dataset_config_name: str | None = option(None, "Configuration of the Hub dataset.", SOURCE, needs=(READ,))
    dataset_split: str = option("train", "Split to train on.", SOURCE, needs=(READ,))
    train_data_dir: str | None = option(
        None, "Folder of images (png, jpg, ..., also in subfolders); excludes --dataset_name.", SOURCE, is_path=True
    )
    cache_dir: str | None = option(None, "Where datasets and models that are downloaded are kept.", SPEED, is_repeated=False)
    streaming: bool = option(
        False, "Read the dataset as a stream, without downloading it whole; needs --max_train_steps.", SOURCE, finder="uses"
    )
    image_column: str | None = option(
        None,
        "Column that holds the images; found by its type if there is only one.",
        SOURCE,
        finder="uses",
        needs=(READ,),
        kinds=IMAGES,
    )
    point_column: str | None = option(
        None,
        "Column that holds points, as lists of as many numbers in every row; found by its type if there is only one, "
        "and none of images.",
        SOURCE,
    )
    data_kind: str | None = option(
        None,
        "What the data are, by name; found from their columns if not given. Names: {names}.",
        SOURCE,
        registry="training.kinds.select:KINDS",
    )
    resolution: int | None = option(
        None,
        "Pixels of a side: images are resized and cropped, or made so; 64, or that of an embedded set.",
        SOURCE,
        range="[1, 16384]",
        kinds=IMAGES,
    )
    image_channels: Literal[1, 3] | None = option(
        None, "1 for grey, 3 for colour; 3, or that of an embedded set.", SOURCE, kinds=IMAGES
    )
    center_crop: bool = option(False, "Crop at the centre instead of a random place.", DATA, kinds=IMAGES)
    random_flip: bool = option(False, "Flip half of the images horizontally.", DATA, kinds=IMAGES)
    preserve_input_precision: bool = option(
        True,
        "Keep 16- and 32-bit images at their precision (upstream rounds to 8 bits unless asked; here that is "
        "--no_preserve_input_precision).",
        DATA,
        kinds=IMAGES,
    )
    decoding: Literal["float", "uint8", "draft"] = option(
        "float",
        "How images are resized: in float32; in 8 bits, which is faster and differs by a level; or draft, which also lets "
        "JPEGs be decoded at a fraction of their size that is 4 times the resolution or more.",
        DATA,
        kinds=IMAGES,
    )
    skip_corrupt_images: bool = option(
        False,
        "Leave out images that cannot be decoded, count and list them, instead of stopping at the first.",
        DATA,
        may_change_on_resume=True,
        kinds=IMAGES,
    )
    num_validation_images: int | None = option(
        None,
        "Images held out for the validation loss, at most a fifth of the set; 256, or 10,000 points. 0 turns "
        "validation off.",
        DATA,
        defines_loss=True,
        range="[0, 1e7]",
    )
    in_memory_limit_mb: int = option(
        1024,
        "Sets that fit into this many MiB once decoded are kept in memory, per process; larger ones are read.",
        SPEED,
        range="[0, 1e9]",
        needs=(NOT_STREAMING, NOT_TOY),
    )
    cache_decoded: bool = option(
        False,
        "Keep the resized images in a file in the folder of --cache_dir, which later runs on the same data read instead "
        "of decoding; the file is as large as the pixels are.",
        SPEED,
        needs=(NOT_STREAMING, NOT_TOY, EIGHT_BITS),
        kinds=IMAGES,
    )
    stream_shuffle_buffer: int = option(
        1000, "Images in the shuffle buffer of a stream.", DATA, range="[1, 1e7]", needs=(STREAMING,)
    )
    dataloader_num_workers: int | None = option(
        None,
        "Worker processes that read and decode what is not in memory; 0 does it in the main process. If it is not given: as "
        "many as cores are left in a run of 5,000 images or more, and 0 for points.",
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
