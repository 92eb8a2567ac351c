"""Detection of sorted rows in a stream, from neighbouring rows in several parts of the data."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from PIL import Image

from .options import DataConfig
from .sources import is_table, load_errors_explained, open_builder, open_dataset
from .streams import Source

_STRETCHES, _ROWS = 8, 64  # of neighbouring rows
_SHARDS, _IMAGES = 4, 128  # in total, if images are read with the rows
_LABELS = ("label", "labels", "class", "classes", "cls", "category", "target")
_SIZES = ("width", "height", "size", "num_bytes", "aspect_ratio")
_FEWEST_CHANGES = 20  # expected of shuffled rows; with fewer, chance is too likely an explanation
_RARELY = 4  # rows are sorted if shuffled rows have this many times as many changes


@dataclass(frozen=True)
class SortedRows:
    """A column whose neighbouring values change less often than those of shuffled rows."""

    column: str
    changes: int
    expected: float
    """Changes in shuffled rows with the same values; 0 if only one of several labels was found."""
    num_rows: int


def find_sorted_rows(config: DataConfig, source: Source, column: str) -> SortedRows | None:
    """
    The first column of labels or sizes by which the rows seem to be sorted; `column` stands for the sizes of its images.

    It reads 512 rows from 8 parts of the data, or 128 from the starts of 4 shards if images are read with them.
    """
    with load_errors_explained(config):
        features = open_dataset(config, streaming=True).features or {}
        labels = {name: num for name, feature in features.items() if (num := _num_labels(name, feature))}
        sizes = [name for name, feature in features.items() if name.lower() in _SIZES and _is_number(feature)]
        stretches = list(_stretches(config, [*labels, *sizes])) if labels or sizes else []
        for name, num_labels in labels.items():
            if found := compare([rows[name] for rows in stretches], name, num_labels):
                return found
        for name in sizes:
            if found := compare(_quarters([rows[name] for rows in stretches]), name):
                return found
        if type(features.get(column)).__name__ == "Image":
            return compare(_quarters(list(_image_sizes(source))), column)
    return None


def compare(stretches: Sequence[Sequence[Any]], column: str, num_labels: int = 1) -> SortedRows | None:
    """Whether the values in `stretches` of rows seem to be sorted; the column could have `num_labels` values or more."""
    values = [str(value) for stretch in stretches for value in stretch]
    pairs = sum(max(0, len(stretch) - 1) for stretch in stretches)
    changes = sum(str(one) != str(other) for stretch in stretches for one, other in zip(stretch, stretch[1:], strict=False))
    counts = np.unique(values, return_counts=True)[1]
    if len(counts) == 1 and num_labels > 1 and pairs >= _ROWS - 1:
        return SortedRows(column, 0, 0.0, len(values))
    expected = pairs * (1 - float(np.square(counts / max(1, len(values))).sum()))
    if expected >= _FEWEST_CHANGES and changes * _RARELY < expected:
        return SortedRows(column, changes, expected, len(values))
    return None


def _num_labels(name: str, feature: Any) -> int:
    """The number of labels of a column; 2 for one with the name of a label, 0 for others."""
    if (num := getattr(feature, "num_classes", None)) is not None:
        return int(num)
    kind = str(getattr(feature, "dtype", ""))
    return 2 if name.lower() in _LABELS and kind.startswith(("int", "uint", "string", "large_string")) else 0


def _is_number(feature: Any) -> bool:
    return str(getattr(feature, "dtype", "")).startswith(("int", "uint", "float"))


def _quarters(stretches: list[list[Any]]) -> list[list[int]]:
    """Numbers replaced by the quartile that they are in."""
    numbers = np.array([value for stretch in stretches for value in stretch if value is not None], np.float64)
    edges = np.quantile(numbers, [0.25, 0.5, 0.75]) if len(numbers) else numbers
    return [[int(np.searchsorted(edges, value)) for value in stretch if value is not None] for stretch in stretches]


def _evenly(total: int, most: int) -> list[int]:
    return np.unique(np.linspace(0, max(0, total - 1), min(most, total)).astype(int)).tolist()


def _stretches(config: DataConfig, columns: list[str]) -> Iterator[dict[str, list[Any]]]:
    """Neighbouring rows of these columns, from several parts of the data."""
    from datasets.packaged_modules.parquet.parquet import Parquet

    if is_table(config):
        table = open_dataset(config, streaming=False).select_columns(columns)
        yield from (table[start : start + _ROWS] for start in _evenly(len(table) - _ROWS + 1, _STRETCHES) or [0])
        return
    builder = open_builder(config)
    if isinstance(builder, Parquet):
        yield from _of_parquet(list(builder.config.data_files[config.dataset_split]), columns)
        return
    stream = open_dataset(config, streaming=True).select_columns(columns)
    chosen = _evenly(stream.num_shards, _SHARDS)
    shards = (stream.shard(stream.num_shards, shard) for shard in chosen)
    parts = [list(islice(shard, _IMAGES // len(chosen))) for shard in shards]
    yield from ({name: [row[name] for row in part] for name in columns} for part in parts)


def _of_parquet(files: list[str], columns: list[str]) -> Iterator[dict[str, list[Any]]]:
    import pyarrow.parquet as parquet
    from datasets.utils.file_utils import xopen

    chosen = _evenly(len(files), _STRETCHES)
    for path in (files[index] for index in chosen):
        with xopen(path, "rb") as file:
            opened = parquet.ParquetFile(file)
            for group in _evenly(opened.metadata.num_row_groups, _STRETCHES // len(chosen)):
                batches = opened.iter_batches(_ROWS, row_groups=[group], columns=columns)
                yield from (batch.to_pydict() for batch in islice(batches, 1))


def _image_sizes(source: Source) -> Iterator[list[int | None]]:
    """Numbers of pixels of neighbouring images; `None` for unreadable ones, which training will report."""
    chosen = _evenly(len(source.lengths), _SHARDS)
    for shard in chosen:
        yield [_num_pixels(source, example.cell) for _, example in islice(source.open(shard, 0), _IMAGES // len(chosen))]


def _num_pixels(source: Source, cell: Any) -> int | None:
    try:
        read = source.fetch(cell)
        with Image.open(io.BytesIO(read["bytes"]) if read.get("bytes") else read["path"]) as image:
            return image.width * image.height
    except Exception:  # of decoders and networks
        return None
