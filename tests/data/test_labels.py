"""Class labels: the column, the classes, dropped labels, and those of samples."""

from functools import partial

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
    return [b"damaged" if row in CORRUPT else png(row) for row in range(len(labels))]


def rows_of(labels, feature):
    features = datasets.Features({"image": datasets.Image(), "label": feature})
    cells = [{"bytes": content, "path": None} for content in contents(labels)]
    return datasets.Dataset.from_dict({"image": cells, "label": labels}, features=features)


def write_parquet(folder, labels, feature=WHOLE):
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


write_compressed = partial(write_tars, mode="w:gz")  # which is read in order


def load(folder, column="label", **options):
    return load_data(config(folder, label_column=column, skip_corrupt_images=True, **options))


def batches_of(data, layout=None, updates=range(6), num_workers=0):
    return list(iterate_batches(data, layout or BatchLayout(8), 0, updates, num_workers))


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
    classes = data.classes
    assert (classes.names, classes.null_label, classes.num_embeddings) == (("0", "1", "2"), None, 3)
    batches = batches_of(data)
    for batch in [*batches, data.held_out, data.random_sample(7, 20)]:
        assert batch.conditions["class_labels"].tolist() == [level % 3 for level in levels(batch)]
        assert not {*CORRUPT} & {*levels(batch)}
    plain = load(tmp_path / "data", None, num_validation_images=4, **{**options, "num_classes": None})
    assert (plain.held_out.conditions, plain.classes) == ({}, None)
    assert plain.fingerprint != data.fingerprint
    for one, other in zip([*batches, data.held_out], [*batches_of(plain), plain.held_out], strict=True):
        assert torch.equal(one.data, other.data)


@cases("way", ["memory", "stream of parquet", "stream of saved", "stream of tars"])
def test_the_fingerprint_covers_the_labels(tmp_path, way):
    write, column, options = WAYS[way]
    write(tmp_path / "data", INTEGERS)
    write(tmp_path / "others", [0, *INTEGERS[:-1]])
    names = ("data", "others", "data")
    found = [load(tmp_path / name, column, **{**options, "num_classes": 3}).fingerprint for name in names]
    assert found[0] == found[2] != found[1]


@cases("options", [{}, STREAM], ids=["memory", "stream"])
def test_a_class_label_names_and_counts_its_classes(tmp_path, options):
    write_parquet(tmp_path / "data", [0] * 12 + [1] * 12, NAMED)
    classes = load(tmp_path / "data", label_dropout=0.5, **options).classes
    assert classes.names == NAMES
    assert classes.counts == ((1, 1, 1) if options else (12, 12, 0))
    assert (classes.null_label, classes.num_embeddings) == (3, 4)
    assert load(tmp_path / "data", num_classes=5, **options).classes.names == (*NAMES, "3", "4")
    with pytest.raises(LabError, match="2.0 has no effect without --label_dropout above 0"):
        load(tmp_path / "data", guidance_scale=2.0, **options)
    with pytest.raises(LabError, match="--num_classes 2: must be 3 or more, as 'label' has, got 2. Hint: leave it out"):
        load(tmp_path / "data", num_classes=2, **options)


@cases(
    ("column", "got", "options"),
    [("lable", "'lable'", {}), ("image", "'image' of type", STREAM), ("caption", "'caption' of type string", {})],
)
def test_a_column_without_whole_numbers(tmp_path, column, got, options):
    rows = rows_of(INTEGERS, WHOLE).add_column("caption", ["grey"] * NUM_ROWS)
    rows.to_parquet(tmp_path / "data" / "train.parquet")
    told = rf"--label_column '{column}': must be a column of whole numbers or class labels, got {got}.*label \(int64\)"
    with pytest.raises(LabError, match=told):
        load(tmp_path / "data", column, **options)


