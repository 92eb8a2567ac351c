"""Data sets of points from folders: what is read, how it is split and batched, and what is said when it cannot be."""

from functools import partial

import datasets
import helpers
import numpy as np
import pyarrow as pa
import pytest
import torch
from helpers import image_folder, joined, load_data, numbered_image
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.batches import iterate_batches
from diffusers_lrlab.data.options import BatchLayout
from diffusers_lrlab.data.points import read_points
from diffusers_lrlab.data.sources import has_points
from diffusers_lrlab.data.toy2d import toy_points
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.resolve import resolve_config

LAZY = {"in_memory_limit_mb": 0}
STREAM = {"streaming": True, "max_train_steps": 1}


def numbers(num_rows=20, dimension=2, dtype="float32"):
    """Rows that are known again by their first number, which is not small for the others."""
    rows = np.arange(num_rows)[:, None] + 0.25 * np.arange(dimension)
    return (rows if "float" in dtype else rows * 4).astype(dtype)


def as_dataset(rows, dtype="float32", length=-1, **columns):
    feature = datasets.List(datasets.Value(dtype), length=length)
    features = {"p": feature, **{name: datasets.Value("int64") for name in columns}}
    return datasets.Dataset.from_dict({"p": rows, **columns}, features=datasets.Features(features))


def write(folder, dataset, form="parquet"):
    """A folder of a data set in one of the forms that are read."""
    if form == "save_to_disk":
        dataset.save_to_disk(folder)
        return folder
    folder.mkdir(parents=True)
    if form == "parquet":
        dataset.to_parquet(folder / "train-00000-of-00001.parquet")
    else:
        dataset.to_json(folder / "train.jsonl")
    return folder


load = partial(helpers.load, data_kind="points", resolution=None, image_channels=None)


def settle(folder, **options):
    options = {"dataset_name": str(folder), "cache_dir": str(folder.parent / "cache"), **options}
    return has_points(TrainingConfig(**options))


def by_row(points):
    """In the order of the first number."""
    points = np.asarray(points)
    return points[np.argsort(points[:, 0], kind="stable")]


def one_epoch(data):
    """All training points, by reading batches of one."""
    return by_row(joined(iterate_batches(data, BatchLayout(1), 0, range(len(data.train)))))


@cases("form", ["parquet", "save_to_disk", "jsonl"])
@cases("limit", [1024, 0])
def test_forms_of_data_sets_that_are_read(tmp_path, form, limit):
    rows = numbers()
    data = load(write(tmp_path / "set", as_dataset(rows), form), in_memory_limit_mb=limit)
    assert (data.name, data.column, data.image_shape, data.num_images) == (str(tmp_path / "set"), "p", (2,), 20)
    assert (data.in_memory is None) == (limit == 0)
    np.testing.assert_array_equal(one_epoch(data), rows)
    np.testing.assert_array_equal(by_row(data.all_in_memory().data), rows)


@cases(
    ("dimension", "fixed", "dtype"),
    [(1, True, "float16"), (2, False, "float64"), (5, True, "int8"), (1, False, "int64")],
)
def test_numbers_of_every_kind_and_dimension_arrive_as_they_are(tmp_path, dimension, fixed, dtype):
    rows = numbers(10, dimension, dtype)
    folder = write(tmp_path / "set", as_dataset(rows, dtype, dimension if fixed else -1, label=list(range(10))))
    assert settle(folder)
    for options in ({}, LAZY):
        data = load(folder, num_validation_images=2, **options)
        points = np.concatenate([data.held_out.data, one_epoch(data)])
        assert (data.image_shape, points.dtype) == ((dimension,), np.float32)
        np.testing.assert_array_equal(by_row(points), rows)


def test_columns_are_read_with_indices_offsets_and_large_lists():
    rows = [7, 3, 29, 0, 11, 12, 13]
    np.testing.assert_array_equal(read_points(as_dataset(numbers(30), length=2).select(rows), "p"), numbers(30)[rows])
    large = pa.table({"p": pa.array(numbers().tolist(), pa.large_list(pa.float64()))})
    np.testing.assert_array_equal(read_points(datasets.Dataset(large), "p"), numbers())
    for length in (2, -1):
        points = read_points(as_dataset(numbers(30), length=length).select(range(5, 9)), "p")
        np.testing.assert_array_equal(points, numbers(30)[5:9])
    joined = datasets.concatenate_datasets([as_dataset(numbers(3)), as_dataset(numbers(4) + 10)])
    np.testing.assert_array_equal(read_points(joined, "p"), np.concatenate([numbers(3), numbers(4) + 10]))
    with pytest.raises(LabError, match="'p' has no rows"):
        read_points(as_dataset(numbers(), length=2).select([]), "p")


def test_toy_sets_are_split_into_two_draws_that_do_not_follow_the_seed_of_a_run():
    data = load_data(resolve_config(TrainingConfig(dataset_name="line", num_validation_images=77, seed=7)))
    assert (data.name, data.column, data.image_shape, data.fingerprint) == ("line", "x", (2,), "toy2d-line")
    np.testing.assert_array_equal(data.in_memory.data, toy_points("line", 100_000))
    np.testing.assert_array_equal(data.held_out.data, toy_points("line", 77, split="test"))
    usual = load_data(resolve_config(TrainingConfig(dataset_name="line")))
    assert torch.equal(usual.in_memory.data, data.in_memory.data)
    assert len(usual.held_out) == 10_000


