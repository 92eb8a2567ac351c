"""Conditions: each image and point keeps the number of its row, however it is read."""

import io
import json
import tarfile

import datasets
import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from helpers import config, levels, numbered_image
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.batches import iterate_batches
from diffusers_lrlab.data.image_loading import load_image_data
from diffusers_lrlab.data.layout import BatchLayout
from diffusers_lrlab.data.points import load_point_data

NUM_ROWS, CORRUPT = 40, (3, 4, 17, 39)
LABELS = {"class_labels": "label"}
STREAM = {"streaming": True, "max_train_steps": 9, "stream_shuffle_buffer": 60}
LAZY = {"in_memory_limit_mb": 0}


def png(level):
    numbered_image(level).save(file := io.BytesIO(), format="png")
    return file.getvalue()


def contents(corrupt=()):
    """Images that are known by their level, which is their label."""
    return [b"damaged" if level in corrupt else png(level) for level in range(NUM_ROWS)]


def as_images(folder, corrupt=(), shift=0):
    cells = [{"bytes": content, "path": None} for content in contents(corrupt)]
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=99), "score": datasets.Value("float64")}
    rows = {"image": cells, "label": [row + shift for row in range(NUM_ROWS)], "score": np.arange(NUM_ROWS) / 2}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def write_parquet(folder, **options):
    folder.mkdir()
    whole = as_images(folder, **options)
    for part in range(2):
        whole.shard(2, part, contiguous=True).to_parquet(folder / f"train-{part:05}-of-00002.parquet", batch_size=7)


def write_saved(folder, **options):
    as_images(folder, **options).save_to_disk(str(folder))


def write_tars(folder, corrupt=(), shift=0):
    """The label comes before the image in some rows, and after it in others."""
    folder.mkdir()
    for part, rows in enumerate(np.array_split(np.arange(NUM_ROWS), 3)):
        with tarfile.open(folder / f"train-{part:05}.tar", "w") as tar:
            for row in rows.tolist():
                members = [(f"{row:03}.png", contents(corrupt)[row]), (f"{row:03}.label.cls", f"{row + shift}\n".encode())]
                for name, content in members if row % 2 else reversed(members):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))


def load_images(folder, conditions=LABELS, **options):
    resolved = config(folder, **options)
    return load_image_data(resolved, resolved.seed, resolved.layout(1), conditions)


def batches_of(data, **options):
    return list(iterate_batches(data, BatchLayout(4, 2), 0, range(12), **options))


def assert_told(batch, shift=0):
    """The label of every image is its level."""
    assert batch.conditions.keys() == {"class_labels"}
    assert batch.conditions["class_labels"].dtype == torch.int64
    assert batch.conditions["class_labels"].tolist() == [level + shift for level in levels(batch)]


FORMS = {
    "memory": (write_parquet, {}, {}),
    "lazy": (write_parquet, LAZY, {}),
    "workers": (write_parquet, LAZY, {"num_workers": 2}),
    "saved": (write_saved, LAZY, {}),
    "stream of parquet": (write_parquet, STREAM, {}),
    "stream of parquet, workers": (write_parquet, STREAM, {"num_workers": 2}),
    "stream of saved": (write_saved, STREAM, {}),
    "stream of tars": (write_tars, {**STREAM, "image_column": "png"}, {}),
    "stream of tars, workers": (write_tars, {**STREAM, "image_column": "png"}, {"num_workers": 2}),
}


@pytest.mark.slow
@cases(("write", "options", "how"), list(FORMS.values()), ids=list(FORMS))
@cases("corrupt", [(), CORRUPT], ids=["whole", "corrupt"])
def test_each_image_has_the_label_of_its_row(tmp_path, write, options, how, corrupt):
    """A row that replaces a corrupt one brings its own label."""
    write(tmp_path / "data", corrupt=corrupt)
    conditions = {"class_labels": "label.cls"} if write is write_tars else LABELS
    options = {**options, "num_validation_images": 6, "skip_corrupt_images": bool(corrupt)}
    data = load_images(tmp_path / "data", conditions, **options)
    read = batches_of(data, skip_corrupt=bool(corrupt), **how)
    assert len(read) == 12
    for batch in read:
        assert len(batch) == 8
        assert_told(batch)
    assert not {*corrupt} & {level for batch in read for level in levels(batch)}
    assert_told(data.held_out)
    assert len(data.held_out) >= 6 - len(corrupt)
    if not corrupt:
        assert_told(data.all_in_memory(9))
        assert_told(data.random_sample(7, 20))


