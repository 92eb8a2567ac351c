"""Which images an update sees depends on the seed and the update alone, not on processes and micro-batches.

The run is one long row of images, epoch after epoch, each in an order of its own. Update `n` takes the images
`n * B ... (n + 1) * B - 1` of that row, where `B` is the global batch; a process takes its share of them. So every
update has the same number of images, and a resumed run just starts at another update.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ..core.errors import LabError
from ..core.streams import stream_generator
from .layout import BatchLayout
from .loading import TrainingData


class RowOrder:
    """Which row of the dataset is image number `i` of the run."""

    def __init__(self, num_rows: int, seed: int):
        self.num_rows, self.seed = num_rows, seed
        self._orders: dict[int, np.ndarray] = {}

    def rows(self, image_numbers: list[int] | np.ndarray) -> np.ndarray:
        """Rows for image numbers, int64; an epoch's order is cached for two epochs."""
        epochs, places = np.divmod(np.asarray(image_numbers, np.int64), self.num_rows)
        if len(places) and epochs[0] == epochs.min() == epochs.max():  # nearly always
            return self._order(int(epochs[0]))[places]
        rows = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            rows[epochs == epoch] = self._order(epoch)[places[epochs == epoch]]
        return rows

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            generator = stream_generator(self.seed, "order", epoch)
            self._orders = {key: order for key, order in self._orders.items() if key >= epoch - 1}
            self._orders[epoch] = torch.randperm(self.num_rows, generator=generator).numpy()
        return self._orders[epoch]


def iterate_batches(
    data: TrainingData, layout: BatchLayout, seed: int, updates: range, num_workers: int = 0, skip_corrupt: bool = False
) -> Iterator[torch.Tensor]:
    """
    The images of this process, update by update.

    Args:
        data ([`TrainingData`]): The images.
        layout ([`BatchLayout`]): How updates are divided.
        seed (`int`): Seed of the order; that of a stream is in its shuffle buffer already.
        updates (`range`): The updates to yield; a resumed run starts where it stopped.
        num_workers (`int`): Processes that decode, for images that are not in memory.
        skip_corrupt (`bool`): Replace an image that cannot be decoded by the next row, and add it to `data.skipped`;
            otherwise it is an error that names the file.

    Yields:
        `torch.Tensor`: float32 `(accumulation * micro_batch, channels, resolution, resolution)` in [-1, 1], or points
            `(accumulation * micro_batch, dimension)`.
    """
    if data.num_images is None:
        yield from _iterate_stream(data, layout, updates, skip_corrupt)
        return
    layout.check_fits(data.num_images)
    order = RowOrder(data.num_images, seed)
    if data.in_memory is not None:
        yield from _iterate_memory(data, layout, order, updates)
        return
    loader = DataLoader(
        _LazyImages(data, skip_corrupt),
        batch_sampler=_UpdateSampler(layout, order, updates),
        num_workers=num_workers,
        collate_fn=_collate,
        generator=torch.Generator(),  # otherwise it draws from, and so disturbs, the global one
    )
    for images, problems in loader:
        if isinstance(images, LabError):
            raise images
        _note(data, problems)
        yield images


def to_device(images: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Images on `device`, copied asynchronously."""
    if device.type == "cuda":
        images = images.pin_memory()  # only copies from pinned memory are asynchronous
    return images.to(device, non_blocking=True)


def _note(data: TrainingData, problems: list[str]) -> None:
    """Corrupt images come again every epoch; each is listed once."""
    for problem in problems:
        if problem not in data.skipped:
            data.skipped.append(problem)


def _iterate_memory(data: TrainingData, layout: BatchLayout, order: RowOrder, updates: range) -> Iterator[torch.Tensor]:
    assert data.in_memory is not None
    transform = data.transform
    plain = data.in_memory.shape[1:] == data.image_shape and not transform.is_random
    places = np.array(layout.image_numbers(0))
    for update in updates:
        images = data.in_memory[torch.from_numpy(order.rows(places + update * layout.global_batch))]
        if not plain:
            numbers = layout.image_numbers(update)
            augmented = [transform.augment(image, number) for image, number in zip(images, numbers, strict=True)]
            images = torch.stack(augmented)
        yield images


class _UpdateSampler:
    """Batches of `(row, image number)` for a `DataLoader`."""

    def __init__(self, layout: BatchLayout, order: RowOrder, updates: range):
        self.layout, self.order, self.updates = layout, order, updates

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for update in self.updates:
            numbers = self.layout.image_numbers(update)
            yield list(zip(self.order.rows(numbers).tolist(), numbers, strict=True))


class _LazyImages(Dataset[Any]):
    def __init__(self, data: TrainingData, skip_corrupt: bool):
        self.train, self.column, self.transform = data.train, data.column, data.transform
        self.skip_corrupt = skip_corrupt

    def __getitem__(self, index: tuple[int, int]) -> tuple[torch.Tensor | LabError, list[str]]:
        """Pixels, and problems with rows before. Errors are returned: from a worker they would arrive as a traceback."""
        row, image_number = index
        problems: list[str] = []
        while True:
            try:
                pixels = self.transform.read(self.train[row][self.column])
                return self.transform.augment(pixels, image_number), problems
            except LabError as error:
                problems.append(str(error))
                if not self.skip_corrupt or len(problems) >= len(self.train):
                    return error, problems
                row = (row + 1) % len(self.train)


def _collate(items: list[tuple[torch.Tensor | LabError, list[str]]]) -> tuple[torch.Tensor | LabError, list[str]]:
    images, problems = zip(*items, strict=True)
    error = next((image for image in images if isinstance(image, LabError)), None)
    return error or torch.stack(images), [problem for listed in problems for problem in listed]


def _iterate_stream(data: TrainingData, layout: BatchLayout, updates: range, skip_corrupt: bool) -> Iterator[torch.Tensor]:
    """Every process reads the whole stream and decodes its own share, so the order does not depend on their number."""
    number = updates.start * layout.global_batch
    cells = _stream_cells(data, skip=number)
    for update in updates:
        numbers = layout.image_numbers(update)
        wanted, images = set(numbers), {}
        while number < (update + 1) * layout.global_batch:
            cell = next(cells)
            if number in wanted:
                try:
                    images[number] = data.transform.augment(data.transform.read(cell), number)
                except LabError as error:
                    if not skip_corrupt:
                        raise
                    _note(data, [str(error)])
            number += 1
        good = list(images.values())
        if not good:
            raise LabError(f"None of the images of update {update} can be decoded: {data.skipped[-1]}")
        # Another image of the same share replaces a corrupt one: other processes need not know.
        yield torch.stack([images.get(wanted_number, good[wanted_number % len(good)]) for wanted_number in numbers])


def _stream_cells(data: TrainingData, skip: int) -> Iterator[Any]:
    epoch, read = 0, 0
    while True:
        data.train.set_epoch(epoch)
        before = read
        for row in data.train:
            read += 1
            if read > skip:
                yield row[data.column]
        if read == before:
            raise LabError(f"The stream {data.name!r} has no images to train on.")
        epoch += 1
