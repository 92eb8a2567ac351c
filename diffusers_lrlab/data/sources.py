"""Sources of data: a folder, a saved dataset or the Hub; and whether they are images or points."""

import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.errors import LabError, did_you_mean, must_be
from ..core.files import expanded
from .image_folder import FolderFiles, ending_of, open_image_folder, warn_once
from .image_sets import IMAGE_DATASETS, image_set, load_image_dataset
from .options import EMBEDDED_DATASETS, DataConfig
from .toy2d import TOY_DATASETS


def open_dataset(config: DataConfig, streaming: bool | None = None) -> Any:
    """
    The split of a configuration, as a `datasets.Dataset`, or an `IterableDataset` if streaming.

    `streaming` overrides the configuration.
    """
    import datasets as hf_datasets

    streaming = config.streaming if streaming is None else streaming
    if (embedded := image_set(config.dataset_name)) is not None:
        return load_image_dataset(embedded.name, resolution=config.resolution if "made" in embedded.traits else None)
    with load_errors_explained(config):
        if (rows := _open_table(config)) is not None:
            return rows.to_iterable_dataset() if streaming else rows
        if streaming:
            return open_builder(config).as_streaming_dataset(split=config.dataset_split)
        return hf_datasets.load_dataset(
            _source(config), name=config.dataset_config_name, split=config.dataset_split, cache_dir=config.cache_dir
        )


def open_builder(config: DataConfig) -> Any:
    """The `datasets.DatasetBuilder` of a configuration, which lists the files."""
    import datasets as hf_datasets

    with load_errors_explained(config):
        return hf_datasets.load_dataset_builder(_source(config), name=config.dataset_config_name, cache_dir=config.cache_dir)


def is_saved_dataset(config: DataConfig) -> bool:
    """Whether the data are a folder that `save_to_disk` wrote."""
    return (_folder(config) / "state.json").is_file()


def is_table(config: DataConfig) -> bool:
    """Whether the data have random access to their rows: a saved dataset, or a folder of images."""
    return is_saved_dataset(config) or _images_of(config) is not None


def _open_table(config: DataConfig) -> Any:
    import datasets as hf_datasets

    if (images := _images_of(config)) is not None:
        if config.dataset_config_name is not None:
            hint = "a folder of images has no configurations; leave it out"
            raise must_be("--dataset_config_name", config.dataset_config_name, "a configuration of the data", hint)
        return open_image_folder(images, config.dataset_split)
    if not is_saved_dataset(config):
        return None
    if config.dataset_config_name is not None or config.dataset_split != "train":
        raise LabError(
            f"{_name(config)!r} was written by save_to_disk, which stores no configurations or splits. Leave "
            "--dataset_config_name and --dataset_split out."
        )
    return hf_datasets.load_from_disk(str(_folder(config)))


def _name(config: DataConfig) -> str:
    return config.train_data_dir or config.dataset_name or ""


def _folder(config: DataConfig) -> Path:
    return expanded(_name(config))


def _source(config: DataConfig) -> str:
    """The folder of data, which `datasets` can read, or the id on the Hub."""
    folder = _folder(config)
    if not folder.is_dir():
        return _name(config)
    path = os.path.abspath(folder)
    if glob.has_magic(path):
        flag = "--train_data_dir" if config.train_data_dir else "--dataset_name"
        wanted = "a path without the signs *, ? and [, which `datasets` takes for a pattern"
        raise must_be(flag, path, wanted, "rename the folder")
    return path


@contextmanager
def load_errors_explained(config: DataConfig) -> Iterator[None]:
    try:
        yield
    except LabError:
        raise
    except Exception as error:  # about twenty types, of datasets, fsspec and the Hub client
        from datasets.exceptions import DatasetGenerationError

        cause = error.__cause__ if type(error) is DatasetGenerationError else error  # its own text says nothing
        reason = str(cause or error)
        if isinstance(cause, (FileNotFoundError, ConnectionError)):  # of which DatasetNotFoundError is one
            reason = reason.rstrip(".") + _nothing_here(_name(config))
        raise LabError(f"Cannot load the dataset {_name(config)!r} (split {config.dataset_split!r}): {reason}") from error


def _nothing_here(name: str) -> str:
    """What to add to the Hub's error for a name that may be a misspelt folder."""
    path = expanded(name)
    if path.exists():
        return ""
    folders = (str(other) for other in path.parent.glob("*") if other.is_dir())
    return f". There is no folder of this name here, either.{did_you_mean(name, folders)}"


