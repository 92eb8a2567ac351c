"""The states of all random generators that a script uses: the global ones, and those among its variables."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...core.random_states import as_plain_data, raw_random_states, restore_random_states


def find_generators(owners: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The generators among the variables of each owner, by names such as `"script.generator"`."""
    types = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return {
        f"{owner}.{name}": value
        for owner, variables in owners.items()
        for name, value in variables.items()
        if isinstance(value, types)
    }


def variables_of_data(dataset: Any) -> dict[str, Any]:
    """The attributes of the script's dataset, inside any `Subset`."""
    while isinstance(dataset, torch.utils.data.Subset):
        dataset = dataset.dataset
    return getattr(dataset, "__dict__", {})


def seed_all(seed: int, generators: Mapping[str, Any]) -> None:
    """Seeds the global generators and these."""
    from accelerate.utils import set_seed

    set_seed(seed)
    for generator in generators.values():
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        else:
            generator.seed(seed)


def get_states(generators: Mapping[str, Any], with_devices: bool = True) -> dict[str, Any]:
    """The states of the global generators and of these, as plain data that JSON keeps exactly."""
    return as_plain_data(raw_states(generators, with_devices))


def raw_states(generators: Mapping[str, Any], with_devices: bool = True) -> dict[str, Any]:
    """The same states as copies, cheap enough for every batch; [`as_plain_data`] makes plain data of them."""
    return raw_random_states(with_devices) | {"others": {name: _state(each) for name, each in generators.items()}}


def set_states(states: dict[str, Any], generators: Mapping[str, Any]) -> None:
    restore_random_states(states)
    for name in generators.keys() & states["others"].keys():
        _set_state(generators[name], states["others"][name])


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(state, dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state((state[0], np.array(state[1], np.uint32), *state[2:]))
    else:
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
