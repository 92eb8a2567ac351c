"""Random streams: seeds, noise and uniform numbers."""

import numpy as np
import torch

from diffusers_lrlab.core.streams import block_randn, noise_block_images, stream_generator, stream_seed, stream_uniform


def test_a_generator_on_the_cpu_takes_32_bits_of_its_seed():
    """Should torch take all of them some day, docs/guarantees.md and `stream_generator` can say so."""
    seed = stream_seed(0, "noise", 1)
    assert seed > 2**32
    first, low = stream_generator(0, "noise", 1), torch.Generator().manual_seed(seed & 0xFFFFFFFF)
    assert torch.equal(torch.rand(5, generator=first), torch.rand(5, generator=low))


def test_noise_differs_by_place_update_seed_and_purpose():
    draws = [
        block_randn(*key, range(3 * noise_block_images((4,))), (4,), "cpu")
        for key in [(0, "noise", 0), (0, "noise", 1), (1, "noise", 0), (0, "validation", 0)]
    ]
    images = torch.cat(draws)
    assert len({tuple(image) for image in images.tolist()}) == len(images)
    assert abs(images.mean()) < 0.1
    assert abs(images.std() - 1) < 0.1


def test_seeds_are_the_same_on_every_machine():
    """The first 63 bits of blake2b("0/order/3"), written out: a change would break the resuming of older runs."""
    assert stream_seed(0, "order", 3) == 5486038029339273987
    assert torch.randperm(5, generator=stream_generator(0, "order", 3)).tolist() == [3, 2, 4, 1, 0]


def test_uniform_numbers_are_uniform():
    counts, _ = np.histogram([stream_uniform(0, "flip", number) for number in range(10_000)], bins=10, range=(0, 1))
    assert counts.min() > 880
    assert counts.max() < 1120
