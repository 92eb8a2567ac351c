"""Checks of the data: values, duplicates, sizes, order. Those of pixels are silent on other kinds of data."""

import itertools

import numpy as np
import torch
from torch.nn.functional import adaptive_avg_pool2d

from ..core.words import agreeing, counted, times
from ..data.sources import load_errors_explained, open_dataset
from .subject import Subject

_ALIKE = 0.05  # share of the median distance between images
_AT_ONCE = 4096
_EXACT = "donot_use_mm_for_euclid_dist"  # matrix products round, and equal images must have distance 0
_DEPTHS = (8, 10, 12, 14)  # bits per channel that cameras and scanners store in 16
_FIRST_ROWS = 256  # of a stream, whose labels are compared
_FEWEST_CHANGES = 20  # of labels of shuffled rows; with fewer, chance is too likely an explanation
_LEVEL = 2 / 255  # one of 256 levels in [-1, 1]


def value_range(subject: Subject) -> str | None:
    """Images that use only a part of [-1, 1], or have empty channels."""
    if not _has_pixels(subject) or not len(subject.sample):
        return None
    if told := _unused_bits(subject):
        return told
    images = subject.sample
    low, high = float(images.min()), float(images.max())
    if low < -1 - _LEVEL or high > 1 + _LEVEL:
        return (
            f"The images have values from {low:.3g} to {high:.3g}; the noise and the sampler expect [-1, 1]. Rescale them."
        )
    if high < -0.9:
        return (
            f"The images are nearly black: they use the first {round((high + 1) * 127.5) + 1} of 256 levels. If they hold "
            "labels, or values from 0 to 1, rescale them to the whole range."
        )
    if low > -_LEVEL:
        return (
            f"The images have values from {low:.3g} to {high:.3g}, half of [-1, 1], as if they were scaled to [0, 1] twice. "
            "Rescale them to the whole range, unless they are that bright."
        )
    spreads = images.std(dim=(0, 2, 3))
    if len(spreads) > 1 and float(spreads.min()) < 0.02 * float(spreads.max()):
        return f"Channel {int(spreads.argmin())} of the images is nearly constant. Check it, or use --image_channels 1."
    if float(spreads.max()) < 0.05:
        return (
            f"The images have little contrast: their standard deviation is {float(spreads.max()):.2g}, usually about 0.5. "
            "Rescale them to the whole range, unless this is intended."
        )
    return None


def _unused_bits(subject: Subject) -> str | None:
    largest = [each.largest for each in subject.stored if each.largest is not None]
    bits = next((bits for bits in _DEPTHS if max(largest) < 2**bits), None) if largest and max(largest) > 1 else None
    if bits is None:
        return None
    factor = 2 ** (16 - bits)
    return (
        f"The images seem to use {bits} of their 16 bits: the largest value in {counted(len(largest), 'image')} is "
        f"{max(largest):,} of 65,535, so they fill only [-1, {max(largest) / 32767.5 - 1:.3g}] of [-1, 1]. Multiply their "
        f"values by {factor}, for example with ImageMagick: mogrify -evaluate multiply {factor} FILES."
    )


def _has_pixels(subject: Subject) -> bool:
    kind = subject.plan.kind
    return kind.is_bounded and kind.has_neighbours


def constant_images(subject: Subject) -> str | None:
    if not _has_pixels(subject):
        return None
    constant = int((subject.sample.flatten(2).std(dim=2).amax(dim=1) < _LEVEL).sum())
    if constant < max(1, 0.01 * len(subject.sample)):
        return None
    have, them = agreeing(constant, "has", "have"), agreeing(constant, "it", "them")
    return f"{constant} of {counted(len(subject.sample), 'image')} {have} a single colour. Remove {them}."


def near_duplicates(subject: Subject) -> str | None:
    """Similar images or equal points, which the model memorises."""
    if len(subject.sample) < 10:
        return None
    kind = subject.plan.kind
    alike, checked = _alike(subject) if kind.has_neighbours else _equal(subject)
    if alike < 0.1 * checked:
        return None
    return (
        f"{alike} of the {checked} {kind.name} checked are nearly the same as another one. Models memorise duplicates, "
        "which also make held-out losses look better. Remove them, unless they are intended."
    )


def _equal(subject: Subject) -> tuple[int, int]:
    """The number of examples that occur more than once, and the number checked."""
    in_memory = subject.data.in_memory
    data = subject.sample if in_memory is None else in_memory.data
    counts = data.unique(dim=0, return_counts=True)[1]
    return int(counts[counts > 1].sum()), len(data)


def _thumbnails(data: torch.Tensor) -> torch.Tensor:
    """`(num, size)`, by which data that look alike are found."""
    return adaptive_avg_pool2d(data, min(8, data.shape[-1])).flatten(1) if data.ndim == 4 else data.flatten(1)


def _alike(subject: Subject) -> tuple[int, int]:
    """The number of sampled images similar to another one (in memory, else in the sample), and the sample size."""
    data, sample = subject.data, _thumbnails(subject.sample)
    distances = torch.cdist(sample, sample, compute_mode=_EXACT)
    median = distances[~torch.eye(len(sample), dtype=torch.bool)].median()
    if data.in_memory is None or data.num_images is None:
        nearest = distances.fill_diagonal_(torch.inf).amin(dim=1)
    else:
        nearest = torch.full((len(sample),), torch.inf)
        for start in range(0, data.num_images, _AT_ONCE):
            others = _thumbnails(data.transform.fixed(data.in_memory.data[start : start + _AT_ONCE]))
            distances = torch.cdist(sample, others, compute_mode=_EXACT)
            own = torch.arange(start, start + len(others)) == subject.rows[:, None]
            nearest = torch.minimum(nearest, distances.masked_fill(own, torch.inf).amin(dim=1))
    return int((nearest <= _ALIKE * median).sum()), len(sample)


def image_sizes(subject: Subject) -> str | None:
    """Images that are enlarged, or cropped by more than half."""
    resolution = subject.config.resolution
    if resolution is None or not _has_pixels(subject) or subject.data.num_images is None:
        return None
    if not (sizes := [each.size for each in subject.stored]):
        return None
    small = sum(min(size) < resolution for size in sizes)
    if small > 0.1 * len(sizes):
        smallest = min(min(size) for size in sizes)
        return (
            f"{small} of {counted(len(sizes), 'image')} {agreeing(small, 'is', 'are')} smaller than --resolution "
            f"{resolution} (down to {smallest}). They are enlarged, and the model learns the blur. Lower --resolution, or "
            "use larger images."
        )
    oblong = sum(max(size) > 2 * min(size) for size in sizes)
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
    if classes is None or all(classes.counts):
        return None
    names = [name for name, count in zip(classes.names, classes.counts, strict=True) if not count]
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return (
        f"{len(names)} of {counted(len(classes.names), 'class')} {agreeing(len(names), 'has', 'have')} no image: {shown}. "
        "Samples of these classes will be noise. Lower --num_classes, or number the classes without gaps."
    )
