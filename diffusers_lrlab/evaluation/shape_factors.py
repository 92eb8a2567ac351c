"""The factors of images of shapes, read back from their pixels, and how far their distribution is from the true one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..data.shapes import CORNERS, FACTORS, RANGES, SHAPES, Factors, draw_factors, render_shapes

NUM_BINS = 8  # of each factor that is a real number
_NUM_CALIBRATION, _CALIBRATION_SEED = 1000, 917
_FAINTEST = 0.1  # coverage below it is taken for noise of the background
_READABLE = 0.15  # the largest mismatch of a readable image
_PIXELS_AT_ONCE = 2**21


@dataclass(frozen=True)
class Readings:
    """The factors read from `n` images."""

    factors: Factors  # estimates; meaningless for images that are not readable
    # float64 `(n,)`: absolute difference between an image and the image of its estimated factors, summed over the pixels
    # that either shape covers, over that shape's area in pixels.
    mismatch: np.ndarray
    # bool `(n,)`: the mismatch is at most 0.15, and the size between half of the smallest and twice the largest true one.
    is_readable: np.ndarray


def read_factors(images: np.ndarray) -> Readings:
    """
    Reads the factors of images `(n, resolution, resolution, 3)` in [0, 1].

    Coverage of a pixel is its chroma (shapes are saturated, the background is white). Centre and size are moments of the
    coverage; the kind is the most likely one given four rotation-invariant moments (by linear discriminants, fitted to
    1,000 true images of the resolution); the rotation is the phase of the moment of the kind's symmetry.
    """
    parts = [_estimates(images[rows]) for rows in _parts(images)]
    factors = Factors(*(np.concatenate([getattr(part, name) for part, _ in parts]) for name in FACTORS))
    mismatch = np.concatenate([part for _, part in parts])
    low, high = RANGES["size"]
    has_size = (factors.size > low / 2) & (factors.size < high * 2)
    return Readings(factors, mismatch, has_size & (mismatch <= _READABLE))


def _parts(images: np.ndarray) -> list[slice]:
    """Rows that are read at once: their moments take some hundred bytes per pixel."""
    step = max(1, _PIXELS_AT_ONCE // images[0].size) if len(images) else 1
    return [slice(start, start + step) for start in range(0, max(len(images), 1), step)]


@cache
def true_readings(resolution: int, num: int = 1000) -> tuple[Factors, Readings]:
    """The factors of true images that the estimator was not calibrated on, and its readings of these images."""
    true = draw_factors(num, _CALIBRATION_SEED, "test")
    return true, read_factors(render_shapes(true, resolution) / 255)


def estimator_error(resolution: int, num: int = 1000) -> dict[str, float]:
    """
    The estimator's own error on `num` true images that it was not calibrated on.

    Returns:
        `dict`: `kind`: share of wrong kinds; other factors: mean absolute error in the factor's unit (hue and rotation
        around the circle, rotation without circles); `unreadable`: share of images that it calls unreadable.
    """
    true, readings = true_readings(resolution, num)
    found, errors = readings.factors, {"kind": float((readings.factors.kind != true.kind).mean())}
    for name in RANGES:
        difference = np.abs(getattr(found, name) - getattr(true, name))
        if name in ("hue", "rotation"):
            difference = np.minimum(difference, 1 - difference)
        if name == "rotation":
            difference = difference[(true.kind == found.kind) & (true.kind != SHAPES.index("circle"))]
        errors[name] = float(difference.mean())
    return errors | {"unreadable": float(1 - readings.is_readable.mean())}


def divergences(factors: Factors) -> dict[str, float]:
    """
    Jensen-Shannon divergence in bits between the histogram of estimated factors and the true, uniform distribution: of each
    factor (`kind`, `hue`, ...) and of each pair (`kind, hue`, ...).

    Factors that are real numbers have 8 bins. Without images, all values are 1, the largest. Rotation is that of images
    with a rotation, so without circles. It is biased upwards for few images: compare with the same number of true ones.
    """
    bins = {"kind": factors.kind} | {name: _binned(getattr(factors, name), *RANGES[name]) for name in RANGES}
    counts = {name: len(SHAPES) if name == "kind" else NUM_BINS for name in bins}
    turned = factors.kind != SHAPES.index("circle")
    found = {}
    for names in [(name,) for name in FACTORS] + list(itertools.combinations(FACTORS, 2)):
        rows = turned if "rotation" in names else np.ones(len(factors), bool)
        table = np.zeros([counts[name] for name in names])
        np.add.at(table, tuple(bins[name][rows] for name in names), 1)
        true = np.ones_like(table)
        if "rotation" in names and "kind" in names:
            true[SHAPES.index("circle")] = 0
        found[", ".join(names)] = _jensen_shannon(table, true)
    return found


def split_pairs(found: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """The divergences of single factors, and those of pairs."""
    single = {name: value for name, value in found.items() if name in FACTORS}
    return single, {name: value for name, value in found.items() if name not in FACTORS}


def _binned(values: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.clip((values - low) / (high - low) * NUM_BINS, 0, NUM_BINS - 1).astype(np.int64)


def _jensen_shannon(counts: np.ndarray, true: np.ndarray) -> float:
    """Of the distributions that are proportional to these; the largest value, 1, if nothing was counted."""
    from scipy.spatial.distance import jensenshannon

    return float(jensenshannon(counts.ravel(), true.ravel(), base=2) ** 2) if counts.any() else 1.0


# --- the estimator ----------------------------------------------------------------------------------------------------


@cache
def kind_classifier(resolution: int) -> Any:
    """scikit-learn's linear discriminants of the kinds, for images of a resolution."""
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    true = draw_factors(_NUM_CALIBRATION, _CALIBRATION_SEED, "calibration")
    images = render_shapes(true, resolution) / 255
    invariants = np.concatenate([_Moments(images[rows]).invariants for rows in _parts(images)])
    return LinearDiscriminantAnalysis().fit(invariants, true.kind)


