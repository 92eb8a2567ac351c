"""Random streams, whose numbers depend on their purpose and not on earlier numbers; and states of global generators.

All random numbers of a run come from streams named by (seed, purpose, counters). The noise of update 57 is the same whether
the run was resumed at update 50 or not, on one process or two, with or without gradient accumulation. So resuming is exact
by construction, and two runs with the same seed see the same images, timesteps and noise.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

# Noise is generated in blocks, so that a process generates little more than its own. Blocks of points are larger, since each
# block costs a generator.
_MIN_BLOCK_IMAGES, _MIN_BLOCK_NUMBERS = 16, 512

# Held-out data are the same for every seed of a study, since losses on different data cannot be compared.
SPLIT_SEED = 0


def noise_block_images(shape: tuple[int, ...]) -> int:
    """The number of images of this shape in a block of noise."""
    return max(_MIN_BLOCK_IMAGES, _MIN_BLOCK_NUMBERS // math.prod(shape))


def stream_seed(seed: int, purpose: str, *counters: int) -> int:
    """A 63-bit seed for the stream (seed, purpose, counters), the same on every machine and version."""
    key = f"{seed}/{purpose}/{'/'.join(map(str, counters))}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def stream_uniform(seed: int, purpose: str, *counters: int) -> float:
    """One number, uniform in [0, 1)."""
    return (stream_seed(seed, purpose, *counters) >> 10) / 2**53


def stream_generator(seed: int, purpose: str, *counters: int, device: torch.device | str = "cpu") -> torch.Generator:
    """
    The generator of a stream. CUDA uses all 63 bits of its seed. torch's CPU generator uses the lower 32, so that two
    streams coincide with probability 2^-32: among n streams, n^2 / 2^33 such pairs are expected.
    """
    import torch

    return torch.Generator(device).manual_seed(stream_seed(seed, purpose, *counters))


def split_rows(num_rows: int, num_held_out: int) -> tuple[list[int], list[int]]:
    """Rows to hold out (at most a fifth) and rows to train on, both in order."""
    import torch

    num_held_out = min(num_held_out, num_rows // 5)
    order = torch.randperm(num_rows, generator=stream_generator(SPLIT_SEED, "held-out")).tolist()
    return sorted(order[:num_held_out]), sorted(order[num_held_out:])


def block_randn(
    seed: int, purpose: str, update: int, positions: range, shape: tuple[int, ...], device: torch.device | str
) -> torch.Tensor:
    """
    Standard normal noise for images of an update: float32 of shape `(len(positions), *shape)`.

    `positions` are consecutive positions in the global batch, over all processes and accumulation steps; the noise of an
    image depends on its position only. CPU and CUDA generate different numbers.
    """
    import torch

    size = noise_block_images(shape)
    first, last = positions.start // size, (positions.stop - 1) // size
    generators = [stream_generator(seed, purpose, update, block, device=device) for block in range(first, last + 1)]
    blocks = [torch.randn((size, *shape), generator=generator, device=device) for generator in generators]
    start = positions.start - first * size
    return torch.cat(blocks)[start : start + len(positions)]


# --- global generators ----------------------------------------------------------------------------------------


def random_states(with_devices: bool = True) -> dict[str, Any]:
    """
    The states of Python's, NumPy's and torch's generators and those of the accelerators, exact in JSON.

    A forked process cannot use its parent's devices, so it passes `with_devices=False`.
    """
    import torch

    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    devices = _devices() if with_devices else None
    return {
        "python": [version, [*words], gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "devices": [state.tolist() for state in devices.get_rng_state_all()] if devices else [],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    import torch

    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if states["devices"] and (devices := _devices()):  # else the checkpoint is of another machine
        devices.set_rng_state_all([torch.tensor(state, dtype=torch.uint8) for state in states["devices"]])


@contextmanager
def random_states_kept(with_devices: bool = True) -> Iterator[None]:
    """Restores the states of all generators when the block ends."""
    states = random_states(with_devices)
    try:
        yield
    finally:
        restore_random_states(states)


def _devices() -> Any:
    """The module of the accelerators, if there are any and they have generators."""
    import torch

    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return module if hasattr(module, "get_rng_state_all") else None
