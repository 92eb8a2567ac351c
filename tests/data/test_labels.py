"""Class labels: the column, the classes, dropped labels, and those of samples."""

import datasets
import pytest
import torch
from helpers import config, levels, load_data, png, write_tar
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.data.batches import iterate_batches
from diffusers_lrlab.data.labels import Classes, describe_classes
from diffusers_lrlab.data.options import BatchLayout

NUM_ROWS, CORRUPT = 24, (3, 4, 17)
WHOLE = datasets.Value("int64")
STREAM = {"streaming": True, "max_train_steps": 9, "stream_shuffle_buffer": 60}
NAMES = ("cat", "dog", "fox")


def contents(labels):
    """Images that are known by their level, which is their row."""
    return [b"damaged" if row in CORRUPT else png(row) for row in range(len(labels))]


def rows_of(labels, feature):
    features = datasets.Features({"image": datasets.Image(), "label": feature})
    cells = [{"bytes": content, "path": None} for content in contents(labels)]
    return datasets.Dataset.from_dict({"image": cells, "label": labels}, features=features)


def write_parquet(folder, labels, feature=WHOLE):
    folder.mkdir()
    rows_of(labels, feature).to_parquet(folder / "train.parquet", batch_size=10)


def write_saved(folder, labels):
    rows_of(labels, WHOLE).save_to_disk(str(folder))


def write_tars(folder, labels, mode="w"):
    """The label comes before the image in some rows, and after it in others."""
    members = []
    for row, (label, content) in enumerate(zip(labels, contents(labels), strict=True)):
        pair = [(f"{row:03}.png", content), (f"{row:03}.cls", str(label).encode())]
        members += pair if row % 2 else reversed(pair)
    write_tar(folder / "train-00000.tar", members, mode)


def write_compressed(folder, labels):
    """A compressed tar file, which is read in order."""
    write_tars(folder, labels, mode="w:gz")


def load(folder, column="label", **options):
    return load_data(config(folder, label_column=column, skip_corrupt_images=True, **options))


def batches_of(data, layout=None, updates=range(6), num_workers=0):
    return list(iterate_batches(data, layout or BatchLayout(8), 0, updates, num_workers))


def labels_in(batches):
    return [label for batch in batches for label in batch.conditions["class_labels"].tolist()]


INTEGERS = [row % 3 for row in range(NUM_ROWS)]
NAMED = datasets.ClassLabel(names=list(NAMES))
WAYS = {
    "memory": (write_parquet, "label", {}),
    "lazy": (write_parquet, "label", {"in_memory_limit_mb": 0}),
    "stream of parquet": (write_parquet, "label", {**STREAM, "num_classes": 3}),
    "stream of saved": (write_saved, "label", {**STREAM, "num_classes": 3}),
    "tar": (write_tars, "cls", {"image_column": "png"}),
    "stream in order": (write_compressed, "cls", {**STREAM, "image_column": "png", "num_classes": 3}),
    "stream of tars": (write_tars, "cls", {**STREAM, "image_column": "png", "num_classes": 3}),
}


@cases(("write", "column", "options"), list(WAYS.values()), ids=list(WAYS))
def test_each_image_has_its_label_and_is_that_of_a_run_without_labels(tmp_path, write, column, options):
    """A row that replaces a corrupt one brings its own label."""
    write(tmp_path / "data", INTEGERS)
    data = load(tmp_path / "data", column, num_validation_images=4, **options)
    assert data.classes.names == ("0", "1", "2")
    assert data.classes.null_label is None
    assert data.classes.num_embeddings == 3
    batches = batches_of(data)
    drawn = [data.random_sample(7, 20)] if data.in_memory is not None else []
    for batch in [*batches, data.held_out, *drawn]:
        assert batch.conditions["class_labels"].tolist() == [level % 3 for level in levels(batch)]
    assert not {*CORRUPT} & {level for batch in batches for level in levels(batch)}
    plain = load(tmp_path / "data", None, num_validation_images=4, **{**options, "num_classes": None})
    assert (plain.held_out.conditions, plain.classes) == ({}, None)
    for one, other in zip([*batches, data.held_out], [*batches_of(plain), plain.held_out], strict=True):
        assert torch.equal(one.data, other.data)


@pytest.mark.slow
@cases("way", ["lazy", "stream of parquet"])
def test_workers_read_the_same_labels(tmp_path, way):
    write, column, options = WAYS[way]
    write(tmp_path / "data", INTEGERS)
    data = load(tmp_path / "data", column, **options)
    for one, other in zip(batches_of(data), batches_of(data, num_workers=2), strict=True):
        assert torch.equal(one.data, other.data)
        assert torch.equal(one.conditions["class_labels"], other.conditions["class_labels"])


