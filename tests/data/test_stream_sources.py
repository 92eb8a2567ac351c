"""What is found out about a stream before its rows are read: whether it is still the same data, and where rows are."""

import io
import json
import os
import shutil
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from helpers import load, stacked, write_tar
from PIL import Image
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.batches import iterate_batches
from diffusers_lrlab.data.options import BatchLayout
from diffusers_lrlab.data.shards import ParquetShards, SequentialShards

STREAM = {"streaming": True, "max_train_steps": 1}
NUM_FILES, ROWS = 4, 5  # of each


# --- the same data ---------------------------------------------------------------------------------------------------


def noise_png(number, size=8):
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (size, size), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "png", compress_level=0)
    return file.getvalue()


def write_shards(folder, kind):
    """Shards with as many rows, and the options to load them. Tar and JSON files are equally large, too."""
    folder.mkdir(parents=True)
    for shard in range(NUM_FILES):
        rows = range(ROWS * shard, ROWS * shard + ROWS)
        if kind in ("tar", "tar.gz"):
            write_tar(
                folder / f"{shard}.tar",
                [(f"{row:03}.png", noise_png(row)) for row in rows],
                "w:gz" if kind == "tar.gz" else "w",
            )
        elif kind == "parquet":
            cells = datasets.Dataset.from_dict({"x": [[row / 64, 1.0] for row in rows]})
            parquet.write_table(cells.data.table, folder / f"{shard}.parquet", row_group_size=3)
        elif kind == "jsonl":
            (folder / f"{shard}.jsonl").write_text("".join(json.dumps({"x": [row + 10.5, 1.0]}) + "\n" for row in rows))
        else:
            (folder / f"{shard}.png").write_bytes(noise_png(shard, 8 + shard))
    if kind == "images":
        return {}
    return {"image_column": "png"} if "tar" in kind else {"data_kind": "points", "resolution": None, "image_channels": None}


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
    options = {"data_kind": "points", "resolution": None, "image_channels": None}
    for name, first in (("a", 0.0), ("b", 1.0)):
        datasets.Dataset.from_dict({"x": [[first, number] for number in range(9)]}).save_to_disk(str(tmp_path / name))
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    found = {name: fingerprint(tmp_path / name, options) for name in ("a", "b", "copy")}
    assert found["a"] == found["copy"] != found["b"]


# --- finding the rows ------------------------------------------------------------------------------------------------


class Stream:
    """As a `datasets.IterableDataset` of three shards, of which those in `failing` break off."""

    num_shards = 3

    def __init__(self, failing=(), number=None):
        self.failing, self.number, self.read = failing, number, []

    def shard(self, num_shards, index):
        self.read.append(index)
        return Stream(self.failing, index)

    def iter(self, batch_size):
        yield {"x": [[self.number, 0.0]]}
        if self.number in self.failing:
            raise ConnectionError("reset by peer")
        yield {"x": [[self.number, 1.0]]}


def counted(stream, path):
    """The shards that are read to count their rows."""
    found = SequentialShards("rows", stream, [f"{number}.csv" for number in range(3)], "x", path)
    assert found.lengths.tolist() == [2, 2, 2]
    return stream.read, found.fingerprint


def test_a_restart_goes_on_with_the_shards_that_were_not_counted(tmp_path):
    told = r"The rows of '2\.csv' could not be counted \(ConnectionError: reset by peer\)\. Start again when it can be read"
    with pytest.raises(LabError, match=told):
        counted(Stream({2}), tmp_path / "rows")
    read, fingerprint = counted(Stream({0, 1}), tmp_path / "rows")
    assert read == [2]
    assert counted(Stream(), tmp_path / "rows") == ([], fingerprint)


def test_a_line_that_a_killed_process_left_unfinished_is_counted_again(tmp_path):
    _, expected = counted(Stream(), tmp_path / "rows")
    kept = (tmp_path / "rows").read_bytes()
    (tmp_path / "rows").write_bytes(kept[: len(kept) // 2])
    for read in ([1, 2], []):
        assert counted(Stream(), tmp_path / "rows") == (read, expected)


def test_a_footer_of_parquet_that_cannot_be_read_is_named(tmp_path):
    write_shards(tmp_path / "data", "parquet")
    files = sorted(map(str, (tmp_path / "data").iterdir()))
    feature = datasets.List(datasets.Value("float64"))
    assert ParquetShards("rows", files, "x", feature).lengths.tolist() == [3, 2] * NUM_FILES
    Path(files[1]).write_bytes(b"PAR1")
    with pytest.raises(LabError, match=r"1\.parquet' could not be read \(ArrowInvalid: .*\)\. Start again"):
        ParquetShards("rows", files, "x", feature)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
@cases("kind", ["tar", "jsonl"])
def test_shards_that_are_read_in_order_are_not_divided_among_workers_twice(tmp_path, kind):
    """`datasets` divides each stream that it finds in a worker."""
    data = load(tmp_path / "data", **STREAM, **write_shards(tmp_path / "data", kind))
    expected, found = (stacked(iterate_batches(data, BatchLayout(4), 0, range(3, 8), num_workers)) for num_workers in (0, 3))
    assert torch.equal(found, expected)
