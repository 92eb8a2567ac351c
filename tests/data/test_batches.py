"""Which images an update sees, whatever the processes, micro-batches, workers, memory and interruptions."""

import dataclasses
import random

import datasets
import numpy as np
import pytest
import torch
from helpers import config, image_folder, levels, load, load_data, stacked
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.streams import block_randn, noise_block_images, stream_generator, stream_seed, stream_uniform
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.data.batches import RowOrder, iterate_batches, num_workers
from diffusers_lrlab.data.images import ImageTransform
from diffusers_lrlab.data.loading import TrainingData
from diffusers_lrlab.data.options import BatchLayout

# (processes, accumulation, micro-batch) that all make a global batch of 8
LAYOUTS = [(1, 1, 8), (1, 2, 4), (1, 4, 2), (2, 1, 4), (2, 2, 2), (4, 2, 1), (8, 1, 1)]
NUM_ROWS = 21  # three updates of 8 do not fit into an epoch


def in_memory(num_rows=NUM_ROWS):
    """Images that are known by their level, without a dataset."""
    pixels = (torch.arange(num_rows) / 127.5 - 1)[:, None, None, None].expand(-1, 1, 4, 4)
    transform = ImageTransform(4, 1, center_crop=True, random_flip=False, eight_bit=False, seed=0)
    return TrainingData("levels", None, Batch(torch.empty(0)), "image", "levels", transform, Batch(pixels))


@pytest.fixture(scope="module")
def stream_folder(tmp_path_factory):
    """The same images as a parquet folder, in two files, whose order a stream shuffles too."""
    folder = tmp_path_factory.mktemp("stream") / "parquet"
    folder.mkdir()
    rows = [Image.new("L", (4, 4), level) for level in range(NUM_ROWS)]
    for part, cells in enumerate((rows[:10], rows[10:])):
        dataset = datasets.Dataset.from_dict({"image": cells}).cast_column("image", datasets.Image())
        dataset.to_parquet(folder / f"train-{part:05}-of-00002.parquet")
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


# --- the row of images -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 4, 8, NUM_ROWS])
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


@given(processes=st.integers(1, 5), accumulation=st.integers(1, 5), micro_batch=st.integers(1, 9), update=st.integers(0, 50))
def test_layouts_share_out_the_numbers_of_an_update(processes, accumulation, micro_batch, update):
    layouts = [BatchLayout(micro_batch, accumulation, processes, rank) for rank in range(processes)]
    size = processes * accumulation * micro_batch
    assert all(layout.global_batch == size for layout in layouts)
    assert all(len(layout.positions()) == accumulation for layout in layouts)
    numbers = [number for layout in layouts for number in layout.image_numbers(update)]
    assert sorted(numbers) == list(range(update * size, (update + 1) * size))


@given(num_rows=st.integers(1, 50), seed=st.integers(0, 10), numbers=st.lists(st.integers(0, 400), max_size=20))
def test_a_row_depends_on_nothing_that_was_asked_before(num_rows, seed, numbers):
    order = RowOrder(num_rows, seed)
    assert [order.rows([number])[0] for number in numbers] == RowOrder(num_rows, seed).rows(numbers).tolist()
    first_epoch = order.rows(list(range(num_rows))).tolist()
    assert sorted(first_epoch) == list(range(num_rows))


@pytest.mark.parametrize("start", range(9))
def test_a_resumed_run_sees_the_same_batches(make_data, start):
    layout = BatchLayout(2, accumulation=2, num_processes=2, rank=1)
    whole = batch_levels(make_data(), layout, range(9))
    assert batch_levels(make_data(), layout, range(start, 9)) == whole[start:]


def test_many_images_that_are_not_in_memory_are_decoded_by_the_free_cores(monkeypatch):
    monkeypatch.setattr("diffusers_lrlab.data.batches.available_cores", lambda: 8)
    on_disk = dataclasses.replace(in_memory(), in_memory=None)
    assert [num_workers(on_disk, None, num_seen) for num_seen in (4999, 5000)] == [0, 7]
    assert [num_workers(data, 2, 10**9) for data in (on_disk, in_memory())] == [2, 0]