def local_folder(dataset_name: str) -> str | None:
    """`dataset_name` if it is a local folder, `None` if it is an embedded set or a Hub id."""
    if dataset_name in EMBEDDED_DATASETS:
        return None
    if expanded(dataset_name).exists() or dataset_name.startswith((".", "/", "~")):
        return dataset_name
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", dataset_name):
        raise LabError(
            f"--dataset_name {dataset_name!r} is neither an embedded set ({', '.join(EMBEDDED_DATASETS)}), nor a folder "
            "that exists, nor a Hub id (USER/NAME)."
        )
    if "/" not in dataset_name and (hint := did_you_mean(dataset_name, EMBEDDED_DATASETS)):
        raise LabError(f"Unknown data set {dataset_name!r}.{hint} A Hub dataset is written USER/NAME.")
    return None


def find_images(folder: Path) -> FolderFiles | None:
    """The files of a folder of images; `None` for a folder of dataset files, and a `LabError` for one of neither."""
    if folder.resolve() in (Path(os.path.expanduser("~")).resolve(), Path(folder.resolve().anchor)):
        raise LabError(f"{str(folder)!r} contains all of your files. Give the folder of the data.")
    files = FolderFiles(folder)
    endings = {ending_of(path) for path in files.others}
    if tables := endings & {".parquet", ".arrow", ".tar"}:
        if files.images:
            files.unread[f"the data are read from {' and '.join(sorted(tables))}"] += files.images.values()
            warn_once(files.describe_unread())
        return None
    if files.images:
        return files
    if files.metadata or endings & {".csv", ".json", ".jsonl", ".zip"}:
        return None
    raise LabError(
        f"The data folder {str(folder)!r} holds no images and no dataset files (png, jpg, parquet, ...). It has "
        f"{files.contents()}. {files.describe_unread()}".rstrip()
    )


def _images_of(config: DataConfig) -> FolderFiles | None:
    folder = _folder(config)
    is_images = folder.is_dir() and not is_saved_dataset(config)
    return find_images(folder) if is_images else None


def columns_of(dataset: Any) -> tuple[Any, str]:
    """The features of a dataset by column, and a list of them for errors; a `LabError` if it does not declare them."""
    features = dataset.features
    if features is None:
        raise LabError("The stream does not declare its columns, so they cannot be checked. Train without --streaming.")
    return features, ", ".join(f"{name} ({getattr(item, 'dtype', None) or item})" for name, item in features.items())


def is_numeric_list(feature: Any) -> bool:
    """Whether a column contains lists of numbers, of any length."""
    item = getattr(feature, "feature", None)
    kind = str(getattr(item, "dtype", ""))
    return kind.startswith(("float", "int", "uint")) and not hasattr(item, "feature")


def find_point_column(dataset: Any) -> str:
    """The only column of lists of numbers; a `LabError` if there is none, or if there are several."""
    features, listing = columns_of(dataset)
    columns = [name for name, feature in features.items() if is_numeric_list(feature)]
    if len(columns) == 1:
        return columns[0]
    if columns:
        remedy = "save it with one of them, as by dataset.remove_columns(...) and dataset.save_to_disk(FOLDER) in Python"
        raise LabError(f"The dataset has several columns of lists of numbers: {', '.join(columns)}. Hint: {remedy}.")
    raise LabError(f"The dataset has no column of points (lists of equally many numbers). Columns: {listing}.")


def has_points(config: DataConfig) -> bool:
    """
    Whether a configuration that names no kind of data means points: a toy dataset, or data with a column of lists of numbers
    and none of images. May read the columns from the Hub.
    """
    name = config.dataset_name or ""
    if name in TOY_DATASETS:
        return True
    is_embedded = not name and not config.train_data_dir or name in IMAGE_DATASETS
    if is_embedded or config.image_column is not None or _is_folder_of_images(config):
        return False
    from datasets import Image

    features = (open_dataset(config, streaming=True).features or {}).values()
    return any(map(is_numeric_list, features)) and not any(isinstance(feature, Image) for feature in features)


def _is_folder_of_images(config: DataConfig) -> bool:
    try:
        return _images_of(config) is not None
    except LabError:
        return True  # without images or data: an error when images are loaded