@cases("way", ["memory", "stream of parquet", "stream of saved", "tar", "stream of tars"])
def test_the_fingerprint_covers_the_labels(tmp_path, way):
    write, column, options = WAYS[way]
    write(tmp_path / "data", INTEGERS)
    write(tmp_path / "others", [0, *INTEGERS[:-1]])
    cases = [("data", column), ("others", column), ("data", None)]
    found = [load(tmp_path / name, each, **{**options, "num_classes": each and 3}).fingerprint for name, each in cases]
    assert len({*found}) == 3
    assert load(tmp_path / "data", column, **{**options, "num_classes": 3}).fingerprint == found[0]
    assert load_data(config(dataset_name="digits", num_validation_images=0)).fingerprint == "digits"


@cases("options", [{}, STREAM], ids=["memory", "stream"])
def test_a_class_label_names_and_counts_its_classes(tmp_path, options):
    write_parquet(tmp_path / "data", [0] * 12 + [1] * 12, NAMED)
    classes = load(tmp_path / "data", label_dropout=0.5, **options).classes
    assert classes.names == NAMES
    assert classes.counts == ((1, 1, 1) if options else (12, 12, 0))
    assert (classes.null_label, classes.num_embeddings) == (3, 4)


def test_more_classes_may_be_named_than_the_data_have(tmp_path):
    write_parquet(tmp_path / "data", INTEGERS, NAMED)
    assert load(tmp_path / "data", num_classes=5).classes.names == (*NAMES, "3", "4")


# --- what is refused, before training --------------------------------------------------------------------------------


