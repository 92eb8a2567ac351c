"""Streams: the order of their rows, what is read for it, and sources that fail."""

import itertools
from collections import Counter

import datasets
import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from helpers import levels, load, numbered_image, png, stacked, write_tar
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data import streams
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.data.batches import iterate_batches
from diffusers_lrlab.data.labels import Example
from diffusers_lrlab.data.loading import TrainingData
from diffusers_lrlab.data.options import BatchLayout
from diffusers_lrlab.data.points import PointTransform
from diffusers_lrlab.data.streams import MOST_LANES, ShardedStream, StreamOrder, choose_held_out


class Shards:
    """Rows `[shard, row]`, which counts those that are read."""

    name = "shards"

    def __init__(self, lengths):
        self.lengths, self.read, self.failures = np.array(lengths, np.int64), Counter(), []

    def open(self, shard, row):
        for number in range(self.lengths[shard]):  # like a tar file, which is read from its start
            if self.failures:
                raise self.failures.pop()
            self.read[shard] += 1
            yield number, Example([float(shard), float(number)], {})


def stream_of(source, num_held_out=0, seed=0, buffer=64):
    train = ShardedStream(source, "x", num_held_out, 0, seed, buffer)
    return TrainingData("shards", train, Batch(torch.empty(0)), "x", "shards", PointTransform(2, "x"))


def seen(source, updates, layout=None, num_workers=0, **options):
    batches = iterate_batches(stream_of(source, **options), layout or BatchLayout(50), 0, updates, num_workers)
    return stacked(batches).int()


def rows_of(order, numbers):
    """(shard, row) of each number."""
    found = []
    for epoch, lane, block, place in zip(*(part.tolist() for part in order.blocks(np.asarray(numbers))), strict=True):
        shards, rows = order.stretch(epoch, lane, block)
        at = order.shuffled(epoch, lane, block, len(rows))[place]
        found.append((int(shards[at]), int(rows[at])))
    return found


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 7)),  # global batch, lanes, block
    epoch=st.integers(0, 10**6),
)
def test_an_epoch_has_every_row_once(lengths, sizes, epoch):
    order = StreamOrder(np.array(lengths, np.int64), 0, *sizes)
    numbers = np.arange(epoch * sum(lengths), (epoch + 1) * sum(lengths))
    assert sorted(rows_of(order, numbers)) == [(shard, row) for shard, size in enumerate(lengths) for row in range(size)]


def test_the_order_is_the_same_on_every_machine():
    """A change would break the resuming of runs: `ORDER_VERSION` has to become another one with it."""
    order = StreamOrder(np.array([3, 2, 4]), 7, 2, 2, 2)
    assert streams.ORDER_VERSION == 1
    expected = [(2, 0), (0, 1), (2, 1), (0, 2), (2, 2), (1, 0), (2, 3), (1, 1), (0, 0)]
    assert rows_of(order, range(9)) == expected


