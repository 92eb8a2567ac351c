"""Points: the embedded toy datasets, and datasets with a column of equally long lists of numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..core.errors import LabError, must_be
from ..core.streams import split_rows
from ..core.words import counted
from .batch import Batch
from .loading import TrainingData, stream_data
from .options import DataConfig, source_of
from .sources import find_point_column, open_dataset
from .toy2d import TOY_DATASETS, toy_points

# Like all data, the toy datasets are the same for every seed of a run.
TOY_SEED, TOY_POINTS = 42, 100_000


@dataclass(frozen=True)
class PointTransform:
    """The transform from a list of numbers to a point, without randomness."""

    dimension: int
    column: str  # for errors

    @property
    def shape(self) -> tuple[int]:
        return (self.dimension,)

    def read(self, cell: Any) -> torch.Tensor:
        """The point in a cell, float32 `(dimension,)`; a `LabError` for an invalid one."""
        try:
            point = torch.tensor(cell, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError):
            point = torch.empty(0)
        if point.shape != self.shape or not point.isfinite().all():
            wanted = f"a point of {counted(self.dimension, 'finite number')}"
            raise must_be(self.column, cell, wanted, "correct or remove the row")
        return point

    def augment(self, tensors: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        return tensors

    def fixed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def load_point_data(config: DataConfig, seed: int) -> TrainingData:
    """Loads the points of a resolved configuration and holds out some for validation."""
    if source_of(config) in TOY_DATASETS:
        return _toy_data(source_of(config), config)
    dataset = open_dataset(config)
    column = find_point_column(dataset)
    dataset = dataset.select_columns([column])
    if config.streaming:
        first = next(iter(dataset), None)
        if first is None:
            raise LabError(f"The stream {source_of(config)!r} has no points to train on.")
        if not first[column]:
            raise must_be(column, first[column], "a list of one number or more", "correct or remove the row", of="row 0")
        return stream_data(config, seed, dataset, column, PointTransform(len(first[column]), column), None)
    points = read_points(dataset, column)
    held_out, training = split_rows(len(points), config.num_validation_images or 0)
    train, transform = dataset.select(training), PointTransform(points.shape[1], column)
    data = TrainingData(source_of(config), train, Batch(points[held_out]), column, dataset._fingerprint, transform)
    if points.nbytes <= config.in_memory_limit_mb * 2**20:
        data.in_memory = Batch(points[training])
    return data


def _toy_data(name: str, config: DataConfig) -> TrainingData:
    points, held_out = torch.from_numpy(toy_points(name, TOY_POINTS, TOY_SEED)), torch.empty(0, 2)
    if config.num_validation_images:
        # An independent sample, so that the number of training points does not depend on that of held-out ones.
        held_out = torch.from_numpy(toy_points(name, config.num_validation_images, TOY_SEED, split="test"))
    return TrainingData(name, None, Batch(held_out), "x", f"toy2d-{name}", PointTransform(2, "x"), Batch(points))


def read_points(dataset: Any, column: str) -> torch.Tensor:
    """
    A column of lists of numbers as one tensor, float32 `(num_points, dimension)`.

    A `LabError` names the first row that is missing, has another length, or contains a missing or non-finite number.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = dataset.with_format("arrow")[:][column]
    lists = lists.combine_chunks() if isinstance(lists, pa.ChunkedArray) else lists
    if len(lists) == 0:
        raise LabError(f"The column {column!r} has no rows. Use a data set with points.")
    lengths = np.asarray(pc.fill_null(pc.list_value_length(lists), -1))
    dimension = int(lengths[0])
    for row in np.flatnonzero((lengths != dimension) | (lengths < 1)):
        wanted = f"a list of {counted(dimension, 'number')}, as in row 0" if row else "a list of one number or more"
        raise must_be(column, lists[row].as_py(), wanted, "correct or remove the row", of=f"row {row}")
    with np.errstate(over="ignore"):
        values = pc.list_flatten(lists).to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(lists), dimension)
    for row in np.flatnonzero(~np.isfinite(values).all(axis=1)):
        wanted = "finite numbers that float32 can hold"
        raise must_be(column, lists[row].as_py(), wanted, "correct or remove the row", of=f"row {row}")
    return torch.from_numpy(np.array(values))
