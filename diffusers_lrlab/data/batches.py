"""Batches of training data, which depend on the seed and the update only, not on processes and micro-batches.

A run is a sequence of images: the epochs one after another, each in its own order. Update `n` takes the images
`n * B ... (n + 1) * B - 1` of this sequence, where `B` is the global batch, and each process takes its share of them. So
every update has the same number of images, and a resumed run starts at a later update.
"""

import os
from collections.abc import Generator, Iterable, Iterator
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ..core.environment import available_cores
from ..core.errors import LabError
from ..core.program import end_with_parent
from ..core.streams import stream_generator
from .batch import Batch, Conditions
from .images import normalise
from .loading import TrainingData
from .options import BatchLayout
from .streams import BlockReader

# The most workers of a process by default, and the fewest images of a run for which starting them is worthwhile.
_MOST_WORKERS, _MANY_IMAGES = 16, 5000
_AHEAD = 3  # batches that are prefetched, with the one that is being read
_JOIN_SECONDS = 5.0  # the end of a run does not wait longer for a hanging source


class RowOrder:
    """The row of the dataset for each image number of the run."""

    def __init__(self, num_rows: int, seed: int):
        self.num_rows, self.seed = num_rows, seed
        self._orders: dict[int, np.ndarray] = {}

    def rows(self, image_numbers: list[int] | np.ndarray) -> np.ndarray:
        """Rows for image numbers, int64; the orders of two epochs are cached."""
        epochs, positions = np.divmod(np.asarray(image_numbers, np.int64), self.num_rows)
        if len(positions) and epochs[0] == epochs.min() == epochs.max():  # nearly always
            return self._order(int(epochs[0]))[positions]
        rows = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            rows[epochs == epoch] = self._order(epoch)[positions[epochs == epoch]]
        return rows

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            generator = stream_generator(self.seed, "order", epoch)
            self._orders = {key: order for key, order in self._orders.items() if key >= epoch - 1}
            self._orders[epoch] = torch.randperm(self.num_rows, generator=generator).numpy()
        return self._orders[epoch]


def iterate_batches(
    data: TrainingData, layout: BatchLayout, seed: int, updates: range, num_workers: int = 0, compact: bool = False
) -> Generator[Batch, None, None]:
    """
    The examples of this process, update by update: float32 `(accumulation * micro_batch, *data.image_shape)` with their
    conditions.

    `seed` is that of the order; a stream has its own. `num_workers` processes decode images that are not in memory. An image
    that cannot be decoded is an error that names the file; if `data.skips_corrupt`, it is replaced by the next row and noted
    in `data.skipped`. With `compact`, 8-bit levels are left to be normalised by [`to_device`].
    """
    if data.in_memory is not None:
        batches = _iterate_memory(data, data.in_memory, layout, seed, updates)
    else:
        batches = _iterate_files(data, layout, seed, updates, num_workers)
    for update, batch in zip(updates, batches, strict=True):
        if data.classes is not None:
            batch = data.classes.drop(batch, layout.image_numbers(update))
        yield batch if compact else batch.normalised()


def _iterate_memory(data: TrainingData, examples: Batch, layout: BatchLayout, seed: int, updates: range) -> Iterator[Batch]:
    layout.check_fits(len(examples))
    order, positions = RowOrder(len(examples), seed), np.array(layout.image_numbers(0))
    for update in updates:
        numbers = positions + update * layout.global_batch
        batch = examples[torch.from_numpy(order.rows(numbers))]
        yield batch.with_data(data.transform.augment(batch.data, numbers.tolist()))


def _iterate_files(data: TrainingData, layout: BatchLayout, seed: int, updates: range, num_workers: int) -> Iterator[Batch]:
    source: _Rows | _Stream
    if data.num_images is None:
        source = _Stream(data, layout, max(1, num_workers))
    else:
        layout.check_fits(data.num_images)
        source = _Rows(data, layout, seed)
    loader = DataLoader(
        _Decoded(data, source),
        batch_size=None,  # an item is a micro-batch, or a worker's part of one
        sampler=(item for update in updates for item in source.items(update)),
        num_workers=num_workers,
        worker_init_fn=end_with_parent,
        generator=torch.Generator(),  # otherwise it would advance the global one
    )
    yield from _assemble(data, loader, layout.micro_batch * layout.accumulation)


