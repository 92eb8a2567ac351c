"""Sorted streams are told by a look at their first rows, and shuffled ones are not."""

import datasets
import numpy as np
import pyarrow.parquet as parquet
import pytest
from helpers import load
from PIL import Image
from tables import cases
from test_stream_sources import png, write_tar

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.data.sorted_rows import compare, find_sorted_rows
from diffusers_lrlab.data.tar_shards import TarShards
from diffusers_lrlab.training.resolve import resolve_config

NUM_CLASSES, PER_CLASS = 4, 80
POINTS = {"point_column": "x", "resolution": None, "image_channels": None}
IMAGES = {"resolution": 8, "image_channels": 1}


def rows_of(order):
    labels = np.repeat(np.arange(NUM_CLASSES), PER_CLASS)[order]
    return {"x": np.random.default_rng(0).normal(size=(len(order), 2)).tolist(), "label": labels.tolist()}


def write(folder, kind, order):
    """320 rows of four labels in this order; and the options to stream them."""
    rows = rows_of(order)
    if kind == "saved":
        datasets.Dataset.from_dict(rows).save_to_disk(str(folder))
        return POINTS
    folder.mkdir()
    if kind == "one parquet file":
        parquet.write_table(datasets.Dataset.from_dict(rows).data.table, folder / "0.parquet", row_group_size=40)
        return POINTS
    if kind == "parquet files":
        for number, part in enumerate(np.array_split(np.arange(len(order)), 16)):
            table = datasets.Dataset.from_dict(rows).data.table.take(part)
            parquet.write_table(table, folder / f"{number:02}.parquet")
        return POINTS
    if kind == "tar files":
        for number, part in enumerate(np.array_split(np.arange(len(order)), 4)):
            files = [[(f"{row:03}.png", png(row)), (f"{row:03}.cls", str(rows["label"][row]).encode())] for row in part]
            write_tar(folder / f"{number}.tar", sum(files, []))
        return IMAGES | {"image_column": "png"}
    raise AssertionError(kind)


def found_in(folder, options):
    config = resolve_config(TrainingConfig(train_data_dir=str(folder), streaming=True, max_train_steps=1, **options))
    data = load(folder, streaming=True, max_train_steps=1, **options)
    return find_sorted_rows(config, data.train.source, data.train.column)


@pytest.mark.slow
@cases("kind", ["saved", "one parquet file", "parquet files", "tar files"])
def test_rows_that_are_sorted_by_label_are_told_and_others_are_not(tmp_path, kind):
    in_order = np.arange(NUM_CLASSES * PER_CLASS)
    options = write(tmp_path / "sorted", kind, in_order)
    found = found_in(tmp_path / "sorted", options)
    assert found.column in ("label", "cls")
    assert found.changes < found.expected / 10
    write(tmp_path / "shuffled", kind, np.random.default_rng(0).permutation(in_order))
    assert found_in(tmp_path / "shuffled", options) is None


@pytest.mark.slow
def test_a_folder_of_images_by_class_is_sorted_and_one_of_a_single_class_is_not(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(100):
            (tmp_path / "data" / name / f"{number}.png").write_bytes(png(number))
    assert found_in(tmp_path / "data", IMAGES).column == "label"
    assert found_in(tmp_path / "data" / "cat", IMAGES) is None


def test_few_images_are_read_for_their_labels_and_sizes(tmp_path, monkeypatch):
    """They may lie on the Hub."""
    order = np.random.default_rng(0).permutation(NUM_CLASSES * PER_CLASS)
    options = write(tmp_path / "data", "tar files", order)
    fetched = []
    fetch = TarShards.fetch
    monkeypatch.setattr(TarShards, "fetch", lambda shards, cell: fetched.append(cell) or fetch(shards, cell))
    assert found_in(tmp_path / "data", options) is None
    assert 0 < len(fetched) <= 128


@cases("is_sorted", [True, False])
def test_images_that_are_sorted_by_size_are_told(tmp_path, is_sorted):
    sizes = np.arange(8, 88).repeat(2)
    sizes = sizes if is_sorted else np.random.default_rng(0).permutation(sizes)
    (tmp_path / "data").mkdir()
    for number, size in enumerate(sizes.tolist()):
        Image.new("L", (size, size)).save(tmp_path / "data" / f"{number:03}.png")
    found = found_in(tmp_path / "data", IMAGES)
    assert (found is not None) == is_sorted
    if is_sorted:
        assert found.column == "image"


def draws(rng):
    """Labels of shuffled rows: few or many, equally frequent or not."""
    shares = rng.dirichlet(np.full(rng.integers(1, 200), rng.choice([0.05, 0.5, 5.0])))
    return [rng.choice(len(shares), size=64, p=shares).tolist() for _ in range(rng.integers(1, 9))]


def test_shuffled_labels_are_hardly_ever_told():
    rng = np.random.default_rng(0)
    assert sum(compare(draws(rng), "label") is not None for _ in range(2000)) == 0


@pytest.mark.parametrize(
    ("stretches", "num_labels", "is_told"),
    [
        ([[3] * 64], 10, True),  # the first rows of a single shard
        ([[3] * 64], 1, False),  # a data set of one class
        ([[3] * 20], 10, False),  # too few to say
        ([[0] * 64, [1] * 64], 1, True),
        ([[0, 1] * 32], 2, False),
        ([], 2, False),
        ([[None] * 64], 1, False),
    ],
)
def test_what_few_rows_say(stretches, num_labels, is_told):
    assert (compare(stretches, "label", num_labels) is not None) == is_told
