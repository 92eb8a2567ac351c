"""Tar files in WebDataset's format as shards, with random access to their images."""

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from ..core.errors import LabError, must_be
from .conditions import ConditionColumns, Example, example
from .shard_rows import digest_of, find_rows

_HEADER_BYTES = 2048  # fetched for a header, and the next one if the first only holds a long name


class TarShards:
    """
    Tar files in WebDataset's format, whose images are found by the offsets of their headers.

    Rows are those of `datasets`: neighbouring members with the same key. Conditions are members of the row, such as `.cls`,
    whose numbers are read with the headers and cached with the offsets.
    """

    def __init__(
        self, name: str, files: Sequence[str], column: str, offsets: Path, conditions: ConditionColumns | None = None
    ):
        self.name, self.files, self.conditions = name, list(files), conditions or {}
        self._names = list(dict.fromkeys(each.name for each in self.conditions.values()))
        found = find_rows(
            lambda shard: _rows_of_tar(self.files[shard], column, self._names), len(files), name, offsets, list
        )
        self._offsets = [offsets for _, offsets in found]
        self.lengths = np.array([len(offsets) for offsets in self._offsets], np.int64)
        self.fingerprint = digest_of(digest for digest, _ in found)
        for each in self.conditions.values():
            index = 1 + self._names.index(each.name)
            for file, rows in zip(self.files, self._offsets, strict=True):
                for value in {row[index] for row in rows}:
                    each.check(value, f"a row of {file!r}")

    def open(self, shard: int, row: int) -> Iterator[tuple[int, Example]]:
        from datasets.utils.file_utils import xopen

        with xopen(self.files[shard], "rb") as file:
            for number in range(row, self.lengths[shard]):
                offset = self._offsets[shard][number]
                offset, *values = offset if self.conditions else (offset,)
                values_by_name = dict(zip(self._names, values, strict=True))
                yield (
                    number,
                    example((file, offset), values_by_name, self.conditions, f"row {number} of {self.files[shard]!r}"),
                )

    def fetch(self, cell: Any) -> Any:
        file, offset = cell
        if offset is None:
            return None
        file.seek(offset)
        header = tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), tarfile.ENCODING, "surrogateescape")
        content = file.read(header.size)
        if len(content) < header.size:
            raise EOFError(f"the file ends within {header.name!r}")
        return {"path": header.name, "bytes": content}


class NoPlainTar(LabError):
    """A file is not a tar file, or is compressed."""


def _rows_of_tar(path: str, column: str, names: Sequence[str] = ()) -> Iterator[tuple[Any, Any]]:
    """
    For each row the offset of its image's header, and the image's name and size; `None` for a row without an image. With
    `names` of members that hold numbers, each of the two is a list that these numbers follow; `None` for a missing one.
    """
    from datasets.packaged_modules.webdataset.webdataset import base_plus_ext
    from datasets.utils.file_utils import xopen

    row: tuple[int | None, Any] = (None, None)
    numbers: dict[str, Any] = {}
    key_before = None

    def found() -> tuple[Any, Any]:
        values = [numbers.get(name) for name in names]
        return ([row[0], *values], [row[1], *values]) if names else row

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
                            yield found()
                        row, numbers, key_before = (None, None), {}, key
                    # Some versions of datasets name the column in lower case, others as it is.
                    if extension == column or extension.lower() == column and row[0] is None:
                        if row[0] is not None:
                            raise tarfile.ReadError(f"{member.name!r} is there twice")
                        row = (member.offset_data - tarfile.BLOCKSIZE, (member.name, member.size))
                    for name in names:
                        if extension == name or extension.lower() == name and name not in numbers:
                            numbers[name] = _number_in(tar, member, path)
                file.seek(tar.offset)  # where tarfile stopped: at zeros, at the file's end, or at what it cannot read
                if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                    raise tarfile.ReadError(f"no header at byte {tar.offset:,}")
    except tarfile.ReadError as error:
        problem = LabError if key_before is not None else NoPlainTar
        raise problem(f"The tar file {path!r} is damaged ({error}). Replace it.") from None
    if key_before is not None:
        yield found()


def _number_in(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> Any:
    """The number in a small text file, as `datasets` decodes it."""
    from datasets.packaged_modules.webdataset.webdataset import WebDataset

    file = tar.extractfile(member)
    assert file is not None  # since it is a regular one
    content = file.read()
    try:
        return WebDataset.DECODERS[PurePath(member.name).suffix[1:].lower()](content)
    except (KeyError, ValueError):
        where = f"the tar file {path!r}"
        raise must_be(member.name, content[:20], "a number", "correct or remove the row", of=where) from None


def _fetch_headers_alone(file: Any) -> None:
    """Keeps a remote file from fetching megabytes for each header."""
    from fsspec.caching import ReadAheadCache
    from fsspec.spec import AbstractBufferedFile
    from huggingface_hub.hf_file_system import HfFileSystemFile

    # The Hub allows about a thousand requests in 5 minutes, fewer than one per image.
    if isinstance(file, AbstractBufferedFile) and not isinstance(file, HfFileSystemFile):
        file.cache = ReadAheadCache(_HEADER_BYTES, file._fetch_range, file.size)
