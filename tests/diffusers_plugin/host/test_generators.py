"""States of random generators, as JSON keeps them."""

import json
import random

import numpy as np
import torch

from diffusers_lrlab.diffusers_plugin.host.generators import find_generators, get_states, set_states


def test_states_of_all_kinds_of_generators():
    def make():
        kinds = [torch.Generator(), np.random.default_rng(), np.random.RandomState(), random.Random()]
        return find_generators({"script": dict(zip("abcd", kinds, strict=True)) | {"e": 3}})

    def draw(kinds):
        a, b, c, d = (kinds[f"script.{name}"] for name in "abcd")
        return [torch.rand(1, generator=a).item(), b.random(), c.rand(), d.random(), torch.rand(1).item()]

    kinds = make()
    states = json.loads(json.dumps(get_states(kinds)))
    expected = draw(kinds)
    others = make()
    set_states(states, others)
    assert draw(others) == expected
