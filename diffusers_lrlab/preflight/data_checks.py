"""The run that is checked before training, and checks of its data. Those of pixels are silent on other kinds of data."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.errors import LabError
from ..core.streams import stream_generator
from ..core.words import agreeing, counted, times
from ..data.batch import Batch, Conditions
from ..data.sources import load_errors_explained, open_dataset

if TYPE_CHECKING:
    from ..training.trainer import Trainer

_MOST = 512  # images or points to check
_FEW = 64  # images that are read from files
_FIRST_ROWS = 256  # of a stream, whose labels are compared
_FEWEST_CHANGES = 20  # of labels of shuffled rows; with fewer, chance is too likely an explanation
_LEVEL = 2 / 255  # one of 256 levels in [-1, 1]
_DARK = -0.4  # images of which none is brighter; those of 14 of 16 bits end at -0.5

CHECKS: dict[str, Callable[[Subject], str | None]] = {}
"""All checks, in the order of their warnings: each returns its message, or `None`."""


def check(function: Callable[[Subject], str | None]) -> Callable[[Subject], str | None]:
    """Adds a check under its own name."""
    CHECKS[function.__name__] = function
    return function


class Subject:
    """A run before training. Checks restore its trainer, to the bit."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.run = trainer, trainer.run
        self.plan, self.data, self.config = trainer.run.plan, trainer.run.data, trainer.run.config
        kind = self.plan.kind
        self.has_pixels = kind.is_bounded and kind.has_neighbours

    @cached_property
    def batch(self) -> Batch:
        """Training data as the model sees them, float32 `(num, ...)`: a sample, or the start of a stream."""
        data = self.data
        if data.num_images is None:
            return data.held_out[:_MOST] if len(data.held_out) else data.all_in_memory(_MOST)
        if data.in_memory is not None:
            some = data.in_memory[torch.randperm(data.num_images, generator=stream_generator(0, "preflight"))[:_MOST]]
            return some.with_data(data.transform.fixed(some.data))
        read = [example for row in _spread(data.num_images) if (example := self._read(row)) is not None]
        return Batch.stack(read) if read else Batch(torch.empty(0, *data.image_shape), data.held_out[:0].conditions)

    def _read(self, row: int) -> tuple[torch.Tensor, Conditions] | None:
        """An image with its conditions; `None` if it cannot be decoded, which training reports."""
        with suppress(LabError):
            return self.data.read_fixed(self.data.examples[row])
        return None


def _spread(num: int) -> list[int]:
    """A few of so many rows, evenly spread."""
    return torch.linspace(0, num - 1, min(_FEW, num)).long().tolist()


@check
def value_range(subject: Subject) -> str | None:
    """Images that use only a part of [-1, 1] or leave it, or have empty channels."""
    images = subject.batch.data
    if not subject.has_pixels or not len(images):
        return None
    low, high, spreads = float(images.min()), float(images.max()), images.std(dim=(0, 2, 3))
    spread = float(spreads.max())
    if low < -1 - _LEVEL or high > 1 + _LEVEL or high < _DARK or low > -_LEVEL or spread < 0.05:
        return (
            f"The images have values from {low:.3g} to {high:.3g} with a standard deviation of {spread:.2g}; the noise and "
            "the sampler expect the whole of [-1, 1], and about 0.5 is usual. Rescale them, unless this is intended. Images "
            "that use 12 of 16 bits, for example, need a factor of 16: mogrify -evaluate multiply 16 FILES."
        )
    if len(spreads) > 1 and float(spreads.min()) < 0.02 * spread:
        return f"Channel {int(spreads.argmin())} of the images is nearly constant. Check it, or use --image_channels 1."
    constant = int((images.flatten(2).std(dim=2).amax(dim=1) < _LEVEL).sum())
    if constant < max(1, 0.01 * len(images)):
        return None
    return f"{constant} of {counted(len(images), 'image')} {agreeing(constant, 'has', 'have')} a single colour. Remove them."


@check
def image_sizes(subject: Subject) -> str | None:
    """Images that are enlarged, or cropped by more than half."""
    resolution, train = subject.config.resolution, subject.data.train
    if resolution is None or not subject.has_pixels or subject.data.num_images is None:
        return None
    sizes = [size for row in _spread(len(train)) if (size := _size(train[row][subject.data.column])) is not None]
    small = [min(size) for size in sizes if min(size) < resolution]
    oblong = sum(max(size) > 2 * min(size) for size in sizes)
    if len(small) > 0.1 * len(sizes):
        return (
            f"{len(small)} of {counted(len(sizes), 'image')} {agreeing(len(small), 'is', 'are')} smaller than --resolution "
            f"{resolution} (down to {min(small)}). They are enlarged, and the model learns the blur. Lower --resolution, or "
            "use larger images."
        )
    if oblong > 0.1 * len(sizes):
        return (
            f"{oblong} of {counted(len(sizes), 'image')} {agreeing(oblong, 'is', 'are')} more than twice as long as wide. "
            "They are cropped to squares, which show less than half of them."
        )
    return None


def _size(cell: Any) -> tuple[int, int] | None:
    """Width and height of an image as it is stored; `None` if it cannot be read, which training reports."""
    from PIL import Image

    with suppress(Exception), Image.open(io.BytesIO(cell["bytes"]) if cell.get("bytes") else cell.get("path")) as image:
        return image.size
    return None


@check
def sorted_stream(subject: Subject) -> str | None:
    """A stream whose first rows are sorted by class, since it mixes only rows near each other."""
    if not subject.config.streaming:
        return None
    stream = open_dataset(subject.config, streaming=True)
    for name, feature in (stream.features or {}).items():
        num_classes = getattr(feature, "num_classes", 0)  # of a `datasets.ClassLabel`
        if num_classes < 2 and name != subject.config.label_column:
            continue
        with load_errors_explained(subject.config):
            labels = [str(row[name]) for row in itertools.islice(stream.select_columns([name]), _FIRST_ROWS)]
        changes = sum(one != other for one, other in itertools.pairwise(labels))
        shares = np.unique(labels, return_counts=True)[1] / max(1, len(labels))
        of_shuffled = (len(labels) - 1) * (1 - np.square(shares).sum())
        if of_shuffled >= _FEWEST_CHANGES and changes * 4 < of_shuffled or len(labels) >= 64 and len(shares) == 1:
            return (
                f"The rows of the stream seem to be sorted by {name!r}, which changes {times(changes)} in the first "
                f"{counted(len(labels), 'row')}. A stream mixes only neighbouring rows, so successive updates get similar "
                "data. Shuffle the rows when you write them, write many shards, or raise --stream_shuffle_buffer."
            )
    return None


@check
def empty_classes(subject: Subject) -> str | None:
    """Classes without an image, of which the model learns nothing."""
    classes = subject.plan.classes
    names = [] if classes is None else [name for name, num in zip(classes.names, classes.counts, strict=True) if not num]
    if classes is None or not names:
        return None
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return (
        f"{len(names)} of {counted(len(classes.names), 'class')} {agreeing(len(names), 'has', 'have')} no image: {shown}. "
        "Samples of these classes will be noise. Lower --num_classes, or number the classes without gaps."
    )