def num_workers(data: TrainingData, asked: int | None, num_seen: int) -> int:
    """The number of workers: the given one, or the free cores if a run has many images to decode."""
    if data.in_memory is not None:
        return 0
    if asked is not None:
        return asked
    if data.autoencoder is not None or num_seen < _MANY_IMAGES:
        return 0
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(0, min(_MOST_WORKERS, available_cores() // processes - 1))


def _assemble(data: TrainingData, parts_of_updates: Iterable[Any], num_images: int) -> Iterator[Batch]:
    """The examples of each update, in order."""
    positions: list[int] = []
    parts: list[Batch] = []
    for its_positions, part, problems in parts_of_updates:
        if isinstance(part, LabError):
            raise part
        data.note(problems)
        positions += its_positions
        parts.append(part)
        if len(positions) == num_images:
            has_one_dtype = len({part.data.dtype for part in parts}) == 1
            batch = Batch.join(parts if has_one_dtype else [part.normalised() for part in parts])
            yield batch if positions == sorted(positions) else batch[torch.tensor(positions).argsort()]
            positions, parts = [], []


# A request to the loader: positions in this process's batch, keys for `find`, image numbers in the run.
_Item = tuple[list[int], list[int], list[int]]


class _Rows:
    """A data set with random access."""

    def __init__(self, data: TrainingData, layout: BatchLayout, seed: int):
        self.examples, self.layout = data.examples, layout
        self.order = RowOrder(len(self.examples), seed)

    def items(self, update: int) -> Iterator[_Item]:
        numbers = self.layout.image_numbers(update)
        rows, size = self.order.rows(numbers).tolist(), self.layout.micro_batch
        for start in range(0, len(numbers), size):
            part = slice(start, start + size)
            yield list(range(len(numbers)))[part], rows[part], numbers[part]

    def find(self, keys: list[int]) -> Iterator[tuple[Any, int]]:
        """For each key a sequence of examples and an index in it."""
        return ((self.examples, row) for row in keys)


class _Stream:
    """A stream, of which each worker reads some lanes. The loader passes its items to the workers in turn."""

    def __init__(self, data: TrainingData, layout: BatchLayout, num_workers: int):
        self.blocks, self.layout, self.num_workers = BlockReader(data.train, layout.global_batch), layout, num_workers
        self.order = self.blocks.order
        updates = range(-(-self.order.num_lanes // layout.global_batch))
        self.own_lanes = np.unique(self.order.lanes(np.concatenate([layout.image_numbers(update) for update in updates])))

    def items(self, update: int) -> Iterator[_Item]:
        numbers, size = np.array(self.layout.image_numbers(update)), self.layout.micro_batch
        lanes = np.searchsorted(self.own_lanes, self.order.lanes(numbers))
        workers = lanes * self.num_workers // len(self.own_lanes)
        for start in range(0, len(numbers), size):
            for worker in range(self.num_workers):
                positions = np.flatnonzero(workers[start : start + size] == worker) + start
                yield positions.tolist(), numbers[positions].tolist(), numbers[positions].tolist()

    def find(self, keys: list[int]) -> Iterator[tuple[Any, int]]:
        return self.blocks.find(keys)


class _Decoded(Dataset[Any]):
    def __init__(self, data: TrainingData, source: "_Rows | _Stream"):
        self.source, self.transform, self.skips_corrupt = source, data.transform, data.skips_corrupt
        self.no_conditions = data.held_out[:0].conditions

    def __getitem__(self, item: _Item) -> tuple[list[int], Batch | LabError, list[str]]:
        """
        The positions and examples of an item, and the errors of corrupt images, which are replaced by the next in sequence.

        An error is returned, not raised, since a worker would send it as a traceback.
        """
        positions, keys, numbers = item
        problems: list[str] = []
        try:
            found = zip(self.source.find(keys), numbers, strict=True)
            examples = [self._read(each, index, number, problems) for (each, index), number in found]
        except LabError as error:
            return positions, error, problems
        if not examples:
            return positions, Batch(torch.empty(0, *self.transform.shape, dtype=torch.uint8), self.no_conditions), problems
        if len({image.dtype for image, _ in examples}) > 1:
            examples = [(normalise(image), conditions) for image, conditions in examples]
        return positions, Batch.stack(examples), problems

    def _read(self, examples: Any, index: int, image_number: int, problems: list[str]) -> tuple[torch.Tensor, Conditions]:
        """An image with its conditions, from `index` or the next row that is not corrupt."""
        last = index + (len(examples) - 1 if self.skips_corrupt else 0)
        while True:
            try:
                cell, conditions = examples[index % len(examples)]
                return self.transform.augment(self.transform.read(cell)[None], [image_number])[0], conditions
            except LabError as error:
                if index == last:
                    raise
                problems.append(str(error))
                index += 1


def prefetched(batches: Generator[Batch, None, None]) -> Iterator[Batch]:
    """The same batches, read ahead by a thread; in pinned memory if there is a GPU."""
    try:
        first = next(batches)  # in this thread, so that it forks the workers
    except StopIteration:
        return
    ready: SimpleQueue[Any] = SimpleQueue()
    wanted, stopped = Semaphore(_AHEAD), Event()
    arguments = (batches, ready, wanted, stopped)
    thread = Thread(target=_read, args=arguments, daemon=True, name="read batches")
    thread.start()
    try:
        yield first
        while (batch := ready.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            wanted.release()
            yield batch
    finally:
        stopped.set()
        wanted.release()
        thread.join(_JOIN_SECONDS)


def _read(batches: Generator[Batch, None, None], ready: SimpleQueue[Any], wanted: Semaphore, stopped: Event) -> None:
    """Puts batches into the queue, one for each that is wanted, then `None` or an exception."""
    pins = torch.cuda.is_available()
    try:
        while wanted.acquire() and not stopped.is_set() and (batch := next(batches, None)) is not None:
            ready.put(batch.pin_memory() if pins else batch)
        batches.close()
        ready.put(None)
    except BaseException as error:  # raised in the consumer
        ready.put(error)
