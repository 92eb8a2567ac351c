"""Averages of the weights against their definitions."""

import pytest
import torch

from diffusers_lrlab.averaging.averages import EMA
from diffusers_lrlab.models.mlp_denoiser import MLPDenoiser


def test_the_decay_follows_the_clock_and_the_average_the_decay():
    model = MLPDenoiser(dimension=2, hidden_size=8, num_layers=1, embedding_size=4)
    average = EMA(model, "cpu", max_decay=0.8, inv_gamma=2.0, power=0.75, start_update=1, update_every=2)
    weight = next(model.parameters())
    expected = weight.detach().clone()
    for update in range(1, 20):
        with torch.no_grad():
            weight.fill_(update)
        average.step(update)
        if update % 2 == 0:
            decay = min(0.8, 1 - (1 + (update - 2) / 2.0) ** -0.75)
            expected = decay * expected + (1 - decay) * update
            assert average.decay == pytest.approx(decay)
    with average.weights():
        torch.testing.assert_close(weight.detach(), expected)
    assert (weight == 19).all()


def test_an_average_is_saved_and_loaded_without_a_warning(tmp_path):
    """Resuming would show the user one of diffusers'."""
    model = MLPDenoiser(dimension=2, hidden_size=8, num_layers=1, embedding_size=4)
    first, second = (EMA(model, "cpu", 0.8, 2.0, 0.75, start_update=1, update_every=1) for _ in range(2))
    with torch.no_grad():
        next(model.parameters()).fill_(1)
    first.step(3)
    first.save(tmp_path)
    second.load(tmp_path)
    for saved, loaded in zip(first.state_dict()["shadow_params"], second.state_dict()["shadow_params"], strict=True):
        assert torch.equal(saved, loaded)
