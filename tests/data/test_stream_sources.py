"""What is found out about a stream before its rows are read: whether it is still the same data, and where rows are."""

import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as parquet
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile
from helpers import load
from PIL import Image
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data import retries
from diffusers_lrlab.data.shards import ParquetShards, SequentialShards
from diffusers_lrlab.data.tar_shards import TarShards, _rows_of_tar

STREAM = {"streaming": True, "max_train_steps": 1}
NUM_FILES, ROWS = 4, 5  # of each
XOPEN = "datasets.utils.file_utils.xopen"


# --- the same data ---------------------------------------------------------------------------------------------------


def png(number, size=8):
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (size, size), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "png", compress_level=0)
    return file.getvalue()


def write_tar(path, names_and_contents, kind="tar"):
    with tarfile.open(path, kind.replace("tar", "w").replace(".", ":")) as tar:
        for name, content in names_and_contents:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def write_shards(folder, kind):
    """Shards with as many rows, and the options to load them. Tar and JSON files are equally large, too."""
    folder.mkdir(parents=True)
    for shard in range(NUM_FILES):
        rows = range(ROWS * shard, ROWS * shard + ROWS)
        if kind in ("tar", "tar.gz"):
            write_tar(folder / f"{shard}.tar", [(f"{row:03}.png", png(row)) for row in rows], kind)
        elif kind == "parquet":
            cells = datasets.Dataset.from_dict({"x": [[row / 64, 1.0] for row in rows]})
            parquet.write_table(cells.data.table, folder / f"{shard}.parquet", row_group_size=3)
        elif kind == "jsonl":
            (folder / f"{shard}.jsonl").write_text("".join(json.dumps({"x": [row + 10.5, 1.0]}) + "\n" for row in rows))
        else:
            (folder / f"{shard}.png").write_bytes(png(shard, 8 + shard))
    if kind == "images":
        return {}
    return {"image_column": "png"} if "tar" in kind else {"point_column": "x", "resolution": None, "image_channels": None}


KINDS = ["tar", "tar.gz", "parquet", "jsonl", "images"]


def fingerprint(folder, options):
    return load(folder, **STREAM, **options).fingerprint


@cases("kind", KINDS)
def test_shards_that_swapped_their_names_are_other_data(tmp_path, kind):
    """A resume would have read other rows, and held-out ones would have been trained on."""
    folder = tmp_path / "data"
    options = write_shards(folder, kind)
    before = fingerprint(folder, options)
    files = sorted(folder.iterdir())
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents[1:] + contents[:1], strict=True):
        file.write_bytes(content)
    assert fingerprint(folder, options) != before
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    assert fingerprint(folder, options) == before


@cases("kind", KINDS)
def test_data_that_were_copied_are_the_same(tmp_path, kind):
    options = write_shards(tmp_path / "here" / "data", kind)
    shutil.copytree(tmp_path / "here" / "data", tmp_path / "there" / "copy")
    for file in (tmp_path / "there" / "copy").iterdir():
        os.utime(file, (1, 1))
    assert fingerprint(tmp_path / "here" / "data", options) == fingerprint(tmp_path / "there" / "copy", options)


def test_a_saved_dataset_is_known_by_its_own_fingerprint(tmp_path):
    options = {"point_column": "x", "resolution": None, "image_channels": None}
    for name, first in (("a", 0.0), ("b", 1.0)):
        datasets.Dataset.from_dict({"x": [[first, number] for number in range(9)]}).save_to_disk(str(tmp_path / name))
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    found = {name: fingerprint(tmp_path / name, options) for name in ("a", "b", "copy")}
    assert found["a"] == found["copy"] != found["b"]


# --- finding the rows ------------------------------------------------------------------------------------------------


@pytest.fixture
def tars(tmp_path):
    write_shards(tmp_path / "data", "tar")
    return sorted(map(str, (tmp_path / "data").iterdir()))


class FailingOpen:
    """Opens files, and fails as often as it is told to for a path."""

    def __init__(self, **failures):
        self.failures, self.opened = failures, []

    def __call__(self, path, mode):
        self.opened.append(Path(path).name)
        if self.failures.get(Path(path).stem, 0):
            self.failures[Path(path).stem] -= 1
            raise ConnectionError("reset by peer")
        return open(path, mode)


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(retries, "_FIRST_WAIT", 0.001)


