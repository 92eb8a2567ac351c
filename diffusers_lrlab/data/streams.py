"""Streams: the row and shard of each image number of a run, and reading them.

The positions of an update are divided among virtual lanes. The shards of an epoch, in the order of that epoch, are
concatenated and cut into one stretch per lane. A lane reads its stretch block by block, and the rows of a block in random
order. All of this follows from seed and image number, so the order is the same for any number of processes and workers; each
reads only its own lanes, and a resumed run opens one shard per lane.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch

from ..core.errors import LabError, how_to_continue
from ..core.streams import stream_generator, stream_seed
from .labels import Example

# Saved in checkpoints, which can only be resumed in the same order.
ORDER_VERSION = 1
MOST_LANES = 32  # each keeps a shard open; a process or worker without a lane reads nothing
_HELD_OUT_SHARDS = 16  # held-out rows come from at least this many shards, if there are as many


class Source(Protocol):
    """Access to shards; the sources are in `shards.py`."""

    name: str  # for errors
    lengths: np.ndarray  # rows of each shard, int64
    fingerprint: str  # changes with the rows, as far as known without reading them; the same for a copy of the files

    def open(self, shard: int, row: int) -> Iterator[tuple[int, Example]]:
        """Row numbers and examples of a shard, from `row` or an earlier row on. The iterator may be left unfinished."""


@dataclass(frozen=True)
class StreamOrder:
    """The row of every image of a run."""

    lengths: np.ndarray  # training rows of each shard
    seed: int
    global_batch: int
    num_lanes: int
    block_rows: int

    @cached_property
    def num_rows(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def _period(self) -> int:
        """Images after which the lanes repeat: whole updates, so that a process has the same lanes in all of them."""
        return self.global_batch * -(-self.num_lanes // self.global_batch)

    @cached_property
    def _first(self) -> np.ndarray:
        """The first position of each lane in a period, and the end."""
        return -(-np.arange(self.num_lanes + 1) * self._period // self.num_lanes)

    def lanes(self, numbers: np.ndarray) -> np.ndarray:
        """The lane of each image."""
        return numbers % self._period * self.num_lanes // self._period

    def _before(self, number: np.ndarray | int) -> np.ndarray:
        """The number of images of each lane with lower image numbers."""
        periods, position = np.divmod(np.asarray(number)[..., None], self._period)
        size = np.diff(self._first)
        return periods * size + np.clip(position - self._first[:-1], 0, size)

    def blocks(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Epoch, lane, block in the lane's stretch, and index in the block, of each image."""
        epochs, lanes = numbers // self.num_rows, self.lanes(numbers)
        seen = self._before(numbers) - self._before(epochs * self.num_rows)
        blocks, indices = np.divmod(seen[np.arange(len(numbers)), lanes], self.block_rows)
        return epochs, lanes, blocks, indices

    def stretch(self, epoch: int, lane: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Shards of a block's rows, and row numbers among the training rows of the shard, in the order of the stretch."""
        sizes = self._before((epoch + 1) * self.num_rows) - self._before(epoch * self.num_rows)
        start = block * self.block_rows
        along = int(sizes[:lane].sum()) + np.arange(start, min(start + self.block_rows, int(sizes[lane])))
        shards, ends = _shard_order(self.seed, epoch, self.lengths.tobytes())
        index = np.searchsorted(ends, along, side="right")
        return shards[index], along - ends[index] + self.lengths[shards[index]]

    def shuffled(self, epoch: int, lane: int, block: int, size: int) -> list[int]:
        """The order of the rows of a block."""
        generator = stream_generator(self.seed, "stream-block", epoch, lane, block)
        return torch.randperm(size, generator=generator).tolist()


@lru_cache(maxsize=4)
def _shard_order(seed: int, epoch: int, lengths: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The shards of an epoch in order, and the end of each when they are concatenated."""
    sizes = np.frombuffer(lengths, np.int64)
    shards = torch.randperm(len(sizes), generator=stream_generator(seed, "stream-shards", epoch)).numpy()
    return shards, sizes[shards].cumsum()


def choose_held_out(lengths: np.ndarray, num: int, seed: int) -> dict[int, np.ndarray]:
    """Rows to hold out, in order, by shard; from some of the shards, so that few must be read."""
    if not len(lengths):
        return {}
    ranked = sorted(range(len(lengths)), key=lambda shard: stream_seed(seed, "held-out-shard", shard))
    rows_so_far = lengths[ranked].cumsum()
    most = max(_HELD_OUT_SHARDS, int(np.searchsorted(rows_so_far, 5 * num)) + 1)
    shards = np.array(sorted(ranked[:most]))
    chosen = torch.randperm(int(lengths[shards].sum()), generator=stream_generator(seed, "held-out"))[:num].sort()[0].numpy()
    ends = lengths[shards].cumsum()
    index = np.searchsorted(ends, chosen, side="right")
    rows = chosen - ends[index] + lengths[shards[index]]
    return {int(shard): rows[shards[index] == shard] for shard in np.unique(shards[index])}


@contextmanager
def read_errors_explained(failure: str, remedy: str) -> Iterator[None]:
    """Makes a `LabError` of any error of a source, whose network errors `datasets` has already retried."""
    try:
        yield
    except LabError:
        raise
    except Exception as error:  # of fsspec, pyarrow, httpx, tarfile and the system
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise LabError(f"{failure} ({reason}). {remedy}") from error


class ShardReader:
    """Reads rows of shards in ascending order, with an open shard for each key."""

    def __init__(self, source: Source):
        self.source = source
        self._open: dict[Any, tuple[int, int, Iterator[tuple[int, Example]]]] = {}  # by key: shard, next row, the rest

    def read(self, key: Any, shard: int, rows: list[int]) -> list[Example]:
        """The examples of ascending rows."""
        failure, remedy = f"Shard {shard} of {self.source.name!r} could not be read", how_to_continue()
        with read_errors_explained(failure, f"Hint: when it can be read again, {remedy}."):
            return self._advance(key, shard, rows)

    def _advance(self, key: Any, shard: int, rows: list[int]) -> list[Example]:
        at = self._open.pop(key, None)
        examples = at[2] if at and at[0] == shard and at[1] <= rows[0] else self.source.open(shard, rows[0])
        found: list[Example] = []
        for row, example in examples:
            if row != rows[len(found)]:
                continue
            found.append(example._replace(cell=fetched(example.cell)))
            if len(found) == len(rows):
                if row + 1 < self.source.lengths[shard]:
                    self._open[key] = (shard, row + 1, examples)
                return found
        raise LabError(
            f"Shard {shard} of {self.source.name!r} ends before its row {rows[len(found)]}, so it has changed since it was "
            "counted. Start a new run."
        )


def fetched(cell: Any) -> Any:
    """A cell with the bytes of a remote image, so that a network failure is not taken for a damaged image."""
    if isinstance(cell, dict) and cell.get("bytes") is None and "://" in (cell.get("path") or ""):
        from datasets.utils.file_utils import xopen

        with xopen(cell["path"], "rb") as file:
            return {**cell, "bytes": file.read()}
    return cell


class BlockReader:
    """Reads examples by their image number in the run, one block of each lane at a time."""

    def __init__(self, stream: "ShardedStream", global_batch: int):
        self.order, self.held_out = stream.order(global_batch), stream.held_out
        self.shards = ShardReader(stream.source)
        self._blocks: dict[int, tuple[tuple[int, int], list[Example]]] = {}  # by lane: epoch and block, and its examples

    def find(self, numbers: list[int]) -> Iterator[tuple[list[Example], int]]:
        """For each image number, the examples of its block in order, and its index among them."""
        found = self.order.blocks(np.asarray(numbers, np.int64))
        for epoch, lane, block, index in zip(*(part.tolist() for part in found), strict=True):
            if self._blocks.get(lane, (None,))[0] != (epoch, block):
                self._blocks[lane] = ((epoch, block), self._read(epoch, lane, block))
            yield self._blocks[lane][1], index

    def _read(self, epoch: int, lane: int, block: int) -> list[Example]:
        shards, rows = self.order.stretch(epoch, lane, block)
        examples: list[Example] = []
        for shard, group in groupby(zip(shards.tolist(), rows.tolist(), strict=True), key=lambda each: each[0]):
            kept = np.array([row for _, row in group])
            if shard in self.held_out:
                kept = np.delete(np.arange(self.shards.source.lengths[shard]), self.held_out[shard])[kept]
            examples += self.shards.read(lane, shard, kept.tolist())
        return [examples[row] for row in self.order.shuffled(epoch, lane, block, len(examples))]


class ShardedStream:
    """The training rows of a source. Iteration gives those of an epoch, mixed across the shards as in training."""

    def __init__(self, source: Source, column: str, num_held_out: int, held_out_seed: int, seed: int, buffer: int):
        self.source, self.column, self.seed, self.buffer = source, column, seed, buffer
        self.held_out = choose_held_out(source.lengths, num_held_out, held_out_seed)
        self.lengths = source.lengths.copy()
        for shard, rows in self.held_out.items():
            self.lengths[shard] -= len(rows)

    @property
    def facts(self) -> dict[str, int]:
        """For checkpoints: the order of images follows from these facts, the seed and the batch size."""
        return {"order": ORDER_VERSION, "shards": len(self.lengths), "rows": int(self.lengths.sum())}

    def order(self, global_batch: int) -> StreamOrder:
        if not self.lengths.sum():
            raise LabError(f"The stream {self.source.name!r} has no images to train on.")
        lanes = min(MOST_LANES, len(self.lengths))
        return StreamOrder(self.lengths, self.seed, global_batch, lanes, max(1, self.buffer // lanes))

    def held_out_examples(self) -> Iterator[Example]:
        reader = ShardReader(self.source)
        for shard, rows in self.held_out.items():
            yield from reader.read(0, shard, rows.tolist())

    def __iter__(self) -> Iterator[Example]:
        reader = BlockReader(self, global_batch=1)
        for number in range(reader.order.num_rows):
            ((examples, index),) = reader.find([number])
            yield examples[index]
