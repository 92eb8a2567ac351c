"""The run that is checked before training."""

from __future__ import annotations

import io
from contextlib import suppress
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..core.errors import LabError
from ..core.streams import stream_generator
from ..data.batch import Batch, Conditions
from ..data.streams import fetched

if TYPE_CHECKING:
    from ..training.trainer import Trainer

_MOST = 512  # images or points to check
_FEW = 64  # images that are read from files


class Stored(NamedTuple):
    """Facts about an image as it is stored."""

    size: tuple[int, int]  # width and height
    largest: int | None  # value, of an image of 16 bits per channel


class Subject:
    """A run before training. Checks restore its trainer, to the bit."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.run = trainer, trainer.run
        self.plan, self.data, self.config = trainer.run.plan, trainer.run.data, trainer.run.config

    @property
    def sample(self) -> torch.Tensor:
        """The data of [`batch`] alone."""
        return self.batch.data

    @cached_property
    def batch(self) -> Batch:
        """Training data as the model sees them, float32 `(num, ...)`: a sample, or the start of a stream."""
        data = self.data
        if data.num_images is None:
            return data.held_out[:_MOST] if len(data.held_out) else data.all_in_memory(_MOST)
        if data.in_memory is not None:
            some = data.in_memory[torch.randperm(data.num_images, generator=stream_generator(0, "preflight"))[:_MOST]]
            return some.with_data(data.transform.fixed(some.data))
        rows = torch.linspace(0, data.num_images - 1, min(_FEW, data.num_images)).long().tolist()
        read = [example for row in rows if (example := self._read(row)) is not None]
        return Batch.stack(read) if read else Batch(torch.empty(0, *data.image_shape), data.held_out[:0].conditions)

    def _read(self, row: int) -> tuple[torch.Tensor, Conditions] | None:
        """An image with its conditions; `None` if it cannot be decoded, which training reports."""
        try:
            return self.data.read_fixed(self.data.examples[row])
        except LabError:
            return None

    @cached_property
    def stored(self) -> list[Stored]:
        """Facts about the files of some images."""
        train: Any = self.data.train
        cells: list[Any] = []
        if self.data.num_images is not None:
            rows = torch.linspace(0, len(train) - 1, min(_FEW, len(train))).long().tolist()
            cells = [train[row][self.data.column] for row in rows]
        elif len(train.source.lengths):
            with suppress(Exception):  # of networks: training reports them
                examples = (example for _, example in islice(train.source.open(0, 0), _FEW))
                cells = [fetched(example.cell) for example in examples]
        return [facts for cell in cells if (facts := _facts(cell)) is not None]


def _facts(cell: Any) -> Stored | None:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(cell["bytes"]) if cell.get("bytes") else cell.get("path")) as image:
            is_deep = image.mode.startswith("I") or ";16" in str(image.tile)
            largest = int(np.asarray(image).max()) if is_deep else None
            # PIL reads the upper 8 of 16 bits of colours.
            return Stored(image.size, largest if largest is None or image.mode.startswith("I") else largest * 256 + 255)
    except Exception:  # training reports it
        return None