# --- memory, files and workers ---------------------------------------------------------------------------------------


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
@cases(
    "options",
    [{}, {"center_crop": True}, {"random_flip": True}, {"random_flip": True, "center_crop": True}],
    ids=["crop", "centre", "crop and flip", "centre and flip"],
)
def test_lazy_reading_gives_the_images_of_memory(oblong_folder, options, workers):
    layout = BatchLayout(4, accumulation=2)
    memory, lazy = load(oblong_folder, **options), load(oblong_folder, in_memory_limit_mb=0, **options)
    assert memory.in_memory is not None
    assert lazy.in_memory is None
    expected = stacked(iterate_batches(memory, layout, 0, range(6)))
    assert expected.shape == (6, 8, 1, 4, 4)
    assert torch.equal(expected, stacked(iterate_batches(lazy, layout, 0, range(6), workers)))


@pytest.mark.parametrize("workers", [0, 2])
def test_lazy_reading_resumes_too(oblong_folder, workers):
    data = load(oblong_folder, in_memory_limit_mb=0, random_flip=True)
    whole = list(iterate_batches(data, BatchLayout(5), 0, range(9)))
    resumed = list(iterate_batches(data, BatchLayout(5), 0, range(6, 9), workers))
    assert torch.equal(stacked(whole[6:]), stacked(resumed))


def test_an_image_is_augmented_anew_in_every_epoch(oblong_folder):
    data = load(oblong_folder, random_flip=True)
    batches = iterate_batches(data, BatchLayout(NUM_ROWS), 0, range(4))
    orders = [
        RowOrder(NUM_ROWS, 0).rows(list(range(epoch * NUM_ROWS, (epoch + 1) * NUM_ROWS))).tolist() for epoch in range(4)
    ]
    views = [images.data[order.index(0)] for images, order in zip(batches, orders, strict=True)]
    assert len({tuple(view.flatten().tolist()) for view in views}) > 1


@pytest.mark.parametrize("limit", [1024, 0])
def test_a_batch_larger_than_the_data_is_an_error(tmp_path, limit):
    data = load(image_folder(tmp_path / "images", count=7), in_memory_limit_mb=limit)
    with pytest.raises(
        LabError, match=r"batch of 8 images .* larger than the training set of 7\. Use at most --train_batch_size 1"
    ):
        next(iterate_batches(data, BatchLayout(2, accumulation=2, num_processes=2), 0, range(1)))
    assert sorted(levels(next(iterate_batches(data, BatchLayout(7), 0, range(1))))) == list(range(7))


@cases(
    ("options", "workers"),
    [
        ({}, 0),
        ({"in_memory_limit_mb": 0}, 0),
        ({"in_memory_limit_mb": 0}, 2),
        ({"streaming": True, "max_train_steps": 1}, 0),
    ],
    ids=["memory", "lazy", "workers", "stream"],
)
def test_the_global_random_generators_are_left_alone(oblong_folder, options, workers):
    resolved = config(oblong_folder, random_flip=True, num_validation_images=2, **options)
    seed_all()
    expected = draw_all()
    seed_all()
    list(iterate_batches(load_data(resolved), BatchLayout(4), 0, range(6), workers))
    assert draw_all() == expected


def seed_all():
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)


def draw_all():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()


# --- streams of random numbers ---------------------------------------------------------------------------------------


@settings(deadline=None)
@given(start=st.integers(0, 300), length=st.integers(1, 150), update=st.integers(0, 10**9))
def test_noise_of_positions_is_a_slice_of_that_of_the_whole_batch(start, length, update):
    whole = block_randn(7, "noise", update, range(450), (1, 2, 2), "cpu")
    part = block_randn(7, "noise", update, range(start, start + length), (1, 2, 2), "cpu")
    assert part.shape == (length, 1, 2, 2)
    assert torch.equal(part, whole[start : start + length])


def test_noise_differs_by_place_update_seed_and_purpose():
    draws = [
        block_randn(*key, range(3 * noise_block_images((4,))), (4,), "cpu")
        for key in [(0, "noise", 0), (0, "noise", 1), (1, "noise", 0), (0, "validation", 0)]
    ]
    images = torch.cat(draws)
    assert len({tuple(image) for image in images.tolist()}) == len(images)
    assert abs(images.mean()) < 0.1
    assert abs(images.std() - 1) < 0.1


def test_seeds_are_the_same_on_every_machine():
    """The first 63 bits of blake2b("0/order/3"), written out: a change would break the resuming of older runs."""
    assert stream_seed(0, "order", 3) == 5486038029339273987
    assert torch.randperm(5, generator=stream_generator(0, "order", 3)).tolist() == [3, 2, 4, 1, 0]


def test_uniform_numbers_are_uniform():
    counts, _ = np.histogram([stream_uniform(0, "flip", number) for number in range(10_000)], bins=10, range=(0, 1))
    assert counts.min() > 880
    assert counts.max() < 1120
