"""Means by noise level from the mean losses of batches, and how far they can be trusted."""

import math

import numpy as np
import pytest
import torch

from diffusers_lrlab.diagnostics.regression import BatchLosses, solve
from diffusers_lrlab.diagnostics.timestep_log import bin_starts

BINS = 5
STARTS = bin_starts(BINS, 100)
MEANS = np.array([1.0, 0.6, 0.3, 0.2, 0.15])
DEVIATIONS = np.array([0.5, 0.2, 0.06, 0.02, 0.01])  # of the losses of images
CPU = torch.device("cpu")


def draw(rng, num_batches, num_images):
    """Timesteps `(num_batches, num_images)`, and losses of images with means and spreads of their own in each bin."""
    timesteps = rng.integers(100, size=(num_batches, num_images))
    bins = np.searchsorted(STARTS, timesteps, side="right") - 1
    shapes = (MEANS / DEVIATIONS) ** 2
    return timesteps, rng.gamma(shapes[bins], (MEANS / shapes)[bins])


def solved(*draws):
    sums = BatchLosses(STARTS, CPU)
    for timesteps, losses in draws:
        sums.add(torch.from_numpy(timesteps), torch.from_numpy(losses).mean(1))
    return solve(sums.sums.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("num_images", [1, 2, 4, 16])
def test_intervals_cover_the_means_of_all_bins(num_images):
    """One variance for all bins makes those of noisy levels too short, by a factor of 2 or more, and others too long."""
    rng, hits = np.random.default_rng(num_images), []
    for _ in range(500):
        _, means, variances = solved(draw(rng, 300, num_images))
        hits.append(np.abs(means - MEANS) < 1.96 * np.sqrt(variances))
    covered = np.mean(hits, axis=0)
    assert covered.min() >= 0.92
    assert covered.max() <= 0.98


def test_batches_of_one_image_have_the_variances_of_its_losses():
    timesteps, losses = draw(np.random.default_rng(0), 200, 1)
    images, means, variances = solved((timesteps, losses))
    bins = np.searchsorted(STARTS, timesteps[:, 0], side="right") - 1
    for index in range(BINS):
        inside = losses[bins == index, 0]
        assert images[index] == len(inside)
        assert means[index] == pytest.approx(inside.mean(), rel=1e-9)
        assert variances[index] == pytest.approx(inside.var() / len(inside) * 200 / (200 - BINS), rel=1e-9)


def test_means_and_variances_are_those_of_the_sandwich():
    """By its definition, from all batches at once; sizes may differ, and a bin may have no images."""
    rng = np.random.default_rng(1)
    few, many = draw(rng, 30, 3), draw(rng, 40, 8)
    for timesteps, _ in (few, many):
        timesteps[timesteps >= STARTS[-2]] = 0
    images, means, variances = solved(few, many)
    shares, losses = [], []
    for timesteps, values in (few, many):
        bins = np.searchsorted(STARTS, timesteps, side="right") - 1
        shares += [np.bincount(row, minlength=BINS)[:-1] / len(row) for row in bins]
        losses += list(values.mean(1))
    shares, losses = np.array(shares), np.array(losses)
    expected, *_ = np.linalg.lstsq(shares, losses, rcond=None)
    inverse = np.linalg.inv(shares.T @ shares)
    errors = losses - shares @ expected
    sandwich = inverse @ (shares.T * errors**2) @ shares @ inverse * 70 / 66
    np.testing.assert_allclose(means[:-1], expected, rtol=1e-9)
    np.testing.assert_allclose(variances[:-1], np.diag(sandwich), rtol=1e-7)
    assert math.isnan(means[-1])
    assert math.isnan(variances[-1])
    assert images.sum() == 30 * 3 + 40 * 8
    assert images[-1] == 0


def test_too_few_batches_have_no_means():
    assert solved(draw(np.random.default_rng(2), BINS, 4)) is None
    assert solved(draw(np.random.default_rng(2), 40, 4)) is not None
    assert solve(BatchLosses(STARTS, CPU).sums.numpy()) is None
