"""Which images an update sees, whatever the processes, micro-batches, workers, memory and interruptions."""

import dataclasses
import pickle

import datasets
import numpy as np
import pytest
import torch
from helpers import config, image_folder, levels, load, load_data, stacked
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.streams import random_states
from diffusers_lrlab.data.batch import Batch, to_device
from diffusers_lrlab.data.batches import RowOrder, iterate_batches, num_workers
from diffusers_lrlab.data.images import ImageTransform
from diffusers_lrlab.data.loading import TrainingData
from diffusers_lrlab.data.options import BatchLayout

# (processes, accumulation, micro-batch) that all make a global batch of 8
LAYOUTS = [(1, 1, 8), (1, 4, 2), (2, 2, 2), (4, 2, 1)]
NUM_ROWS = 21  # three updates of 8 do not fit into an epoch


def in_memory():
    """Images that are known by their level, without a dataset."""
    pixels = (torch.arange(NUM_ROWS) / 127.5 - 1)[:, None, None, None].expand(-1, 1, 4, 4)
    transform = ImageTransform(4, 1, center_crop=True, random_flip=False, eight_bit=False, seed=0)
    return TrainingData("levels", None, Batch(torch.empty(0)), "image", "levels", transform, Batch(pixels))


@pytest.fixture(scope="module")
def stream_folder(tmp_path_factory):
    """The same images as a parquet folder, in two files, whose order a stream shuffles too."""
    folder = tmp_path_factory.mktemp("stream") / "parquet"
    rows = [Image.new("L", (4, 4), level) for level in range(NUM_ROWS)]
    for part, cells in enumerate((rows[:10], rows[10:])):
        datasets.Dataset.from_dict({"image": cells}).to_parquet(folder / f"train-{part:05}-of-00002.parquet")
    return folder


@pytest.fixture(params=["memory", "stream"])
def make_data(request, stream_folder):
    """Makes data anew, as every process and every start does."""
    if request.param == "memory":
        return in_memory
    return lambda: load(stream_folder, streaming=True, max_train_steps=1, stream_shuffle_buffer=5)


def batch_levels(data, layout, updates, **options):
    """The levels of every update's images, for one process."""
    return [levels(images) for images in iterate_batches(data, layout, 0, updates, **options)]


def global_batches(make_data, processes, accumulation, micro_batch, updates):
    """The levels at every place of the global batches, put together from all processes."""
    size = processes * accumulation * micro_batch
    batches = [[None] * size for _ in updates]
    for rank in range(processes):
        layout = BatchLayout(micro_batch, accumulation, processes, rank)
        places = [place for positions in layout.positions() for place in positions]
        for batch, own in zip(batches, batch_levels(make_data(), layout, updates), strict=True):
            for place, level in zip(places, own, strict=True):
                assert batch[place] is None, "two processes take the same place"
                batch[place] = level
    return batches


