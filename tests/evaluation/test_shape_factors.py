"""Factors read back from images of shapes, and the divergence of their distribution from the true one."""

import numpy as np
import pytest

from diffusers_lrlab.data.shapes import RANGES, SHAPES, Factors, draw_factors, render_shapes
from diffusers_lrlab.evaluation.shape_factors import divergences, estimator_error, read_factors, split_pairs


@pytest.mark.slow
@pytest.mark.parametrize("resolution", [16, 32])
def test_the_estimator_reads_true_images(resolution):
    errors = estimator_error(resolution)
    assert errors["kind"] <= 0.002
    assert errors["unreadable"] <= 0.002
    assert max(errors[name] for name in ("hue", "size", "x", "y")) < 0.001
    assert errors["rotation"] < 0.01


@pytest.mark.slow
def test_what_is_no_shape_is_not_readable():
    images = render_shapes(draw_factors(200, 5), 16) / 255
    blends, noise = (images[:100] + images[100:]) / 2, np.random.default_rng(0).random((100, 16, 16, 3))
    assert read_factors(images).is_readable.mean() == 1
    assert (
        read_factors(np.clip(images + np.random.default_rng(0).normal(0, 0.02, images.shape), 0, 1)).is_readable.mean() > 0.9
    )
    assert read_factors(blends).is_readable.mean() < 0.1
    assert read_factors(noise).is_readable.mean() == 0
    assert read_factors(np.ones((3, 16, 16, 3))).is_readable.mean() == 0


def test_divergence_is_small_for_true_factors_and_sees_what_is_missing():
    true = draw_factors(4000, 7)
    found = divergences(true)
    assert len(found) == 6 + 15
    assert max(found.values()) < 0.02
    without_stars = true[true.kind != SHAPES.index("star")]
    assert divergences(without_stars)["kind"] == pytest.approx(0.1379, abs=0.005)  # of (1/3, 1/3, 1/3, 0) and 1/4 each
    assert divergences(without_stars)["hue"] < 0.005
    # Red circles and all else in other hues: no single factor is off by much, the pair is.
    tied = Factors(true.kind, (true.kind + (true.hue % 0.25) * 4) / 4, true.size, true.x, true.y, true.rotation)
    single, pairs = split_pairs(divergences(tied))
    assert single["hue"] < 0.01
    assert pairs["kind, hue"] > 0.4
    assert pairs["size, x"] < 0.02


def test_divergence_against_the_formula():
    factors = draw_factors(500, 3)
    low, high = RANGES["size"]
    counts = np.histogram(factors.size, bins=8, range=(low, high))[0] / 500
    middle = (counts + 1 / 8) / 2
    expected = sum(0.5 * p * np.log2(p / m) + 0.5 / 8 * np.log2(1 / 8 / m) for p, m in zip(counts, middle, strict=True))
    assert divergences(factors)["size"] == pytest.approx(expected, abs=1e-12)
