"""The cost of reading data, and the rows of a stream: decoding, a slow source, workers, order, mixing, resuming.

    python benchmarks/data.py

Ways that are compared take turns in one process, with one thread. Medians are over rounds.
"""

import io
import itertools
import statistics
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import common
import datasets
import numpy as np
import pyarrow.parquet as parquet
import scipy.stats
import torch
from PIL import Image

from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.data.batches import iterate_batches, prefetched
from diffusers_lrlab.data.images import ImageTransform, decode, normalise
from diffusers_lrlab.data.labels import Example
from diffusers_lrlab.data.loading import TrainingData
from diffusers_lrlab.data.options import BatchLayout
from diffusers_lrlab.data.points import PointTransform
from diffusers_lrlab.data.shards import ParquetShards
from diffusers_lrlab.data.streams import ShardedStream

RESOLUTION = 64
parser = common.make_parser(__doc__)
parser.add_argument("--rounds", type=int, default=15, help="of each way of decoding")
parser.add_argument("--images", type=int, default=20, help="decoded in a round")
parser.add_argument("--updates", type=int, default=60, help="of the comparisons that sleep")


class CountingShards:
    """Rows `[shard, row]`, which counts those that are read."""

    name = "counting shards"

    def __init__(self, num_shards, rows):
        self.lengths, self.read = np.full(num_shards, rows), Counter()

    def open(self, shard, row):
        for number in range(self.lengths[shard]):
            self.read[shard] += 1
            yield number, Example([float(shard), float(number)], {})


class SlowPoints(PointTransform):
    """Takes 2 ms for a row."""

    def read(self, cell):
        time.sleep(0.002)
        return super().read(cell)


def stream_of(source, buffer=1000, transform=PointTransform):
    train = ShardedStream(source, "x", 0, 0, seed=0, buffer=buffer)
    return TrainingData("stream", train, Batch(torch.empty(0)), "x", "stream", transform(2, "x"))


def photograph(width, height, number):
    """A JPEG with detail at all scales, like a photograph."""
    rng, pixels = np.random.default_rng(number), np.zeros((height, width, 3))
    for scale in (4, 16, 64, 250):
        noise = Image.fromarray(rng.integers(0, 256, (scale, scale, 3), dtype=np.uint8))
        pixels += np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC)) / scale**0.5
    file = io.BytesIO()
    Image.fromarray((pixels / pixels.max() * 255).astype(np.uint8)).save(file, "jpeg", quality=90)
    return {"bytes": file.getvalue(), "path": None}


def decoding(options, size):
    """Milliseconds per image."""
    cells = [photograph(*size, number) for number in range(options.images)]
    transform = ImageTransform(RESOLUTION, 3, True, False, False, 0)
    ways = {
        "whole": lambda row, cell: transform.augment(normalise(transform.read(cell))[None], [row]),
        "decoder alone": lambda _, cell: decode(cell),
    }
    times = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way in times:
            started = time.perf_counter()
            for row, cell in enumerate(cells):
                ways[way](row, cell)
            times[way].append((time.perf_counter() - started) / len(cells) * 1000)
    for way, milliseconds in times.items():
        ratio = statistics.median(times["whole"]) / statistics.median(milliseconds)
        print(f"| {size[0]}x{size[1]}, {way} | {statistics.median(milliseconds):.3f} | {ratio:.1f} |")


def slow_source(options):
    def source():
        for _ in range(options.updates):
            time.sleep(0.02)
            yield Batch(torch.zeros(1))

    for name, batches in (("one after the other", source()), ("read ahead", prefetched(source()))):
        started = time.perf_counter()
        for _ in batches:
            time.sleep(0.02)
        milliseconds = (time.perf_counter() - started) / options.updates * 1000
        print(f"| source of 20 ms, update of 20 ms, {name} | {milliseconds:.1f} ms |")


def workers(options):
    seconds = {}
    warnings.filterwarnings("ignore", "This DataLoader will create")
    for number in (1, 2, 4):
        data = stream_of(CountingShards(64, 100), transform=SlowPoints)
        batches = iterate_batches(data, BatchLayout(32), 0, range(options.updates + 1), number)
        next(batches)
        started = time.perf_counter()
        for _ in batches:
            pass
        seconds[number] = time.perf_counter() - started
    for number in (2, 4):
        print(f"| {number} workers on a stream, 2 ms an image | {seconds[1] / seconds[number]:.2f} times one |")


