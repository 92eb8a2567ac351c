"""Which images an update sees depends on the seed and the update alone, not on processes and micro-batches.

The run is one long row of images, epoch after epoch, each in an order of its own. Update `n` takes the images
`n * B ... (n + 1) * B - 1` of that row, where `B` is the global batch; a process takes its share of them. So every
update has the same number of images, and a resumed run just starts at another update.
"""

import itertools
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
    The images of this process, update by update: float32 `(accumulation * micro_batch, *data.image_shape)`.

    Args:
        data ([`TrainingData`]): Images or points.
        layout ([`BatchLayout`]): How updates are divided.
        seed (`int`): Seed of the order; that of a stream is in its shuffle buffer already.
        updates (`range`): A resumed run starts where it stopped.
        num_workers (`int`): Processes that decode, for images that are not in memory.
        skip_corrupt (`bool`): Replace an image that cannot be decoded by the next row, and add it to `data.skipped`;
            otherwise it is an error that names the file.
    """
    if data.num_images is None:
        yield from _iterate_stream(data, layout, updates, skip_corrupt)
        return
    layout.check_fits(data.num_images)
    order = RowOrder(data.num_images, seed)
    if data.in_memory is not None:
        yield from _iterate_memory(data, data.in_memory, layout, order, updates)
        return
    numbers = map(layout.image_numbers, updates)
    loader = DataLoader(
        _LazyBatches(data, skip_corrupt),
        batch_size=None,  # an item is the batch of an update
        sampler=(list(zip(order.rows(batch).tolist(), batch, strict=True)) for batch in numbers),
        num_workers=num_workers,
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
    data.skipped += [problem for problem in dict.fromkeys(problems) if problem not in data.skipped]


def _iterate_memory(
    data: TrainingData, images: torch.Tensor, layout: BatchLayout, order: RowOrder, updates: range
) -> Iterator[torch.Tensor]:
    is_plain = images.shape[1:] == data.image_shape and not data.transform.is_random
    places = np.array(layout.image_numbers(0))
    for update in updates:
        numbers = places + update * layout.global_batch
        batch = images[torch.from_numpy(order.rows(numbers))]
        if not is_plain:
            batch = torch.stack([data.transform.augment(*each) for each in zip(batch, numbers.tolist(), strict=True)])
        yield batch


class _LazyBatches(Dataset[Any]):
    def __init__(self, data: TrainingData, skip_corrupt: bool):
        self.train, self.column, self.transform = data.train, data.column, data.transform
        self.most_skipped = len(data.train) - 1 if skip_corrupt else 0

    def __getitem__(self, places: list[tuple[int, int]]) -> tuple[torch.Tensor | LabError, list[str]]:
        """
        The images at these places (row, number of the image), and problems with rows that were replaced by the next.

        An error is returned, since it would arrive from a worker as a traceback.
        """
        problems: list[str] = []
        try:
            return torch.stack([self._read(row, number, problems) for row, number in places]), problems
        except LabError as error:
            return error, problems

    def _read(self, row: int, image_number: int, problems: list[str]) -> torch.Tensor:
        last = row + self.most_skipped
        while True:
            try:
                pixels = self.transform.read(self.train[row % len(self.train)][self.column])
                return self.transform.augment(pixels, image_number)
            except LabError as error:
                if row == last:
                    raise
                problems.append(str(error))
                row += 1


def _iterate_stream(data: TrainingData, layout: BatchLayout, updates: range, skip_corrupt: bool) -> Iterator[torch.Tensor]:
    """Every process reads the whole stream and decodes its own share, so the order does not depend on their number."""
    cells = itertools.islice(_stream_cells(data), updates.start * layout.global_batch, None)
    for update in updates:
        numbers, images = layout.image_numbers(update), {}
        wanted = set(numbers)
        for number, cell in enumerate(itertools.islice(cells, layout.global_batch), update * layout.global_batch):
            if number in wanted:
                try:
                    images[number] = data.transform.augment(data.transform.read(cell), number)
                except LabError as error:
                    if not skip_corrupt:
                        raise
                    _note(data, [str(error)])
        good = list(images.values())
        if not good:
            raise LabError(f"None of the images of update {update} can be decoded: {data.skipped[-1]}")
        # Another image of the same share replaces a corrupt one: other processes need not know.
        yield torch.stack([images.get(number, good[number % len(good)]) for number in numbers])


def _stream_cells(data: TrainingData) -> Iterator[Any]:
    """The cells of a stream, epoch after epoch."""
    for epoch in itertools.count():
        data.train.set_epoch(epoch)
        row = None
        for row in data.train:
            yield row[data.column]
        if row is None:
            raise LabError(f"The stream {data.name!r} has no images to train on.")