@cases(("write", "column", "options"), [way for way in WAYS.values() if way[2].get("in_memory_limit_mb") != 0])
@cases(("bad", "more"), [(-1, ""), (3, ", or raise --num_classes")])
def test_a_label_that_is_no_class_is_found_when_data_are_loaded(tmp_path, write, column, options, bad, more):
    write(tmp_path / "data", [*INTEGERS[:-2], bad, 0])
    told = rf"{column}={bad} of .*row.*: must be a class in \[0, 2\], got {bad}\. Hint: correct or remove the row{more}\."
    if options.get("streaming") and bad > 0:  # an earlier start has counted the rows, with another number of classes
        load(tmp_path / "data", column, num_validation_images=0, **{**options, "num_classes": 8})
    with pytest.raises(LabError, match=told):
        load(tmp_path / "data", column, num_validation_images=0, **{"num_classes": 3, **options})


@cases(
    ("write", "labels", "options", "told"),
    [
        (write_parquet, [None, *INTEGERS[1:]], {}, "label=None of row 0: must be a label, a whole number from 0"),
        (write_parquet, [*INTEGERS[1:], 5_000_000], {}, "'label': must be a column with labels below 1,000,000, got"),
        (write_parquet, INTEGERS, STREAM, "--num_classes None: must be given for a stream .* labels of"),
        (
            write_compressed, [*INTEGERS[:-1], "cat"], {"image_column": "png", "num_classes": 3, **STREAM},
            r"rows of '\S+train-00000\.tar' could not be counted \(ValueError: .*b'cat'\)",
        ),
    ],
)  # fmt: skip
def test_other_labels_that_cannot_be_used_are_named(tmp_path, write, labels, options, told):
    write(tmp_path / "data", labels)
    with pytest.raises(LabError, match=told):
        load(tmp_path / "data", "label" if write is write_parquet else "cls", **options)


@pytest.mark.slow
@cases("options", [{}, {"in_memory_limit_mb": 0}, {**STREAM, "num_classes": 3}], ids=["memory", "lazy", "stream"])
@cases(("processes", "accumulation", "micro_batch"), [(1, 4, 2), (2, 2, 2)])
def test_dropped_labels_do_not_depend_on_the_layout_or_the_start(tmp_path, options, processes, accumulation, micro_batch):
    write_parquet(tmp_path / "data", INTEGERS)
    data = load(tmp_path / "data", label_dropout=0.3, num_validation_images=4, **options)
    whole = batches_of(data, updates=range(9))
    pairs = [pair for batch in whole for pair in zip(batch.conditions["class_labels"].tolist(), levels(batch), strict=True)]
    assert 0 < sum(label == 3 for label, _ in pairs) < len(pairs)
    assert all(label in (3, level % 3) for label, level in pairs)
    for rank in range(processes):
        layout = BatchLayout(micro_batch, accumulation, processes, rank)
        places = torch.tensor([place for positions in layout.positions() for place in positions])
        for batch, expected in zip(batches_of(data, layout, range(5, 9), num_workers=rank), whole[5:], strict=True):
            assert torch.equal(batch.conditions["class_labels"], expected.conditions["class_labels"][places])
            assert torch.equal(batch.data, expected.data[places])
    assert 3 not in data.held_out.conditions["class_labels"]


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


@cases("num", [1, 7, 100, 1000])
def test_measured_samples_have_the_proportions_of_the_data(num):
    counts = torch.tensor([100, 300, 0, 600])
    labels = Classes(("a", "b", "c", "d"), tuple(counts.tolist()), 0.0, 0).to_measure(num)
    assert len(labels) == num
    assert (torch.bincount(labels, minlength=4) - counts * num / 1000).abs().max() < 1
    assert num < 100 or not torch.equal(labels, labels.sort()[0])


def test_shown_samples_are_ordered_by_class_and_some_of_many():
    few, many = Classes(NAMES, (5, 5, 5), 0.0, 0), Classes(tuple(map(str, range(1000))), (1,) * 1000, 0.0, 0)
    assert [few.to_show(num).tolist() for num in (2, 3, 8)] == [[0, 1], [0, 1, 2], [0, 0, 1, 1, 2, 2]]
    assert few.to_show(11).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert many.to_show(4).tolist() == [0, 250, 500, 750]


def test_classes_in_words():
    assert describe_classes(NAMES) == "3 classes (cat, dog, fox)"
    assert describe_classes([str(number) for number in range(1200)]) == "1,200 classes (0, 1, 2, ..., 1199)"
