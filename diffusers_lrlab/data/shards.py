"""The shards of a stream: row groups of Parquet, slices of a table, or files that `datasets` reads in order."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import LabError
from ..core.files import expanded, full_disk_explained
from .image_folder import digest_of
from .labels import Example, LabelColumn, labelled
from .options import source_of
from .sources import is_saved_dataset, is_table, load_errors_explained, open_builder, open_dataset
from .streams import Source, read_errors_explained

if TYPE_CHECKING:
    from .options import DataConfig

_TABLE_ROWS = 100  # of a shard of a table
_AT_ONCE = 16  # files whose footers are read in parallel
_BATCH_ROWS = 32  # of Parquet


class ParquetShards:
    """Row groups of Parquet files as shards."""

    def __init__(self, name: str, files: Sequence[str], column: str, feature: Any, label: LabelColumn | None = None):
        self.name, self.column, self.feature, self.label = name, column, feature, label
        self._columns = [column] if label is None else list(dict.fromkeys([column, label.name]))
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            self._files = dict(zip(files, pool.map(_read_footer, files), strict=True))
        for file, footer in self._files.items():
            names = footer.schema.to_arrow_schema().names
            for missing in (each for each in self._columns if each not in names):
                raise LabError(
                    f"{file!r} has no column {missing!r}, unlike other files of the data. It has {', '.join(names)}."
                )
        self._row_groups = [(file, group) for file, footer in self._files.items() for group in range(footer.num_row_groups)]
        groups = [self._files[file].row_group(group) for file, group in self._row_groups]
        self.lengths = np.fromiter((group.num_rows for group in groups), np.int64)
        self.fingerprint = digest_of(_of_column(group, each) for group in groups for each in self._columns)
        if label is not None:
            for (file, number), group in zip(self._row_groups, groups, strict=True):
                for end in (end for _, ends in _chunks(group, label.name) if ends for end in (ends.min, ends.max)):
                    label.check(end, f"row group {number} of {file!r}")

    def open(self, shard: int, row: int) -> Iterator[tuple[int, Example]]:
        import pyarrow.parquet as parquet
        from datasets.utils.file_utils import xopen

        path, group = self._row_groups[shard]
        number = 0
        with xopen(path, "rb") as file:
            opened = parquet.ParquetFile(file, metadata=self._files[path])
            for batch in opened.iter_batches(_BATCH_ROWS, row_groups=[group], columns=self._columns):
                if number + len(batch) > row:
                    cells = batch.column(self.column)
                    cells = self.feature.cast_storage(cells) if hasattr(self.feature, "cast_storage") else cells
                    where = f"row group {group} of {path!r}"
                    rows = batch.select(self._columns[1:]).to_pylist() if self.label else [{}] * len(batch)
                    pairs = zip(cells.to_pylist(), rows, strict=True)
                    yield from enumerate((labelled(cell, row, self.label, where) for cell, row in pairs), number)
                number += len(batch)


def _read_footer(path: str) -> Any:
    import pyarrow.parquet as parquet
    from datasets.utils.file_utils import xopen

    remedy = "Start again when it can be read. Replace it if it is damaged."
    with read_errors_explained(f"The footer of {path!r} could not be read", remedy), xopen(path, "rb") as file:
        return parquet.ParquetFile(file).metadata


def _chunks(group: Any, column: str) -> Iterator[tuple[Any, Any]]:
    """The chunks of a column in a row group, which may be nested, with their statistics in the footer or `None`."""
    for chunk in map(group.column, range(group.num_columns)):
        if f"{chunk.path_in_schema}.".startswith(f"{column}."):
            yield chunk, chunk.statistics if chunk.is_stats_set and chunk.statistics.has_min_max else None


def _of_column(group: Any, column: str) -> list[Any]:
    """Facts in a footer about a column of a row group."""
    facts: list[Any] = [group.num_rows]
    for chunk, ends in _chunks(group, column):
        facts += [chunk.path_in_schema, chunk.total_compressed_size, chunk.total_uncompressed_size]
        facts += [ends and (ends.min_raw, ends.max_raw)]
    return facts


class TableShards:
    """Slices of a table with random access as shards."""

    def __init__(self, name: str, rows: Any, column: str, fingerprint: str, label: LabelColumn | None = None):
        self.name, self.rows, self.column, self.fingerprint, self.label = name, rows, column, fingerprint, label
        if label is not None:
            label.read_all(rows)  # which checks them
        starts = np.arange(0, len(rows), _TABLE_ROWS)
        self.lengths = np.diff(starts, append=len(rows))

    def open(self, shard: int, row: int) -> Iterator[tuple[int, Example]]:
        start = shard * _TABLE_ROWS
        for number in range(row, self.lengths[shard]):
            found = self.rows[start + number]
            yield number, labelled(found[self.column], found, self.label, f"row {start + number}")


class SequentialShards:
    """
    The shards of a `datasets.IterableDataset`, such as tar and CSV files: read from the start, and counted first. `counts`
    is a file for the counts, which must be specific to these data.
    """

    def __init__(
        self, name: str, stream: Any, files: Sequence[str], column: str, counts: Path, label: LabelColumn | None = None
    ):
        self.name, self.stream, self.column, self.label = name, stream, column, label
        shards = range(stream.num_shards)
        self._places = [repr(file) for file in files]
        if len(files) != len(shards):
            self._places = [f"shard {shard} of {name!r}" for shard in shards]
        counted = _count_rows(self._digests, self._places, counts)
        self.lengths = np.array([rows for _, rows in counted], np.int64)
        self.fingerprint = digest_of(digest for digest, _ in counted)

    def _digests(self, shard: int) -> Iterator[str]:
        for _, (cell, conditions) in self.open(shard, 0):
            yield digest_of([cell, *(values.item() for values in conditions.values())])

    def open(self, shard: int, row: int) -> Iterator[tuple[int, Example]]:
        # Unlike `iter(...)`, batches are not divided among the workers of a loader, which have lanes of their own.
        rows = self.stream.shard(self.stream.num_shards, shard).iter(batch_size=1)
        for number, batch in enumerate(rows):
            each = {name: values[0] for name, values in batch.items()}
            yield number, labelled(each[self.column], each, self.label, f"row {number} of {self._places[shard]}")


def _count_rows(facts_of: Callable[[int], Iterator[Any]], places: Sequence[str], path: Path) -> list[tuple[str, int]]:
    """
    For each shard, which `places` names, a digest of the facts about its rows, and their number. Both are appended shard by
    shard to the file `path`, so that nothing is counted twice.
    """
    from tqdm.auto import tqdm

    found = _counted_before(path)
    missing = [shard for shard in range(len(places)) if shard not in found]
    for shard in tqdm(missing, desc="count the rows of shards", disable=None, leave=False, delay=2):
        remedy = "Start again when it can be read; earlier shards are not counted again. Replace it if it is damaged."
        with read_errors_explained(f"The rows of {places[shard]} could not be counted", remedy):
            facts = list(facts_of(shard))
        found[shard] = (digest_of(facts), len(facts))
        line = json.dumps([shard, *found[shard]])
        with full_disk_explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:  # in one write, since other processes may write too
                file.write(f"\n{line}\n".encode())
    return [found[shard] for shard in range(len(places))]


def _counted_before(path: Path) -> dict[int, tuple[str, int]]:
    """Digests and numbers of rows in the file, by shard; unfinished lines are ignored."""
    found: dict[int, tuple[str, int]] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError):
            shard, digest, rows = json.loads(line)
            found[shard] = (digest, int(rows))
    return found


def open_shards(config: DataConfig, stream: Any, column: str, label: LabelColumn | None = None) -> Source:
    """The shards of the stream of a configuration; `stream` has only the undecoded column `column` and that of labels."""
    with load_errors_explained(config):
        return (_table_shards if is_table(config) else _file_shards)(config, stream, column, label)


def _table_shards(config: DataConfig, stream: Any, column: str, label: LabelColumn | None) -> TableShards:
    import datasets as hf_datasets

    names = [] if label is None else [label.name]
    table = open_dataset(config, streaming=False)
    rows, fingerprint = table.select_columns(list(dict.fromkeys([column, *names]))), table._fingerprint
    if isinstance(stream.features[column], hf_datasets.Image):
        rows = rows.cast_column(column, hf_datasets.Image(decode=False))
    if not is_saved_dataset(config):  # but a folder of images, whose copy is the same data
        paths = [cell["path"] for cell in rows[column] if cell]
        values = map(list, zip(*(rows[each] for each in names), strict=True))
        fingerprint = digest_of([*_names_and_sizes(paths), *values])
    return TableShards(source_of(config), rows, column, fingerprint, label)


def _file_shards(config: DataConfig, stream: Any, column: str, label: LabelColumn | None) -> Source:
    from datasets.config import HF_DATASETS_CACHE
    from datasets.fingerprint import Hasher
    from datasets.packaged_modules.parquet.parquet import Parquet

    builder = open_builder(config)
    files = builder.config.data_files[config.dataset_split]
    if isinstance(builder, Parquet):
        return ParquetShards(source_of(config), list(files), column, stream.features[column], label)
    # What the rows are counted for: the files, and the labels, whose values are checked meanwhile.
    facts = [list(files), repr(files.origin_metadata), list(_names_and_versions(files)), config.dataset_config_name, column]
    facts += [] if label is None else [[label.name], [label.num_classes]]
    counts = expanded(config.cache_dir or HF_DATASETS_CACHE) / "lrlab-shard-rows" / f"{Hasher.hash(facts)}.jsonl"
    return SequentialShards(source_of(config), stream, files, column, counts, label)


def _names_and_versions(files: Any) -> Iterator[Any]:
    """Relative names and sizes of local files, which are the same for a copy; what the host says of remote ones."""
    yield from _names_and_sizes(files)
    if any("://" in file for file in files):
        yield files.origin_metadata


def _names_and_sizes(files: Sequence[str]) -> Iterator[tuple[str, int | None]]:
    start = os.path.commonprefix(files).rfind("/") + 1
    for file in files:
        yield file[start:], os.path.getsize(file) if os.path.isfile(file) else None
