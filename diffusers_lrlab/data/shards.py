"""The shards of a stream: row groups of Parquet, tar files, slices of a table, or what `datasets` reads from its start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import LabError
from .retries import read_with_retries
from .shard_rows import digest_of, find_rows
from .sources import is_saved_dataset, load_errors_explained, open_builder, open_dataset
from .tar_shards import NoPlainTar, TarShards

if TYPE_CHECKING:
    from .options import DataConfig
    from .streams import Source

_TABLE_ROWS = 100  # of a shard of a table
_AT_ONCE = 16  # files that are asked for their number of rows
_BATCH_ROWS = 32  # read from Parquet at a time


class _Cells:
    """What sources share."""

    def fetch(self, cell: Any) -> Any:
        """An image that is a file elsewhere as its bytes, so that a failing network is none of a damaged image."""
        if isinstance(cell, dict) and cell.get("bytes") is None and "://" in (cell.get("path") or ""):
            from datasets.utils.file_utils import xopen

            with xopen(cell["path"], "rb") as file:
                return {**cell, "bytes": file.read()}
        return cell


class ParquetShards(_Cells):
    """Every row group is a shard."""

    def __init__(self, name: str, files: Sequence[str], column: str, feature: Any):
        self.name, self.column, self.feature = name, column, feature
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            self._files = dict(zip(files, pool.map(_read_footer, files), strict=True))
        for file, footer in self._files.items():
            if column not in (names := footer.schema.to_arrow_schema().names):
                raise LabError(
                    f"{file!r} has no column {column!r}, as other files of the data do. It has {', '.join(names)}."
                )
        self._places = [(file, group) for file, footer in self._files.items() for group in range(footer.num_row_groups)]
        rows = (self._files[file].row_group(group).num_rows for file, group in self._places)
        self.lengths = np.fromiter(rows, np.int64)
        self.fingerprint = digest_of(_of_column(self._files[file].row_group(group), column) for file, group in self._places)

    def open(self, shard: int, row: int) -> Iterator[tuple[int, Any]]:
        import pyarrow.parquet as parquet
        from datasets.utils.file_utils import xopen

        path, group = self._places[shard]
        number = 0
        with xopen(path, "rb") as file:
            opened = parquet.ParquetFile(file, metadata=self._files[path])
            for batch in opened.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[self.column]):
                if number + len(batch) > row:
                    cells = batch.column(0)
                    cells = self.feature.cast_storage(cells) if hasattr(self.feature, "cast_storage") else cells
                    yield from enumerate(cells.to_pylist(), number)
                number += len(batch)


def _read_footer(path: str) -> Any:
    import pyarrow.parquet as parquet
    from datasets.utils.file_utils import xopen

    def footer() -> Iterator[Any]:
        with xopen(path, "rb") as file:
            yield parquet.ParquetFile(file).metadata

    (found,) = read_with_retries(
        footer,
        failure=f"The footer of {path!r} could not be read",
        remedy="Start again when it can be read. Replace it if it is damaged.",
    )
    return found


def _of_column(group: Any, column: str) -> list[Any]:
    """What a footer says of the content of a row group in a column."""
    facts: list[Any] = [group.num_rows]
    for chunk in map(group.column, range(group.num_columns)):
        if f"{chunk.path_in_schema}.".startswith(f"{column}."):
            ends = chunk.statistics if chunk.is_stats_set and chunk.statistics.has_min_max else None
            facts += [chunk.path_in_schema, chunk.total_compressed_size, chunk.total_uncompressed_size]
            facts += [ends and (ends.min_raw, ends.max_raw)]
    return facts


class TableShards(_Cells):
    """Slices of cells that can be had by their number."""

    def __init__(self, name: str, rows: Sequence[dict[str, Any]], column: str, fingerprint: str):
        self.name, self.rows, self.column, self.fingerprint = name, rows, column, fingerprint
        starts = np.arange(0, len(rows), _TABLE_ROWS)
        self.lengths = np.diff(starts, append=len(rows))

    def open(self, shard: int, row: int) -> Iterator[tuple[int, Any]]:
        start = shard * _TABLE_ROWS
        return ((number, self.rows[start + number][self.column]) for number in range(row, self.lengths[shard]))


class SequentialShards(_Cells):
    """The shards of a `datasets.IterableDataset`, such as CSV files: they are counted, and read from their start."""

    def __init__(self, name: str, stream: Any, column: str, counts: Path):
        self.name, self.stream, self.column = name, stream, column
        found = find_rows(self._hashes, stream.num_shards, name, counts, len)
        self.lengths = np.array([count for _, count in found], np.int64)
        self.fingerprint = digest_of(digest for digest, _ in found)

    def _hashes(self, shard: int) -> Iterator[tuple[int, Any]]:
        return ((number, digest_of([cell])) for number, cell in self.open(shard, 0))

    def open(self, shard: int, row: int) -> Iterator[tuple[int, Any]]:
        rows = self.stream.shard(self.stream.num_shards, shard)
        return ((number, each[self.column]) for number, each in enumerate(rows))


def open_shards(config: DataConfig, stream: Any, column: str, name: str) -> Source:
    """The shards of the stream that a configuration names; `stream` has the column `column` alone, undecoded."""
    with load_errors_explained(config):
        return _open_shards(config, stream, column, name)


def _open_shards(config: DataConfig, stream: Any, column: str, name: str) -> Source:
    import datasets as hf_datasets
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
    from datasets.packaged_modules.parquet.parquet import Parquet
    from datasets.packaged_modules.webdataset.webdataset import WebDataset

    if is_saved_dataset(config):
        saved = open_dataset(config, streaming=False)
        rows = saved.select_columns([column])
        if isinstance(stream.features[column], hf_datasets.Image):
            rows = rows.cast_column(column, hf_datasets.Image(decode=False))
        return TableShards(name, rows, column, saved._fingerprint)
    builder = open_builder(config)
    files = builder.config.data_files[config.dataset_split]
    if isinstance(builder, Parquet):
        return ParquetShards(name, list(files), column, stream.features[column])
    if isinstance(builder, ImageFolder):  # a cell is a path
        return TableShards(name, list(stream), column, digest_of(_names_and_versions(files)))
    these = [list(files), repr(files.origin_metadata), list(_names_and_versions(files)), config.dataset_config_name, column]
    folder = Path(config.cache_dir or hf_datasets.config.HF_DATASETS_CACHE).expanduser() / "lrlab-shard-rows"
    kept = folder / f"{hf_datasets.fingerprint.Hasher.hash(these)}.jsonl"
    if isinstance(builder, WebDataset) and isinstance(stream.features[column], hf_datasets.Image):
        with suppress(NoPlainTar):  # `datasets` reads compressed ones, too
            return TarShards(name, files, column, kept)
    return SequentialShards(name, stream, column, kept)


def _names_and_versions(files: Any) -> Iterator[Any]:
    """Names of files within their folder, and their sizes, which a copy has, too; of those elsewhere what the host says."""
    start = os.path.commonprefix(list(files)).rfind("/") + 1
    for file in files:
        yield file[start:], None if "://" in file else os.path.getsize(file)
    if any("://" in file for file in files):
        yield files.origin_metadata
