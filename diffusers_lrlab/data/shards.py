"""The shards of a stream: row groups of Parquet, tar files, slices of a table, or what `datasets` reads from its start."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import LabError
from ..core.files import full_disk_explained
from .retries import read_with_retries
from .sources import is_saved_dataset, load_errors_explained, open_builder, open_dataset

if TYPE_CHECKING:
    from .options import DataConfig
    from .streams import Source

_TABLE_ROWS = 100  # of a shard of a table
_AT_ONCE = 16  # files that are asked for their number of rows
_BATCH_ROWS = 32  # read from Parquet at a time
_HEADER_BYTES = 2048  # fetched to find a header of a tar file, and the one after it if the first is of a long name


def _digest(facts: Iterable[Any]) -> str:
    """A short text that changes with the facts, and is the same on every machine."""
    found = hashlib.sha256()
    for fact in facts:
        found.update(repr(fact).encode() + b"\n")
    return found.hexdigest()[:32]


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
        self.fingerprint = _digest(_of_column(self._files[file].row_group(group), column) for file, group in self._places)

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


class TarShards(_Cells):
    """
    Tar files in WebDataset's format, whose images are found by the places of their headers.

    Rows are the ones that `datasets` makes: neighbours of one key.
    """

    def __init__(self, name: str, files: Sequence[str], column: str, places: Path):
        self.name, self.files = name, list(files)
        found = _find_rows(lambda shard: _rows_of_tar(self.files[shard], column), len(files), name, places, list)
        self._places = [places for _, places in found]
        self.lengths = np.array([len(places) for places in self._places], np.int64)
        self.fingerprint = _digest(digest for digest, _ in found)

    def open(self, shard: int, row: int) -> Iterator[tuple[int, Any]]:
        from datasets.utils.file_utils import xopen

        with xopen(self.files[shard], "rb") as file:
            for number in range(row, self.lengths[shard]):
                yield number, (file, self._places[shard][number])

    def fetch(self, cell: Any) -> Any:
        file, place = cell
        if place is None:
            return None
        file.seek(place)
        header = tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), tarfile.ENCODING, "surrogateescape")
        content = file.read(header.size)
        if len(content) < header.size:
            raise EOFError(f"the file ends within {header.name!r}")
        return {"path": header.name, "bytes": content}


class _NoPlainTar(LabError):
    """A file that is no tar file, or a compressed one."""


def _rows_of_tar(path: str, column: str) -> Iterator[tuple[int | None, Any]]:
    """Where the header of each row's image begins, and the image's name and size; `None` for a row without one."""
    from datasets.packaged_modules.webdataset.webdataset import base_plus_ext
    from datasets.utils.file_utils import xopen

    row: tuple[int | None, Any] = (None, None)
    key_before = None
    try:
        with xopen(path, "rb") as file:
            _fetch_headers_alone(file)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # otherwise it keeps all
                    key, extension = base_plus_ext(member.name)
                    if not member.isreg() or PurePath(member.name).name.startswith((".", "__")) or key is None:
                        continue
                    if key != key_before:
                        if key_before is not None:
                            yield row
                        row, key_before = (None, None), key
                    # Some versions of datasets name the column in lower case, others as it is.
                    if extension == column or extension.lower() == column and row[0] is None:
                        if row[0] is not None:
                            raise tarfile.ReadError(f"{member.name!r} is there twice")
                        row = (member.offset_data - tarfile.BLOCKSIZE, (member.name, member.size))
                file.seek(tar.offset)  # where tarfile stopped: at zeros, at the file's end, or at what it cannot read
                if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                    raise tarfile.ReadError(f"no header at byte {tar.offset:,}")
    except tarfile.ReadError as error:
        problem = LabError if key_before is not None else _NoPlainTar
        raise problem(f"The tar file {path!r} is damaged ({error}). Replace it.") from None
    if key_before is not None:
        yield row


def _fetch_headers_alone(file: Any) -> None:
    """Keeps a file that is elsewhere from fetching megabytes with each header."""
    from fsspec.caching import ReadAheadCache
    from fsspec.spec import AbstractBufferedFile
    from huggingface_hub.hf_file_system import HfFileSystemFile

    # The Hub answers some thousand requests in 5 minutes, which one for each image would exceed.
    if isinstance(file, AbstractBufferedFile) and not isinstance(file, HfFileSystemFile):
        file.cache = ReadAheadCache(_HEADER_BYTES, file._fetch_range, file.size)


class SequentialShards(_Cells):
    """The shards of a `datasets.IterableDataset`, such as CSV files: they are counted, and read from their start."""

    def __init__(self, name: str, stream: Any, column: str, counts: Path):
        self.name, self.stream, self.column = name, stream, column
        found = _find_rows(self._hashes, stream.num_shards, name, counts, len)
        self.lengths = np.array([count for _, count in found], np.int64)
        self.fingerprint = _digest(digest for digest, _ in found)

    def _hashes(self, shard: int) -> Iterator[tuple[int, Any]]:
        return ((number, _digest([cell])) for number, cell in self.open(shard, 0))

    def open(self, shard: int, row: int) -> Iterator[tuple[int, Any]]:
        rows = self.stream.shard(self.stream.num_shards, shard)
        return ((number, each[self.column]) for number, each in enumerate(rows))


def _find_rows(
    rows_of: Callable[[int], Iterator[tuple[Any, Any]]],
    num_shards: int,
    name: str,
    path: Path,
    keep: Callable[[list[Any]], Any],
) -> list[tuple[str, Any]]:
    """
    For each shard a digest of the facts of its rows, and what `keep` makes of their places.

    `rows_of` gives place and facts of each row of a shard. What is found is kept shard by shard in a file that belongs to
    these very data.
    """
    from tqdm.auto import tqdm

    found = _found_before(path, num_shards, type(keep([])))
    missing = [shard for shard in range(num_shards) if shard not in found]
    for shard in tqdm(missing, desc="count the rows of shards", disable=None, leave=False, delay=2):
        rows = read_with_retries(
            partial(rows_of, shard),
            failure=f"The rows of shard {shard} of {name!r} could not be counted",
            remedy="Start again when it can be read: the shards before it are not counted again.",
        )
        found[shard] = (_digest(facts for _, facts in rows), keep([place for place, _ in rows]))
        line = json.dumps([shard, *found[shard]])
        with full_disk_explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:  # at once, as other processes may write, too
                file.write(f"\n{line}\n".encode())
    return [found[shard] for shard in range(num_shards)]


def _found_before(path: Path, num_shards: int, kind: type) -> dict[int, tuple[str, Any]]:
    """What the file has by shard; lines that are damaged or not whole are passed over."""
    found: dict[int, tuple[str, Any]] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError):
            shard, digest, kept = json.loads(line)
            if type(shard) is int and 0 <= shard < num_shards and type(digest) is str and type(kept) is kind:
                found[shard] = (digest, kept)
    return found


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
        return TableShards(name, list(stream), column, _digest(_names_and_versions(files)))
    these = [list(files), repr(files.origin_metadata), list(_names_and_versions(files)), config.dataset_config_name, column]
    folder = Path(config.cache_dir or hf_datasets.config.HF_DATASETS_CACHE).expanduser() / "lrlab-shard-rows"
    kept = folder / f"{hf_datasets.fingerprint.Hasher.hash(these)}.jsonl"
    if isinstance(builder, WebDataset) and isinstance(stream.features[column], hf_datasets.Image):
        with suppress(_NoPlainTar):  # `datasets` reads compressed ones, too
            return TarShards(name, files, column, kept)
    return SequentialShards(name, stream, column, kept)


def _names_and_versions(files: Any) -> Iterator[Any]:
    """Names of files within their folder, and their sizes, which a copy has, too; of those elsewhere what the host says."""
    start = os.path.commonprefix(list(files)).rfind("/") + 1
    for file in files:
        yield file[start:], None if "://" in file else os.path.getsize(file)
    if any("://" in file for file in files):
        yield files.origin_metadata