@cases("options", [{}, STREAM], ids=["memory", "stream"])
@cases(("column", "got"), [("lable", "'lable'"), ("image", "'image' of type"), ("caption", "'caption' of type string")])
def test_a_column_without_whole_numbers(tmp_path, column, got, options):
    write_parquet(tmp_path / "raw", INTEGERS)
    whole = datasets.load_dataset(str(tmp_path / "raw"), split="train", cache_dir=str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    whole.add_column("caption", ["grey"] * NUM_ROWS).to_parquet(tmp_path / "data" / "train.parquet")
    told = (
        rf"--label_column '{column}': must be a column of whole numbers or class labels, got {got}.*Hint: the columns are .*"
    )
    with pytest.raises(LabError, match=told + r"label \(int64\).*class_encode_column\(\)"):
        load(tmp_path / "data", column, **options)


@cases(("write", "column", "options"), [way for way in WAYS.values() if way[2].get("in_memory_limit_mb") != 0])
@cases(("bad", "remedy"), [(-1, "correct or remove the row."), (3, "correct or remove the row, or raise --num_classes.")])
def test_a_label_that_is_no_class_is_found_when_data_are_loaded(tmp_path, write, column, options, bad, remedy):
    write(tmp_path / "data", [*INTEGERS[:-2], bad, 0])
    with pytest.raises(
        LabError, match=rf"{column}={bad} of .*row.*: must be a class in \[0, 2\], got {bad}\. Hint: {remedy}"
    ):
        load(tmp_path / "data", column, num_validation_images=0, **{"num_classes": 3, **options})


@cases("write", [write_tars, write_compressed])
def test_labels_are_compared_with_the_number_of_classes_at_each_start(tmp_path, write):
    """Also where an earlier one has counted the rows."""
    write(tmp_path / "data", [*INTEGERS[:-1], 7])
    options = {**STREAM, "image_column": "png", "num_validation_images": 0}
    assert load(tmp_path / "data", "cls", num_classes=8, **options).classes.num_embeddings == 8
    with pytest.raises(LabError, match=r"cls=7 of .*row.*: must be a class in \[0, 5\]"):
        load(tmp_path / "data", "cls", num_classes=6, **options)


@cases("bad", [-1, None])
def test_a_negative_or_missing_label_without_a_known_number_of_classes(tmp_path, bad):
    write_parquet(tmp_path / "data", [bad, *INTEGERS[1:]])
    told = f"label={bad} of row 0: must be a label, a whole number from 0 on, got {bad}. Hint: correct or remove the row"
    with pytest.raises(LabError, match=told):
        load(tmp_path / "data")


def test_a_member_of_a_tar_file_that_is_no_number(tmp_path):
    write_compressed(tmp_path / "data", [*INTEGERS[:-1], "cat"])
    with pytest.raises(LabError, match=r"rows of '\S+train-00000\.tar' could not be counted \(ValueError: .*b'cat'\)"):
        load(tmp_path / "data", "cls", image_column="png", num_classes=3, **STREAM)


def test_a_stream_of_whole_numbers_needs_their_number(tmp_path):
    write_parquet(tmp_path / "data", INTEGERS)
    with pytest.raises(LabError, match="--num_classes None: must be given for a stream .* Hint: labels of 'label' are read"):
        load(tmp_path / "data", **STREAM)


@cases("options", [{}, STREAM], ids=["memory", "stream"])
def test_fewer_classes_than_the_column_names(tmp_path, options):
    write_parquet(tmp_path / "data", INTEGERS, NAMED)
    with pytest.raises(LabError, match="--num_classes 2: must be 3 or more, as 'label' has, got 2. Hint: leave it out"):
        load(tmp_path / "data", num_classes=2, **options)


def test_numbers_of_rows_are_not_classes(tmp_path):
    write_parquet(tmp_path / "data", [*INTEGERS[1:], 5_000_000])
    with pytest.raises(LabError, match="--label_column 'label': must be a column with labels below 1,000,000, got a label"):
        load(tmp_path / "data")


@cases(
    ("options", "told"),
    [
        ({"label_dropout": 0.1}, "--label_dropout 0.1 has no effect without --label_column"),
        (
            {"guidance_scale": 2.0, "label_column": "label"},
            "--guidance_scale 2.0 has no effect without --label_dropout above 0",
        ),
    ],
)
def test_options_without_effect(options, told):
    with pytest.raises(LabError, match=told):
        config(**{"dataset_name": "digits", **options})


# --- dropped labels --------------------------------------------------------------------------------------------------


DROPPING = [
    (write_parquet, {}),
    (write_parquet, {"in_memory_limit_mb": 0}),
    (write_parquet, {**STREAM, "num_classes": 3}),
]


@pytest.mark.slow
@cases(("write", "options"), DROPPING, ids=["memory", "lazy", "stream"])
@cases(("processes", "accumulation", "micro_batch"), [(1, 1, 8), (1, 4, 2), (2, 2, 2), (4, 1, 2)])
def test_dropped_labels_do_not_depend_on_the_layout_or_the_start(
    tmp_path, write, options, processes, accumulation, micro_batch
):
    write(tmp_path / "data", INTEGERS)
    data = load(tmp_path / "data", label_dropout=0.3, num_validation_images=4, **options)
    whole = batches_of(data, updates=range(9))
    dropped = [label for label in labels_in(whole) if label == 3]
    assert 0 < len(dropped) < len(labels_in(whole))
    kept = [pair for batch in whole for pair in zip(labels_in([batch]), levels(batch), strict=True) if pair[0] != 3]
    assert all(label == level % 3 for label, level in kept)
    for rank in range(processes):
        layout = BatchLayout(micro_batch, accumulation, processes, rank)
        places = torch.tensor([place for positions in layout.positions() for place in positions])
        for batch, expected in zip(batches_of(data, layout, range(5, 9)), whole[5:], strict=True):
            assert torch.equal(batch.conditions["class_labels"], expected.conditions["class_labels"][places])
            assert torch.equal(batch.data, expected.data[places])
    assert 3 not in labels_in([data.held_out])


def test_the_share_of_dropped_labels_and_their_seed():
    labels = torch.zeros(20_000, dtype=torch.int64)
    batch = Batch(torch.zeros(20_000, 1), {"class_labels": labels, "time": torch.arange(20_000)})
    found = [Classes(("a",), (1,), 0.25, seed).drop(batch, range(20_000)) for seed in (0, 0, 1)]
    for each in found:
        dropped = int(each.conditions["class_labels"].sum())
        assert abs(dropped - 5000) < 5 * (20_000 * 0.25 * 0.75) ** 0.5
        assert torch.equal(each.conditions["time"], batch.conditions["time"])
    first, again, other = (each.conditions["class_labels"] for each in found)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert Classes(("a",), (1,), 0.0, 0).drop(batch, range(20_000)) is batch


# --- labels of samples -----------------------------------------------------------------------------------------------


@cases("num", [1, 7, 100, 1000])
def test_measured_samples_have_the_proportions_of_the_data(num):
    counts = torch.tensor([100, 300, 0, 600])
    labels = Classes(("a", "b", "c", "d"), tuple(counts.tolist()), 0.0, 0).to_measure(num)
    found = torch.bincount(labels, minlength=4)
    assert len(labels) == num
    assert (found - counts * num / 1000).abs().max() < 1
    assert found[2] == 0
    if num >= 100:
        assert not torch.equal(labels, labels.sort()[0])


@cases(
    ("num", "expected"), [(9, [0, 0, 0, 1, 1, 1, 2, 2, 2]), (11, [0, 0, 0, 1, 1, 1, 2, 2, 2]), (3, [0, 1, 2]), (2, [0, 1])]
)
def test_shown_samples_are_ordered_by_class(num, expected):
    assert Classes(NAMES, (5, 5, 5), 0.0, 0).to_show(num).tolist() == expected


def test_some_of_many_classes_are_shown():
    assert Classes(tuple(map(str, range(1000))), (1,) * 1000, 0.0, 0).to_show(4).tolist() == [0, 250, 500, 750]


def test_classes_in_words():
    assert describe_classes(NAMES) == "3 classes (cat, dog, fox)"
    assert describe_classes([str(number) for number in range(1200)]) == "1,200 classes (0, 1, 2, ..., 1199)"
