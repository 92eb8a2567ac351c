"""The shards of a stream: row groups of Parquet, tar files, slices of a table, or what `datasets` reads from its start."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import LabError
from ..core.files import atomic_file
from .sources import is_saved_dataset, load_errors_explained, open_builder, open_dataset

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
            self._files = dict(zip(files, pool.map(_footer, files), strict=True))
        for file, footer in self._files.items():
            if column not in (names := footer.schema.to_arrow_schema().names):
                raise LabError(
                    f"{file!r} has no column {column!r}, as other files of the data do. It has {', '.join(names)}."
                )
        self._places = [(file, group) for file, footer in self._files.items() for group in range(footer.num_row_groups)]
        rows = (self._files[file].row_group(group).num_rows for file, group in self._places)
        self.lengths = np.fromiter(rows, np.int64)

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


def _footer(path: str) -> Any:
    import pyarrow.parquet as parquet
    from datasets.utils.file_utils import xopen

    with xopen(path, "rb") as file:
        return parquet.ParquetFile(file).metadata


class TableShards(_Cells):
    """Slices of cells that can be had by their number."""

    def __init__(self, name: str, rows: Sequence[dict[str, Any]], column: str):
        self.name, self.rows, self.column = name, rows, column
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
        self._places = _found_once(places, lambda shard: _tar_places(self.files[shard], column), len(files), list)
        self.lengths = np.array([len(each) for each in self._places], np.int64)

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


def _tar_places(path: str, column: str) -> list[int | None]:
    """Where the header of each row's image begins, `None` for a row without one."""
    from datasets.packaged_modules.webdataset.webdataset import base_plus_ext
    from datasets.utils.file_utils import xopen

    places: list[int | None] = []
    key_before = None
    try:
        with xopen(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # otherwise it keeps all
                key, extension = base_plus_ext(member.name)
                if not member.isreg() or PurePath(member.name).name.startswith((".", "__")) or key is None:
                    continue
                if key != key_before:
                    places.append(None)
                    key_before = key
                # Some versions of datasets name the column in lower case, others as it is.
                if extension == column or extension.lower() == column and places[-1] is None:
                    if places[-1] is not None:
                        raise tarfile.ReadError(f"{member.name!r} is there twice")
                    places[-1] = member.offset_data - tarfile.BLOCKSIZE
            file.seek(tar.offset)  # where tarfile stopped: at zeros, at the file's end, or at what it cannot read
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise tarfile.ReadError(f"no header at byte {tar.offset:,}")
    except tarfile.ReadError as error:
        if not places:
            raise  # it may be compressed
        raise LabError(f"The tar file {path!r} is damaged ({error}). Replace it.") from None
    return places


class SequentialShards(_Cells):
    """The shards of a `datasets.IterableDataset`, such as CSV files: they are counted, and read from their start."""

    def __init__(self, name: str, stream: Any, column: str, counts: Path):
        self.name, self.stream, self.column = name, stream, column
        self.lengths = np.array(_found_once(counts, self._count, stream.num_shards, int), np.int64)

    def _count(self, shard: int) -> int:
        return sum(1 for _ in self.open(shard, 0))

    def open(self, shard: int, row: int) -> Iterator[tuple[int, Any]]:
        rows = self.stream.shard(self.stream.num_shards, shard)
        return ((number, each[self.column]) for number, each in enumerate(rows))


def _found_once(path: Path, find: Callable[[int], Any], num_shards: int, kind: type) -> list[Any]:
    """What `find` says of each shard, kept in a file that belongs to these very data."""
    from tqdm.auto import tqdm

    with suppress(FileNotFoundError, ValueError):  # damaged ones are written anew
        known = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(known, list) and [type(each) for each in known] == [kind] * num_shards:
            return known
    shards = tqdm(range(num_shards), desc="count the rows of shards", disable=None, leave=False, delay=2)
    found = [find(shard) for shard in shards]
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(found), encoding="utf-8")
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
        rows = open_dataset(config, streaming=False).select_columns([column])
        if isinstance(stream.features[column], hf_datasets.Image):
            rows = rows.cast_column(column, hf_datasets.Image(decode=False))
        return TableShards(name, rows, column)
    builder = open_builder(config)
    files = builder.config.data_files[config.dataset_split]
    if isinstance(builder, Parquet):
        return ParquetShards(name, list(files), column, stream.features[column])
    if isinstance(builder, ImageFolder):  # a cell is a path
        return TableShards(name, list(stream), column)
    key = hf_datasets.fingerprint.Hasher.hash([list(files), repr(files.origin_metadata), config.dataset_config_name])
    folder = Path(config.cache_dir or hf_datasets.config.HF_DATASETS_CACHE).expanduser() / "lrlab-shard-rows"
    if isinstance(builder, WebDataset) and isinstance(stream.features[column], hf_datasets.Image):
        with suppress(tarfile.ReadError):  # `datasets` reads compressed ones, too
            return TarShards(name, files, column, folder / f"{key}-{column}.json")
    return SequentialShards(name, stream, column, folder / f"{key}.json")