@pytest.mark.slow
@cases(("write", "options", "how"), list(FORMS.values()), ids=list(FORMS))
def test_the_images_are_those_of_a_run_without_labels(tmp_path, write, options, how):
    write(tmp_path / "data")
    conditions = {"class_labels": "label.cls"} if write is write_tars else LABELS
    told, plain = (load_images(tmp_path / "data", each, **options, num_validation_images=4) for each in (conditions, None))
    assert torch.equal(told.held_out.data, plain.held_out.data)
    assert plain.held_out.conditions == {}
    for one, other in zip(batches_of(told, **how), batches_of(plain, **how), strict=True):
        assert torch.equal(one.data, other.data)
        assert other.conditions == {}


@pytest.mark.slow
@cases(("processes", "accumulation", "micro_batch"), [(1, 4, 2), (2, 2, 2), (4, 1, 2)])
@cases("options", [{}, LAZY, STREAM], ids=["memory", "lazy", "stream"])
def test_labels_do_not_depend_on_the_layout(tmp_path, options, processes, accumulation, micro_batch):
    write_parquet(tmp_path / "data", corrupt=CORRUPT)
    data = load_images(tmp_path / "data", skip_corrupt_images=True, **options)
    whole = list(iterate_batches(data, BatchLayout(8), 0, range(6), skip_corrupt=True))
    for rank in range(processes):
        layout = BatchLayout(micro_batch, accumulation, processes, rank)
        places = torch.tensor([place for positions in layout.positions() for place in positions])
        # From the fourth update on, as a resumed run reads.
        for batch, expected in zip(iterate_batches(data, layout, 0, range(3, 6), 0, True), whole[3:], strict=True):
            assert_told(batch)
            assert torch.equal(batch.conditions["class_labels"], expected.conditions["class_labels"][places])


@pytest.mark.slow
def test_the_digits_and_folders_have_labels(tmp_path):
    resolved = config(dataset_name="digits", num_validation_images=50)
    digits = load_image_data(resolved, 0, resolved.layout(1), LABELS)
    labels = torch.cat([digits.in_memory.conditions["class_labels"], digits.held_out.conditions["class_labels"]])
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    for level in range(20):
        path = tmp_path / "data" / ("even" if level % 2 == 0 else "odd") / f"{level:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(level))
    for options in ({}, LAZY, STREAM):
        for batch in batches_of(load_images(tmp_path / "data", **options)):
            assert batch.conditions["class_labels"].tolist() == [level % 2 for level in levels(batch)]


@cases("options", [{}, LAZY, STREAM], ids=["memory", "lazy", "stream"])
@cases("form", ["parquet", "jsonl"])
def test_points_have_the_numbers_of_their_rows(tmp_path, options, form):
    rows = {"x": [[float(row), 1.0] for row in range(NUM_ROWS)], "label": [*range(NUM_ROWS)]}
    rows["score"] = [row / 4 for row in range(NUM_ROWS)]
    (tmp_path / "data").mkdir()
    if form == "parquet":
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "data" / "train.parquet")
    else:
        lines = (json.dumps({name: values[row] for name, values in rows.items()}) for row in range(NUM_ROWS))
        (tmp_path / "data" / "train.jsonl").write_text("\n".join(lines))
    resolved = config(
        tmp_path / "data", data_kind="points", resolution=None, image_channels=None, num_validation_images=5, **options
    )
    data = load_point_data(resolved, 0, resolved.layout(1), {"class_labels": "label", "time": "score"})
    for batch in [*batches_of(data), data.held_out, data.random_sample(9, 20)]:
        assert batch.conditions["class_labels"].tolist() == batch.data[:, 0].tolist()
        assert batch.conditions["time"].tolist() == (batch.data[:, 0] / 4).tolist()
        assert batch.conditions["time"].dtype == torch.float32