def test_a_tar_file_that_cannot_be_read_at_once_is_tried_again(tars, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(XOPEN, FailingOpen(**{"2": 2}))
    assert TarShards("tar", tars, "png", tmp_path / "rows").lengths.tolist() == [ROWS] * NUM_FILES
    told = capsys.readouterr().err
    assert (
        told.count("The rows of shard 2 of 'tar' could not be counted (ConnectionError: reset by peer); the next try") == 2
    )


def test_a_restart_goes_on_with_the_shards_that_were_not_counted(tars, tmp_path, monkeypatch):
    monkeypatch.setattr(XOPEN, FailingOpen(**{"3": 99}))
    with pytest.raises(LabError, match=r"shard 3 of 'tar' .*reset by peer\), 5 times\. Start again when it can be read"):
        TarShards("tar", tars, "png", tmp_path / "rows")
    again = FailingOpen()
    monkeypatch.setattr(XOPEN, again)
    found = TarShards("tar", tars, "png", tmp_path / "rows")
    assert again.opened == ["3.tar"]
    again.opened.clear()
    assert TarShards("tar", tars, "png", tmp_path / "rows").fingerprint == found.fingerprint
    assert again.opened == []


def test_a_line_that_a_killed_process_left_unfinished_is_counted_again(tars, tmp_path, monkeypatch):
    expected = TarShards("tar", tars, "png", tmp_path / "rows")
    kept = (tmp_path / "rows").read_bytes()
    (tmp_path / "rows").write_bytes(kept[: len(kept) * 5 // 8])
    for opened in (["2.tar", "3.tar"], []):
        counted = FailingOpen()
        monkeypatch.setattr(XOPEN, counted)
        found = TarShards("tar", tars, "png", tmp_path / "rows")
        assert counted.opened == opened
        assert found.lengths.tolist() == expected.lengths.tolist()
        assert found.fingerprint == expected.fingerprint


def test_footers_of_parquet_are_tried_again(tmp_path, monkeypatch, capsys):
    write_shards(tmp_path / "data", "parquet")
    files = sorted(map(str, (tmp_path / "data").iterdir()))
    feature = datasets.List(datasets.Value("float64"))
    monkeypatch.setattr(XOPEN, FailingOpen(**{"1": 1}))
    assert ParquetShards("rows", files, "x", feature).lengths.tolist() == [3, 2] * NUM_FILES
    assert "The footer of" in (told := capsys.readouterr().err)
    assert "1.parquet' could not be read (ConnectionError: reset by peer)" in told
    monkeypatch.setattr(XOPEN, FailingOpen(**{"1": 99}))
    with pytest.raises(LabError, match=r"1\.parquet' could not be read .*, 5 times\. Start again"):
        ParquetShards("rows", files, "x", feature)


class Stream:
    """As a `datasets.IterableDataset` whose shards fail as often as `failures` says."""

    def __init__(self, failures, shard=None):
        self.failures, self.number, self.num_shards = failures, shard, 3

    def shard(self, num_shards, index):
        return Stream(self.failures, index)

    def __iter__(self):
        yield {"x": [self.number, 0.0]}
        if self.failures.get(self.number, 0):
            self.failures[self.number] -= 1
            raise ConnectionError("reset by peer")
        yield {"x": [self.number, 1.0]}


def test_shards_that_are_counted_are_tried_again_and_kept(tmp_path):
    assert SequentialShards("rows", Stream({1: 1}), "x", tmp_path / "a").lengths.tolist() == [2, 2, 2]
    with pytest.raises(LabError, match=r"shard 2 of 'rows' could not be counted .*, 5 times"):
        SequentialShards("rows", Stream({2: 99}), "x", tmp_path / "b")
    assert SequentialShards("rows", Stream({0: 99, 1: 99}), "x", tmp_path / "b").lengths.tolist() == [2, 2, 2]


class Remote(AbstractBufferedFile):
    """A file elsewhere, read as that of HTTP or S3, which counts what is fetched."""

    def __init__(self, path, fetched):
        self.content, self.fetched = Path(path).read_bytes(), fetched
        super().__init__(MemoryFileSystem(), path, size=len(self.content))

    def _fetch_range(self, start, end):
        self.fetched.append(end - start)
        return self.content[start:end]


def test_only_headers_of_tar_files_are_fetched(tmp_path, monkeypatch):
    path = tmp_path / "large.tar"
    rows = [(f"{'long' * 40 if row == 7 else ''}{row:03}.jpg", b"x" * 100_000) for row in range(50)]
    write_tar(path, rows)
    expected = list(_rows_of_tar(str(path), "jpg"))
    fetched = []
    monkeypatch.setattr(XOPEN, lambda path, mode: Remote(path, fetched))
    assert list(_rows_of_tar(str(path), "jpg")) == expected
    assert sum(fetched) < 0.03 * path.stat().st_size
    assert len(fetched) <= len(rows) + 5  # a request for each image, and not one for each read of tarfile
