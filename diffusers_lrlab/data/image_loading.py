"""Datasets of images: loaded, checked, split, and decoded into memory if they fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..core.errors import LabError
from .batch import Batch, Conditions
from .conditions import ConditionColumns, find_conditions, fingerprint_with
from .image_sets import image_set
from .images import ImageTransform
from .labels import find_classes, find_label_column
from .layout import BatchLayout
from .loading import TrainingData, batch_of, decoded_rows, hold_out_rows, select_columns, stream_data
from .options import DataConfig
from .sources import columns_of, open_dataset

if TYPE_CHECKING:
    import datasets


def load_image_data(
    config: DataConfig, seed: int, layout: BatchLayout, conditions: Mapping[str, str] | None = None
) -> TrainingData:
    """
    Loads the images of a resolved configuration, holds out some for validation, and decodes them if they fit into memory.

    `conditions` are further columns of numbers by the keyword of the model's `forward`: `{"class_labels": "label"}`.
    """
    import datasets as hf_datasets

    dataset = open_dataset(config)
    column = find_image_column(dataset, config.image_column)
    dataset = dataset.cast_column(column, hf_datasets.Image(decode=False))
    columns = find_conditions(dataset, conditions) | find_label_column(dataset, config)
    dataset, values = select_columns(dataset, column, columns, config.streaming)
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
        data = stream_data(config, seed, dataset, column, transform, name, columns)
        data.classes = find_classes(columns, values, config.label_dropout, seed)
        return data
    fingerprint = fingerprint_with(fingerprint_of(config, dataset), values)
    data = TrainingData(name, dataset, Batch(torch.empty(0)), column, fingerprint, transform)
    data.image_set = name if image_set(config.dataset_name) is not None else None
    hold_out_rows(data, config, columns, values, seed)
    layout.check_fits(len(data.train))
    if len(data.train) * 4 * transform.channels * transform.resolution**2 <= config.in_memory_limit_mb * 2**20:
        _keep_in_memory(data, config, columns)
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
    if asked is not None:
        if asked not in columns:
            remedy = _remedy({asked: features[asked]} if asked in features else {})
            raise LabError(f"--image_column {asked!r} is not a column of images. Columns: {listing}.{remedy}")
        return asked
    if not columns:
        remedy = (
            _remedy(features) or " Use a dataset with an Image column; points are read from one column of lists of numbers."
        )
        raise LabError(f"The dataset has no column of images. Columns: {listing}.{remedy}")
    if len(columns) > 1:
        raise LabError(f"The dataset has several columns of images: {', '.join(columns)}. Choose one with --image_column.")
    return columns[0]


def _remedy(features: Mapping[str, Any]) -> str:
    """How to make a column of images of the first column that holds images in another form; empty if there is none."""
    steps = (step for name, feature in features.items() if (step := _to_images(name, feature)))
    if (step := next(steps, None)) is None:
        return ""
    return f" Hint: in Python, dataset = dataset{step} and dataset.save_to_disk('images'); then --dataset_name images."


def _to_images(name: str, feature: Any) -> str | None:
    """Calls of `datasets` that make a column of images of structs, bytes or lists; empty for one, `None` for other data."""
    from datasets import Image

    if isinstance(feature, Image):
        return ""
    if isinstance(feature, dict) and not {"bytes", "path"} & feature.keys():  # a struct with images among its fields
        inner = (_to_images(f"{name}.{key}", each) for key, each in feature.items())
        return next((f".flatten(){step}" for step in inner if step is not None), None)
    if isinstance(feature, dict) or str(getattr(feature, "dtype", "")).endswith("binary"):
        return f".cast_column({name!r}, datasets.Image())"
    item = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    first = "first_" + name
    if item is None or (step := _to_images(first, item)) is None:
        return None
    return f".map(lambda row: {{{first!r}: row[{name!r}][0]}}, remove_columns={name!r}){step}"


def _keep_in_memory(data: TrainingData, config: DataConfig, columns: ConditionColumns) -> None:
    """Decodes all training images, unless their sizes differ, as those of oblong images for random crops do."""
    images: list[tuple[torch.Tensor, Conditions]] = []
    for pixels, conditions in decoded_rows(data, config, data.examples):
        images.append((data.transform.fixed(pixels) if config.center_crop else pixels, conditions))
        if images[-1][0].shape != images[0][0].shape:
            return
    data.in_memory = batch_of(images, data, columns)
