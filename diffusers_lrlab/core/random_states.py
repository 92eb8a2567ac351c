"""The states of all global random generators, as plain numbers."""

import random
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Of Python's, numpy's and torch's global generators, and those of the accelerators; JSON keeps them exactly."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "devices": [state.tolist() for state in _devices().get_rng_state_all()] if _has_devices() else [],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if states["devices"]:
        _devices().set_rng_state_all([torch.tensor(state, dtype=torch.uint8) for state in states["devices"]])


def _has_devices() -> bool:
    return torch.accelerator.is_available() and hasattr(_devices(), "get_rng_state_all")


def _devices() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())
