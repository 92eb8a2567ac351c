"""Kinds of noise, and that an update's noise does not depend on how its images are shared out."""

import itertools
import math

import pytest
import torch
from tables import cases

from diffusers_lrlab.core.streams import block_randn
from diffusers_lrlab.data.options import BatchLayout
from diffusers_lrlab.objective.noise import NOISES, immiscible, offset, pyramid
from diffusers_lrlab.objective.objective import Objective
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.resolve import objective_spec, resolve_config

SHAPES = {"colour": (4, 3, 16, 16), "oblong": (3, 1, 8, 20), "one image": (1, 3, 8, 8), "grey": (5, 1, 8, 8)}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed))


def make(name, noise, images, seed=0):
    entry = NOISES[name]
    return entry.factory(noise, images, generator(seed), **entry.resolve({}))


@cases("shape", SHAPES.values(), ids=SHAPES)
@cases("name", NOISES)
def test_noise_is_a_function_of_batch_and_generator(name, shape):
    noise, images = randn(*shape), randn(*shape, seed=1)
    kept = noise.clone(), images.clone()
    first = make(name, noise, images)
    assert torch.equal(first, make(name, noise, images))
    assert first.shape == shape
    assert first.dtype == torch.float32
    assert first.isfinite().all()
    assert torch.equal(noise, kept[0])
    assert torch.equal(images, kept[1])


@cases("name", NOISES)
def test_noise_has_mean_0_and_is_not_constant(name):
    noise = make(name, randn(200, 1, 8, 8), randn(200, 1, 8, 8, seed=1))
    means = noise.flatten(1).mean(dim=1)
    assert means.mean().abs() < 4 * means.std() / math.sqrt(200)
    assert noise.flatten(1).std(dim=1).min() > 0.5


@cases("seed", range(5))
def test_the_assignment_has_the_smallest_sum_of_distances(seed):
    noise, images = randn(5, 1, 2, 2, seed=seed), randn(5, 1, 2, 2, seed=100 + seed)
    given = immiscible(noise, images)
    order = [next(index for index in range(5) if torch.equal(noise[index], row)) for row in given]

    def total(order):
        return sum(math.dist(images[place].flatten(), noise[index].flatten()) for place, index in enumerate(order))

    best = min(itertools.permutations(range(5)), key=total)
    assert tuple(order) == best


@cases("shape", SHAPES.values(), ids=SHAPES)
def test_offset_adds_one_number_to_each_image_and_channel(shape):
    noise = randn(*shape)
    added = offset(noise, None, generator(), 0.5) - noise
    constants = added.mean(dim=(2, 3), keepdim=True)
    torch.testing.assert_close(added, constants.expand(shape), rtol=0, atol=1e-6)
    assert len(constants.unique()) == constants.numel()
    # 20,000 independent constants: their variance is known to 1 in 100.
    noise = offset(randn(20_000, 1, 4, 4), None, generator(1), 0.5)
    assert noise.mean(dim=(2, 3)).var().item() == pytest.approx(1 / 16 + 0.25, rel=0.05)


@cases("shape", SHAPES.values(), ids=SHAPES)
@cases("num_levels", [1, 2, 10])
def test_pyramid_noise_has_the_mean_square_of_plain_noise(shape, num_levels):
    noise = pyramid(randn(*shape), None, generator(1), 0.8, num_levels)
    # The means of images count: they are noise too, and x_t must have as much as its SNR says.
    torch.testing.assert_close(noise.square().mean(), torch.ones(()))


def test_pyramid_noise_has_more_power_at_low_frequencies_and_ends_at_one_pixel():
    plain = randn(100, 1, 16, 16)
    made = [pyramid(plain, None, generator(1), discount, 10) for discount in (1e-3, 0.3, 0.6, 0.9)]
    variances = [torch.nn.functional.avg_pool2d(noise, 4).var().item() for noise in made]
    assert variances[0] == pytest.approx(1 / 16, rel=0.1)
    assert variances == sorted(variances)
    assert variances[-1] > 5 / 16
    levels = {num: pyramid(plain, None, generator(1), 0.8, num) for num in (3, 4, 100)}
    assert torch.equal(levels[4], levels[100])
    assert not torch.equal(levels[3], levels[4])


GLOBAL_BATCH = 24  # one and a half of the blocks that noise is drawn in


def global_noise(name, processes, accumulation, update=7):
    """The noise of the whole global batch, put together from what every process has of it."""
    images = randn(GLOBAL_BATCH, 1, 6, 4, seed=5)
    config = resolve_config(TrainingConfig(noise=name, seed=3))
    layouts = [
        BatchLayout(GLOBAL_BATCH // (processes * accumulation), accumulation, processes, rank) for rank in range(processes)
    ]
    shares = [torch.cat([images[place.start : place.stop] for place in layout.positions()]) for layout in layouts]
    whole = torch.full_like(images, math.nan)
    for layout, share in zip(layouts, shares, strict=True):

        def gather(values, share=share):
            assert torch.equal(values, share)
            return torch.cat(shares)

        spec = objective_spec(config)
        objective = Objective.of(spec, spec.make_process(), layout, 100, torch.device("cpu"), gather)
        parts = objective.noise(update, share)
        for place, part in zip(layout.positions(), parts, strict=True):
            whole[place.start : place.stop] = part
    return whole


@cases(("processes", "accumulation"), [(1, 4), (2, 1), (3, 2)])
@cases("name", NOISES)
def test_noise_does_not_depend_on_how_the_batch_is_shared_out(name, processes, accumulation):
    assert torch.equal(global_noise(name, processes, accumulation), global_noise(name, 1, 1))


@cases("name", NOISES)
def test_the_noise_of_training_is_that_of_the_entry(name):
    """Made of the noise that plain training would have had, for the whole global batch."""
    plain = block_randn(3, "noise", 7, range(GLOBAL_BATCH), (1, 6, 4), "cpu")
    assert torch.equal(global_noise("gaussian", 1, 1), plain)
    whole = global_noise(name, 2, 2)
    assert not torch.equal(global_noise(name, 2, 2, update=8), whole)
    if name == "immiscible":
        assert torch.equal(whole, immiscible(plain, randn(GLOBAL_BATCH, 1, 6, 4, seed=5)))
    if name == "offset":
        torch.testing.assert_close((whole - plain).std(dim=(2, 3)), torch.zeros(GLOBAL_BATCH, 1), rtol=0, atol=1e-6)
