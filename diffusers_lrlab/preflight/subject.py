"""The run that is checked before training."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ..core.errors import LabError
from ..core.streams import stream_generator
from ..data.batch import Batch, Conditions

if TYPE_CHECKING:
    from ..training.trainer import Trainer

_MOST = 512  # images or points to check


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
            some = data.in_memory[self.rows]
            return some.with_data(data.transform.fixed(some.data))
        read = [example for row in self.rows.tolist() if (example := self._read(row)) is not None]
        return Batch.stack(read) if read else Batch(torch.empty(0, *data.image_shape), data.held_out[:0].conditions)

    @cached_property
    def rows(self) -> torch.Tensor:
        """The rows of the sample; none for a stream."""
        num = self.data.num_images or 0
        if self.data.in_memory is not None:
            return torch.randperm(num, generator=stream_generator(0, "preflight"))[:_MOST]
        # Fewer if they must be decoded: evenly spaced, each with its neighbour, perhaps the next frame of a film.
        evenly = torch.linspace(0, num - 1, min(_MOST // 8, num)).long()
        return torch.cat([evenly, evenly + 1]).clamp(max=num - 1).unique()

    def _read(self, row: int) -> tuple[torch.Tensor, Conditions] | None:
        """An image with its conditions; `None` if it cannot be decoded, which training reports."""
        try:
            return self.data.read_fixed(self.data.examples[row])
        except LabError:
            return None

    @cached_property
    def sizes(self) -> list[tuple[int, int]]:
        """Stored width and height of some images; none for streams."""
        if self.data.num_images is None:
            return []
        train: Any = self.data.train
        rows = torch.linspace(0, len(train) - 1, min(64, len(train))).long().tolist()
        return [size for row in rows if (size := _size(train[row][self.data.column])) is not None]


def _size(cell: Any) -> tuple[int, int] | None:
    import io

    from PIL import Image

    try:
        with Image.open(io.BytesIO(cell["bytes"]) if cell.get("bytes") else cell.get("path")) as image:
            return image.size
    except (OSError, TypeError, AttributeError, ValueError, Image.DecompressionBombError):
        return None  # training reports it