def early_rows():
    def rows(shards):
        for shard in shards:
            yield from ({"shard": shard} for _ in range(500))

    stream = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": list(range(16))})
    stream = stream.skip(100).shuffle(seed=0, buffer_size=200)
    for epoch in (0, 1):
        stream.set_epoch(epoch)
        before = {row["shard"] for row, _ in zip(stream, range(600), strict=False)}
        now = Batch.join(list(iterate_batches(stream_of(CountingShards(16, 500), 200), BatchLayout(50), 0, range(12)))).data
        now = {int(shard) for shard in now[:, 0]}
        print(f"| shards in 600 rows of epoch {epoch}, `skip().shuffle()` of datasets | {len(before)} of 16 |")
        print(f"| shards in 600 rows of epoch {epoch} | {len(now)} of 16 |")


def resumed(tiny):
    shards, rows, at = (200, 100, 10_000) if tiny else (2000, 1000, 1_000_000)
    source = CountingShards(shards, rows)
    next(iterate_batches(stream_of(source), BatchLayout(64), 0, range(at // 64, at // 64 + 1)))
    order = stream_of(source).train.order(64)
    print(
        f"| rows read for the first update at row {at:,}: {order.num_lanes} lanes, shards of {rows}, blocks of "
        f"{order.block_rows} | {source.read.total():,} |"
    )


def mixing(tiny):
    """The order of a stream beside that of its source in one file or several."""
    rows, window, classes = (2000, 100, 10) if tiny else (20_000, 1000, 10)
    print(
        f"\n| {rows:,} rows in | buffer | position here, there | most of a class, sorted | shuffled |\n|---|---|---|---|---|"
    )
    for shards, buffer in itertools.product((1, 4, 16, 64), (1000, 10_000)):
        kept, largest = [], {"sorted": [], "shuffled": []}
        for seed in range(2 if tiny else 5):
            train = ShardedStream(CountingShards(shards, rows // shards), "x", 0, 0, seed=seed, buffer=buffer)
            positions = np.array([row.cell[0] * (rows // shards) + row.cell[1] for row in train]).astype(int)
            kept.append(abs(scipy.stats.spearmanr(np.arange(len(positions)), positions).statistic))
            labels = positions * classes // len(positions)
            for name, order in (("sorted", labels), ("shuffled", np.random.default_rng(seed).permutation(labels))):
                windows = order[: len(order) // window * window].reshape(-1, window)
                largest[name].append(max(np.bincount(each).max() for each in windows) / window)
        shares = " | ".join(f"{np.mean(values):.2f}" for values in largest.values())
        print(f"| {shards} shards | {buffer:,} | {np.mean(kept):.2f} | {shares} |", flush=True)


def bytes_of_ranks(options, folder):
    """An epoch read by several ranks from Parquet shards of 10 rows."""
    groups, rows, dimension = (64 if options.tiny else 640), 10, 500
    path = folder / "data.parquet"
    points = np.random.default_rng(0).normal(size=(groups * rows, dimension)).tolist()
    parquet.write_table(datasets.Dataset.from_dict({"x": points}).data.table, path, row_group_size=rows)
    read = Counter()

    class CountingFile(io.FileIO):
        def read(self, size=-1):
            found = super().read(size)
            read["bytes"] += len(found)
            return found

    datasets.utils.file_utils.xopen = lambda path, mode: CountingFile(path)
    source = ParquetShards("parquet", [str(path)], "x", None)

    def bytes_of(rank, ranks):
        read.clear()
        train = ShardedStream(source, "x", 0, 0, seed=0, buffer=1000)
        data = TrainingData("points", train, Batch(torch.empty(0)), "x", "points", PointTransform(dimension, "x"))
        for _ in iterate_batches(data, BatchLayout(64 // ranks, 1, ranks, rank), 0, range(groups * rows // 64)):
            pass
        return read["bytes"]

    whole = bytes_of(0, 1)
    print(f"| bytes read in an epoch by one process, of the file's | {whole / path.stat().st_size:.3f} |")
    for ranks in (2, 4):
        shares = [f"{bytes_of(rank, ranks) / whole:.3f}" for rank in range(ranks)]
        print(f"| bytes read by each of {ranks} processes, of those of one | {', '.join(shares)} |")


def main():
    options = common.parse(parser, rounds=1, images=2, updates=3)
    torch.set_num_threads(1)
    print(common.machine(), end="\n\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"| JPEG to {RESOLUTION} | ms an image | times as fast |\n|---|---|---|")
        for size in ((500, 375), (1024, 768)):
            decoding(options, size)
        print("\n| what | measured |\n|---|---|")
        slow_source(options)
        workers(options)
        early_rows()
        resumed(options.tiny)
        bytes_of_ranks(options, folder)
        mixing(options.tiny)


if __name__ == "__main__":
    main()