def _estimates(images: np.ndarray) -> tuple[Factors, np.ndarray]:
    moments = _Moments(images)
    kind = kind_classifier(images.shape[1]).predict(moments.invariants).astype(np.int64)
    phases = np.stack([np.angle(moments.of_symmetry[order]) for order in CORNERS[1:]], axis=1)
    phase = np.where(kind > 0, phases[np.arange(len(kind)), np.maximum(kind - 1, 0)], 0)
    factors = Factors(kind, moments.hue, moments.size, moments.x, moments.y, rotation=phase / (2 * np.pi) % 1)
    drawn = render_shapes(factors, images.shape[1]) / 255
    covered = np.maximum(_chroma(images), _chroma(drawn)) >= _FAINTEST
    difference = (np.abs(drawn - images).mean(-1) * covered).sum(axis=(1, 2))
    return factors, difference / np.maximum(_chroma(drawn).sum(axis=(1, 2)), 1)


def _chroma(images: np.ndarray) -> np.ndarray:
    """The coverage of pixels by a saturated colour on grey or white."""
    return images.max(-1) - images.min(-1)


class _Moments:
    """Moments of the coverage of images, in fractions of the side; images without any coverage count as a dot."""

    def __init__(self, images: np.ndarray):
        images = images.astype(np.float64)
        coverage = _chroma(images)
        coverage[coverage < _FAINTEST] = 0
        centres = (np.arange(images.shape[1]) + 0.5) / images.shape[1]
        area = np.maximum(coverage.mean(axis=(1, 2)), 1e-6)
        share = coverage / (area * coverage[0].size)[:, None, None]
        self.x, self.y = share.sum(1) @ centres, share.sum(2) @ centres
        self.size = np.sqrt(area / np.pi)
        self.hue = _hue(((1 - images) * coverage[..., None]).sum(axis=(1, 2)))
        offset = (centres[None, None, :] - self.x[:, None, None]) + 1j * (centres[None, :, None] - self.y[:, None, None])
        scaled = offset / self.size[:, None, None]
        self.of_symmetry = {order: (share * scaled**order).sum(axis=(1, 2)) for order in CORNERS[1:]}
        inertia = (share * np.abs(scaled) ** 2).sum(axis=(1, 2))
        self.invariants = np.stack([inertia, *(np.abs(moment) for moment in self.of_symmetry.values())], axis=1)


def _hue(absorbed: np.ndarray) -> np.ndarray:
    """The hue, as `colorsys` has it, of colours `(n, 3)` that are given by what they take away from white."""
    colours = absorbed.max(-1, keepdims=True) - absorbed
    red, green, blue = colours.T
    high = colours.max(-1)
    spread = np.where(high > 0, high, 1)  # the lowest channel is 0
    sixths = np.select(
        [high == red, high == green], [(green - blue) / spread, 2 + (blue - red) / spread], 4 + (red - green) / spread
    )
    return sixths / 6 % 1
