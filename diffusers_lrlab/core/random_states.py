"""States of all global random generators, as plain data."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_states(with_devices: bool = True) -> dict[str, Any]:
    """
    The states of Python's, NumPy's and torch's generators and those of the accelerators, exact in JSON.

    A forked process cannot use its parent's devices, so it passes `with_devices=False`.
    """
    return {
        "python": _plain(random.getstate()),
        "numpy": _plain(np.random.get_state()),
        "torch": _plain(torch.get_rng_state()),
        "devices": _plain(_devices().get_rng_state_all()) if with_devices and _has_devices() else [],
    }


def _plain(state: Any) -> Any:
    """The state of a generator as data that JSON can hold."""
    if isinstance(state, tuple | list):
        return [_plain(value) for value in state]
    return state.tolist() if isinstance(state, np.ndarray | np.generic | torch.Tensor) else state


def restore_random_states(states: dict[str, Any]) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if states["devices"]:
        _devices().set_rng_state_all([torch.tensor(state, dtype=torch.uint8) for state in states["devices"]])


@contextmanager
def random_states_kept(with_devices: bool = True) -> Iterator[None]:
    """Restores the states of all generators when the block ends."""
    states = random_states(with_devices)
    try:
        yield
    finally:
        restore_random_states(states)


def _has_devices() -> bool:
    return torch.accelerator.is_available() and hasattr(_devices(), "get_rng_state_all")


def _devices() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())
