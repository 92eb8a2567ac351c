"""Checks of the data: values, sizes, order, classes. Those of pixels are silent on other kinds of data."""

import itertools

import numpy as np

from ..core.words import agreeing, counted, times
from ..data.sources import load_errors_explained, open_dataset
from .subject import Subject

_DEPTHS = (8, 10, 12, 14)  # bits per channel that cameras and scanners store in 16
_FIRST_ROWS = 256  # of a stream, whose labels are compared
_FEWEST_CHANGES = 20  # of labels of shuffled rows; with fewer, chance is too likely an explanation
_LEVEL = 2 / 255  # one of 256 levels in [-1, 1]


def _has_pixels(subject: Subject) -> bool:
    kind = subject.plan.kind
    return kind.is_bounded and kind.has_neighbours


def value_range(subject: Subject) -> str | None:
    """Images that use only a part of [-1, 1] or leave it, or have empty channels."""
    images = subject.sample
    if not _has_pixels(subject) or not len(images):
        return None
    if told := _unused_bits(subject):
        return told
    low, high, spreads = float(images.min()), float(images.max()), images.std(dim=(0, 2, 3))
    spread = float(spreads.max())
    is_outside, is_half = low < -1 - _LEVEL or high > 1 + _LEVEL, high < -0.9 or low > -_LEVEL
    if is_outside or is_half or spread < 0.05:
        return (
            f"The images have values from {low:.3g} to {high:.3g} with a standard deviation of {spread:.2g}; the noise and "
            "the sampler expect the whole of [-1, 1], and about 0.5 is usual. Rescale them, unless this is intended."
        )
    if len(spreads) > 1 and float(spreads.min()) < 0.02 * spread:
        return f"Channel {int(spreads.argmin())} of the images is nearly constant. Check it, or use --image_channels 1."
    constant = int((images.flatten(2).std(dim=2).amax(dim=1) < _LEVEL).sum())
    if constant < max(1, 0.01 * len(images)):
        return None
    return f"{constant} of {counted(len(images), 'image')} {agreeing(constant, 'has', 'have')} a single colour. Remove them."


def _unused_bits(subject: Subject) -> str | None:
    largest = max((each.largest for each in subject.stored if each.largest is not None), default=0)
    bits = next((bits for bits in _DEPTHS if 1 < largest < 2**bits), None)
    if bits is None:
        return None
    factor = 2 ** (16 - bits)
    return (
        f"The images seem to use {bits} of their 16 bits: the largest value found is {largest:,} of 65,535, so they fill "
        f"only [-1, {largest / 32767.5 - 1:.3g}] of [-1, 1]. Multiply their values by {factor}, for example with "
        f"ImageMagick: mogrify -evaluate multiply {factor} FILES."
    )


def image_sizes(subject: Subject) -> str | None:
    """Images that are enlarged, or cropped by more than half."""
    resolution = subject.config.resolution
    if resolution is None or not _has_pixels(subject) or subject.data.num_images is None:
        return None
    sizes = [each.size for each in subject.stored]
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