@cases("first", [[], None], ids=repr)
def test_a_first_row_that_is_no_point_is_named(tmp_path, first):
    folder = write(tmp_path / "set", as_dataset([first, [1.0, 2.0], [3.0, 4.0]], "float64"))
    for options in ({}, STREAM):
        with pytest.raises(LabError, match=r"p=.* of row 0: must be a list of one number or more"):
            load(folder, **options)


@cases(("bad", "held_out"), [([1.0], 0), ([], 1), (None, 0), ([1.0, None], 1), ([1.0, np.nan], 0), ([1e300, 0.0], 1)])
def test_a_bad_row_of_a_stream_is_an_error_that_names_the_column_and_shows_it(tmp_path, bad, held_out):
    rows = [*numbers(2).tolist(), bad, [5.0, 6.0], [7.0, 8.0]]  # the third is what is held out of five
    folder = write(tmp_path / "set", as_dataset(rows, "float64"))
    with pytest.raises(LabError, match=r"p=.*2 finite numbers") as error:
        list(iterate_batches(load(folder, num_validation_images=held_out, **STREAM), BatchLayout(1), 0, range(5)))
    assert str(bad) in str(error.value)


def test_the_kind_of_embedded_sets_is_known_and_a_named_column_of_images_is_not_looked_up():
    for name in ("moons", "digits", None):
        assert resolve_config(TrainingConfig(dataset_name=name)).data_kind == ("points" if name == "moons" else None)
    assert not has_points(TrainingConfig(dataset_name="no/where", image_column="image"))


@cases(("form", "by"), [("parquet", "train_data_dir"), ("save_to_disk", "dataset_name"), ("jsonl", "dataset_name")])
def test_the_only_column_of_lists_of_numbers_is_that_of_points(tmp_path, form, by):
    columns = {"q": numbers().tolist(), "label": list(range(20)), "text": ["a"] * 20, "words": [["a", "b"]] * 20}
    folder = write(tmp_path / "set", datasets.Dataset.from_dict(columns), form)
    assert settle(folder, **{"dataset_name": None, by: str(folder)})
    assert load(folder).column == "q"


def test_several_columns_of_numbers_are_to_choose_from(tmp_path):
    columns = {"first": numbers().tolist(), "second": numbers().tolist(), "label": [0] * 20}
    folder = write(tmp_path / "set", datasets.Dataset.from_dict(columns))
    assert settle(folder)
    with pytest.raises(LabError, match=r"several columns of lists of numbers: first, second. Hint: save it with one"):
        load(folder)


def test_images_go_before_numbers(tmp_path):
    rows = {"image": [numbered_image(n) for n in range(5)], "box": numbers(5).tolist()}
    write(tmp_path / "set", datasets.Dataset.from_dict(rows))
    assert not settle(tmp_path / "set")
    np.testing.assert_array_equal(one_epoch(load(tmp_path / "set", data_kind="points")), numbers(5))


@cases("cell", [0.5, "[1, 2]", ["a"], [True, False], [[1.0, 2.0], [3.0, 4.0]], [{"a": 1.0}]], ids=repr)
@cases("options", [{}, STREAM], ids=["whole", "stream"])
def test_columns_of_something_else_are_not_points_and_are_listed(tmp_path, cell, options):
    folder = write(tmp_path / "set", datasets.Dataset.from_dict({"q": [cell] * 5, "label": [1] * 5}))
    assert not settle(folder)
    with pytest.raises(LabError, match=r"no column of points .*Columns: q \(.*label \(int64\)"):
        load(folder, **options)


def test_a_folder_of_images_is_one_of_images(tmp_path):
    assert not settle(image_folder(tmp_path / "images"))
    (tmp_path / "images" / "metadata.csv").write_text("file_name,text\n")
    assert not settle(tmp_path / "images")


@cases(("bad", "text"), [
    ([1.0], r"p=\[1.0\] of row 3: must be a list of 2 numbers, as in row 0"),
    (None, r"p=None of row 3: must be a list of 2 numbers"),
    ([np.nan, 1.0], r"p=\[nan, 1.0\] of row 3: must be .*finite"),
    ([0.0, -3.5e38], r"p=\[0.0, -3.5e\+38\] of row 3: must be .*float32"),
])  # fmt: skip
def test_the_first_bad_row_is_named(tmp_path, bad, text):
    """Whether it would be held out or not, in columns of any and of a fixed length."""
    rows = [*numbers(3).tolist(), bad, [5.0, 6.0], bad, *numbers(4).tolist()]
    for length in (-1, 2) if bad is None or len(bad) == 2 else (-1,):
        folder = write(tmp_path / str(length), as_dataset(rows, "float64", length), "save_to_disk")
        with pytest.raises(LabError, match=text):
            load(folder, num_validation_images=2, **LAZY)


def test_points_have_defaults_of_their_own_and_no_options_of_images(tmp_path):
    folder = write(tmp_path / "set", as_dataset(numbers()))
    for options in ({"dataset_name": "moons"}, {"dataset_name": str(folder), "data_kind": "points"}):
        resolved = resolve_config(TrainingConfig(**options))
        assert (resolved.num_validation_images, resolved.num_train_timesteps) == (10_000, 100)
        for refused in ({"resolution": 8}, {"image_column": "image"}, {"noise": "offset"}):
            with pytest.raises(LabError, match=f"--{next(iter(refused))}"):
                resolve_config(TrainingConfig(**options, **refused))