def test_the_first_rows_come_from_most_shards_and_every_epoch_has_another_order():
    epochs = [seen(Shards([500] * 16), range(start, start + 12), buffer=200) for start in (0, 160, 320)]
    assert all(len(epoch[..., 0].unique()) == 16 for epoch in epochs)
    assert not any(torch.equal(*pair) for pair in itertools.combinations(epochs, 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
@pytest.mark.parametrize(("processes", "num_workers"), [(1, 2), (2, 0), (4, 0), (4, 4)])
def test_processes_and_workers_see_the_same_order(processes, num_workers):
    lengths = [7, 30, 1, 12, 45, 8, 20, 0, 5, 16]
    expected = seen(Shards(lengths), range(20), BatchLayout(16))
    for rank in range(processes) if num_workers == 0 else [processes - 1]:
        layout = BatchLayout(8 // processes, 2, processes, rank)
        places = [place for part in layout.positions() for place in part]
        assert torch.equal(seen(Shards(lengths), range(20), layout, num_workers), expected[:, places])


def test_a_process_reads_its_share_only():
    """Of 320 shards, of which those where two lanes meet are read by both."""
    for rank in range(4):
        source = Shards([10] * 320)
        seen(source, range(50), BatchLayout(16, 1, 4, rank))
        assert source.read.total() <= (1 / 4 + 0.05) * 3200


def test_a_resumed_run_reads_a_shard_and_a_block_of_each_lane_again():
    start, batch = 1_000_000 // 64, 64
    source = Shards([1000] * 2000)
    options = {"buffer": 1024, "layout": BatchLayout(batch)}
    resumed = seen(source, range(start, start + 2), **options)
    assert source.read.total() <= MOST_LANES * (1000 + 1024 // MOST_LANES)
    assert torch.equal(resumed[1], seen(Shards([1000] * 2000), range(start + 1, start + 2), **options)[0])


def test_held_out_rows_belong_to_the_data_and_are_never_trained_on():
    lengths = [20, 30, 10, 40]
    held_out = {(shard, int(row)) for shard, rows in choose_held_out(np.array(lengths), 25, 0).items() for row in rows}
    assert len(held_out) == 25
    for seed in (0, 1):
        stream = stream_of(Shards(lengths), 25, seed)
        assert {tuple(row.cell) for row in stream.train.held_out_examples()} == held_out
        trained = seen(Shards(lengths), range(3), BatchLayout(25), num_held_out=25, seed=seed).flatten(0, 1).tolist()
        assert len({tuple(row) for row in trained}) == 75
        assert not held_out & {tuple(row) for row in trained}
    chosen = choose_held_out(np.full(10_000, 100), 256, 0)  # from few shards
    assert sum(map(len, chosen.values())) == 256
    assert 10 <= len(chosen) <= 16


def test_a_source_that_fails_is_an_error_that_can_be_resumed_from():
    source = Shards([30, 20])
    source.failures = [OSError("gone")]
    with pytest.raises(LabError, match=r"Shard \d of 'shards' could not be read \(OSError: gone\)\. Hint: when it can"):
        seen(source, range(1))
    data = stream_of(source)
    source.lengths[:] = 3
    with pytest.raises(LabError, match="has changed since it was counted"):
        next(iterate_batches(data, BatchLayout(50), 0, range(1)))


STREAM = {"streaming": True, "max_train_steps": 1}


def read_levels(folder, **options):
    data = load(folder, **STREAM, **options)
    return data, levels(next(iterate_batches(data, BatchLayout(20), 0, range(1))))


def test_row_groups_of_parquet_are_shards(tmp_path):
    cells = datasets.Dataset.from_dict({"image": [numbered_image(number) for number in range(20)]})
    parquet.write_table(cells.data.table, tmp_path / "train.parquet", row_group_size=6)
    data, read = read_levels(tmp_path)
    assert data.train.lengths.tolist() == [6, 6, 6, 2]
    assert sorted(read) == list(range(20))


def test_shards_of_tar_files_are_counted_once(tmp_path):
    """Those of damaged and unfinished lines are counted again."""
    for shard in range(2):
        members = [(f"{number:04}.png", png(number)) for number in range(10 * shard, 10 * shard + 10)]
        folder = write_tar(tmp_path / "data" / f"train-{shard:05}.tar", members, "w:gz")
    data, read = read_levels(folder, image_column="png")
    assert data.train.lengths.tolist() == [10, 10]
    assert sorted(read) == list(range(20))
    (found,) = (tmp_path / "cache" / "lrlab-shard-rows").iterdir()
    whole = found.read_text()
    found.write_text(whole.replace("10]", "9]"))
    assert read_levels(folder, image_column="png")[0].train.lengths.tolist() == [9, 9]
    for damaged in ("", "[10]", "{}", '[0, "a", [0'):
        found.write_text(damaged)
        assert read_levels(folder, image_column="png")[0].train.lengths.tolist() == [10, 10]
        assert found.read_text().removeprefix(damaged) == whole


def test_damaged_and_different_files_are_named(tmp_path):
    for shard in range(2):
        folder = write_tar(tmp_path / "tars" / f"{shard}.tar", [(f"{number:04}.png", png(number)) for number in range(10)])
    (folder / "1.tar").write_bytes((folder / "1.tar").read_bytes()[:1700])
    with pytest.raises(LabError, match=r"rows of '\S+1.tar' could not be counted \(ReadError: unexpected end of data\)"):
        read_levels(folder, image_column="png")
    folder = tmp_path / "parquet"
    cells = datasets.Dataset.from_dict({"image": [numbered_image(1)]})
    cells.to_parquet(folder / "a.parquet")
    cells.rename_column("image", "picture").to_parquet(folder / "b.parquet")
    with pytest.raises(LabError, match=r"b\.parquet' has no column 'image', .* It has picture\."):
        load(folder, **STREAM)
    (folder / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(LabError, match=r"b\.parquet' could not be read \(ArrowInvalid: .*\)\. Start again"):
        load(folder, **STREAM)


@cases("rows", [0, 4])
def test_empty_shards_are_no_shards(tmp_path, rows):
    kind, folder = datasets.Features({"image": datasets.Image()}), tmp_path / "data"
    for name, number in (("a", 0), ("b", rows)):
        cells = {"image": [numbered_image(each) for each in range(number)]}
        datasets.Dataset.from_dict(cells, features=kind).to_parquet(folder / f"{name}.parquet")
    data = load(folder, **STREAM, num_validation_images=2)
    if rows:
        assert data.train.lengths.tolist() == [4]  # a fifth is none to hold out
    else:
        with pytest.raises(LabError, match="has no images to train on"):
            next(iterate_batches(data, BatchLayout(20), 0, range(1)))