@pytest.mark.parametrize("batch_size", [4, NUM_ROWS])
def test_every_epoch_sees_each_image_once_in_an_order_of_its_own(make_data, batch_size):
    num_epochs = 4
    updates = range(num_epochs * NUM_ROWS // batch_size)
    row = [level for batch in batch_levels(make_data(), BatchLayout(batch_size), updates) for level in batch]
    epochs = [row[start : start + NUM_ROWS] for start in range(0, len(row) - NUM_ROWS + 1, NUM_ROWS)]
    assert len(epochs) >= num_epochs - 1
    assert all(sorted(epoch) == list(range(NUM_ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_the_global_batch_does_not_depend_on_the_layout(make_data, layout):
    updates = range(7)  # more than two epochs
    assert global_batches(make_data, *layout, updates) == global_batches(make_data, *LAYOUTS[0], updates)


@cases("start", [0, 1, 4, 8])
def test_a_resumed_run_sees_the_same_batches(make_data, start):
    layout = BatchLayout(2, accumulation=2, num_processes=2, rank=1)
    whole = batch_levels(make_data(), layout, range(9))
    assert batch_levels(make_data(), layout, range(start, 9)) == whole[start:]


def test_many_images_that_are_not_in_memory_are_decoded_by_the_free_cores(monkeypatch):
    monkeypatch.setattr("diffusers_lrlab.data.batches.available_cores", lambda: 8)
    on_disk = dataclasses.replace(in_memory(), in_memory=None)
    assert [num_workers(on_disk, None, num_seen) for num_seen in (4999, 5000)] == [0, 7]
    assert [num_workers(data, 2, 10**9) for data in (on_disk, in_memory())] == [2, 0]


@pytest.fixture(scope="module")
def oblong_folder(tmp_path_factory):
    """Images that differ in every pixel, so that crops and flips show."""
    folder = tmp_path_factory.mktemp("oblong") / "images"
    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (NUM_ROWS, 4, 7), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    return folder


@pytest.mark.slow
@cases("workers", [0, 2])
@cases("options", [{}, {"random_flip": True}, {"random_flip": True, "center_crop": True}])
def test_lazy_reading_gives_the_images_of_memory_and_resumes(oblong_folder, options, workers):
    layout = BatchLayout(4, accumulation=2)
    memory, lazy = load(oblong_folder, **options), load(oblong_folder, in_memory_limit_mb=0, **options)
    expected = stacked(iterate_batches(memory, layout, 0, range(6)))
    assert expected.shape == (6, 8, 1, 4, 4)
    assert torch.equal(expected, stacked(iterate_batches(lazy, layout, 0, range(6), workers)))
    assert torch.equal(expected[4:], stacked(iterate_batches(lazy, layout, 0, range(4, 6), workers)))


def test_an_image_is_augmented_anew_in_every_epoch(oblong_folder):
    batches = [*iterate_batches(load(oblong_folder, random_flip=True), BatchLayout(NUM_ROWS), 0, range(4))]
    rows = RowOrder(NUM_ROWS, 0).rows(BatchLayout(4 * NUM_ROWS).image_numbers(0)).reshape(4, -1)
    views = [images.data[own.tolist().index(0)] for images, own in zip(batches, rows, strict=True)]
    assert len({tuple(view.flatten().tolist()) for view in views}) > 1


@pytest.mark.parametrize("limit", [1024, 0])
def test_a_batch_larger_than_the_data_is_an_error(tmp_path, limit):
    data = load(image_folder(tmp_path / "images", count=7), in_memory_limit_mb=limit)
    with pytest.raises(LabError, match=r"batch of 8 images .* training set of 7\. Use at most --train_batch_size 1"):
        next(iterate_batches(data, BatchLayout(2, accumulation=2, num_processes=2), 0, range(1)))
    assert sorted(levels(next(iterate_batches(data, BatchLayout(7), 0, range(1))))) == list(range(7))


LAZY, STREAM = {"in_memory_limit_mb": 0}, {"streaming": True, "max_train_steps": 1}


@cases(("options", "workers"), [({}, 0), (LAZY, 0), (LAZY, 2), (STREAM, 0)])
def test_the_global_random_generators_are_left_alone(oblong_folder, options, workers):
    resolved = config(oblong_folder, random_flip=True, num_validation_images=2, **options)
    states = random_states()
    list(iterate_batches(load_data(resolved), BatchLayout(4), 0, range(6), workers))
    assert random_states() == states


@st.composite
def batches(draw, least=0):
    """Rows that are known by a number, which data and conditions have."""
    rows = torch.tensor(draw(st.lists(st.integers(0, 255), min_size=least, max_size=12)), dtype=torch.int64)
    data = rows[:, None].expand(-1, draw(st.integers(1, 3)))
    data = data.to(torch.uint8) if draw(st.booleans()) else data.float()
    told = draw(st.sets(st.sampled_from(("class_labels", "encoder_hidden_states"))))
    shapes = {"class_labels": rows, "encoder_hidden_states": rows[:, None, None].expand(-1, 2, 2).float()}
    return Batch(data, {keyword: shapes[keyword] for keyword in sorted(told)})


def assert_same(first, second):
    assert first.conditions.keys() == second.conditions.keys()
    pairs = [(first.data, second.data), *((first.conditions[each], second.conditions[each]) for each in first.conditions)]
    for one, other in pairs:
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@given(batch=batches(least=1), cuts=st.lists(st.integers(0, 12), max_size=4))
def test_the_slices_of_a_batch_joined_are_the_batch(batch, cuts):
    ends = [0, *sorted(min(cut, len(batch)) for cut in cuts), len(batch)]
    parts = [batch[slice(*part)] for part in zip(ends, ends[1:], strict=False)]
    assert sum(map(len, parts)) == len(batch)
    assert_same(Batch.join(parts), batch)


@given(batch=batches(), numbers=st.data())
def test_chosen_rows_keep_their_conditions(batch, numbers):
    order = numbers.draw(st.permutations(range(len(batch))))
    for rows in (order[:9], torch.tensor(order, dtype=torch.int64), batch.data[:, 0] > 9):
        chosen = batch[rows]
        assert torch.equal(chosen.data, batch.data[rows])
        for keyword, values in chosen.conditions.items():
            assert torch.equal(values, batch.conditions[keyword][rows])


@given(batch=batches())
def test_moving_changes_nothing_but_the_levels(batch):
    assert_same(batch.to("cpu"), batch)
    assert_same(pickle.loads(pickle.dumps(batch)), batch)  # to the processes of a loader and of a study
    moved = to_device(batch, torch.device("cpu"))
    assert moved.data.dtype == torch.float32
    assert_same(moved, batch.normalised())
    assert_same(moved.with_data(batch.data), batch)


def test_a_batch_is_no_sequence_of_rows():
    with pytest.raises(TypeError, match="a slice or several row numbers"):
        list(Batch(torch.zeros(3, 2)))
