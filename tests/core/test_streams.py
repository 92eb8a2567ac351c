"""What the docs say of random streams."""

import torch

from diffusers_lrlab.core.streams import stream_generator, stream_seed


def test_a_generator_on_the_cpu_takes_32_bits_of_its_seed():
    """Should torch take all of them some day, docs/guarantees.md and `stream_generator` can say so."""
    seed = stream_seed(0, "noise", 1)
    assert seed > 2**32
    first, low = stream_generator(0, "noise", 1), torch.Generator().manual_seed(seed & 0xFFFFFFFF)
    assert torch.equal(torch.rand(5, generator=first), torch.rand(5, generator=low))