# --- the same data ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@cases(
    ("write", "options"),
    [(write_parquet, {}), (write_parquet, STREAM), (write_saved, STREAM), (write_tars, {**STREAM, "image_column": "png"})],
    ids=["random access", "parquet", "saved", "tar"],
)
def test_the_fingerprint_covers_the_conditions(tmp_path, write, options):
    write(tmp_path / "data")
    write(tmp_path / "shifted", shift=1)
    label = "label.cls" if write is write_tars else "label"
    given = [None, {"class_labels": label}, {"labels": label}]
    found = [load_images(tmp_path / "data", conditions, **options).fingerprint for conditions in given]
    found.append(load_images(tmp_path / "shifted", given[1], **options).fingerprint)
    assert len(set(found)) == 4
    assert load_images(tmp_path / "data", given[1], **options).fingerprint == found[1]
    if write is write_tars:  # whose labels are told neither by the names of members nor by their sizes
        assert load_images(tmp_path / "shifted", None, **options).fingerprint == found[0]


def test_without_conditions_the_fingerprint_is_that_of_the_data():
    resolved = config(dataset_name="digits")
    assert load_image_data(resolved, 0, resolved.layout(1)).fingerprint == "digits"
    assert load_image_data(resolved, 0, resolved.layout(1), LABELS).fingerprint != "digits"


# --- what is refused -------------------------------------------------------------------------------------------------


@cases("column", ["lable", "image", "caption"])
@cases("options", [{}, STREAM], ids=["random access", "stream"])
def test_a_column_without_numbers_is_refused(tmp_path, column, options):
    (tmp_path / "data").mkdir()
    whole = as_images(tmp_path).add_column("caption", ["grey"] * NUM_ROWS)
    whole.to_parquet(tmp_path / "data" / "train.parquet")
    told = rf"class_labels='{column}' of conditions: must be a column of numbers, .*the columns are .*label \(int64\)"
    with pytest.raises(LabError, match=told):
        load_images(tmp_path / "data", {"class_labels": column}, **options)


@cases("bad", [None, -1, 10], ids=["missing", "-1", "10"])
@cases("options", [{}, {**STREAM, "num_validation_images": 4}], ids=["random access", "stream"])
def test_a_label_that_is_no_class_is_an_error(tmp_path, bad, options):
    """It would be another class's row of an embedding, or none; `--skip_corrupt_images` is about images."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    labels = [1] * 8 + [bad] + [1] * 11
    rows = {"image": [{"bytes": png(row), "path": None} for row in range(20)], "label": labels}
    whole = datasets.Dataset.from_dict(rows, features=features)
    # A table of `datasets` holds what is in its files, whatever the names of its classes.
    features["label"] = datasets.ClassLabel(num_classes=10)
    table = whole.data.table.replace_schema_metadata(
        datasets.Dataset.from_dict({name: [] for name in features}, features=features).data.table.schema.metadata
    )
    (tmp_path / "data").mkdir()
    parquet.write_table(table, tmp_path / "data" / "train.parquet")
    with pytest.raises(
        LabError, match=rf"label={bad} of row .*: must be a class in \[0, 9\], got {bad}\. Hint: correct or remove"
    ):
        batches_of(load_images(tmp_path / "data", skip_corrupt_images=True, **options), skip_corrupt=True)


def test_a_member_of_a_tar_file_that_is_no_number_is_an_error(tmp_path):
    write_tars(tmp_path / "data")
    with tarfile.open(tmp_path / "data" / "train-00003.tar", "w") as tar:
        for name, content in (("900.png", png(9)), ("900.label.cls", b"cat")):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    with pytest.raises(LabError, match=r"rows of '\S+train-00003\.tar' could not be counted \(ValueError: .*b'cat'\)"):
        load_images(tmp_path / "data", {"class_labels": "label.cls"}, image_column="png", **STREAM)


def test_toy_sets_have_no_conditions():
    resolved = config(dataset_name="moons")
    with pytest.raises(LabError, match=r"conditions=.*: must be empty, .*the toy set 'moons' has points only"):
        load_point_data(resolved, 0, resolved.layout(1), LABELS)
