"""Refined schedule-free AdamW beside the package's, and beside its equations."""

import pytest
import torch

from diffusers_lrlab import get_optimizer

GRADIENTS = torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
RATES = [0.25e-2, 0.5e-2, 0.75e-2, *[1e-2] * 9]  # a warm-up


def steps(spec, eval_at_the_end=True):
    weights = torch.nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))
    optimizer = get_optimizer(spec, [weights], 1e-2)
    for gradient, rate in zip(GRADIENTS, RATES, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        weights.grad = gradient.clone()
        optimizer.step()
    optimizer.eval()
    return weights.detach()


def by_the_equations(beta1, decoupling, decay, beta2=0.99, eps=1e-8):
    """The average after the updates: arXiv 2507.09846, with the gradient's weight decay taken where it is evaluated."""
    average = z = torch.linspace(-1, 1, 5, dtype=torch.float64)
    squares, all_weights = torch.zeros_like(z), 0.0
    for number, (gradient, rate) in enumerate(zip(GRADIENTS, RATES, strict=True), 1):
        y = (1 - beta1) * z + beta1 * average
        squares = beta2 * squares + (1 - beta2) * gradient**2
        update = gradient / ((squares / (1 - beta2**number)).sqrt() + eps) + decay * y
        z = z - rate * update
        all_weights += rate**2
        share = min(1.0, (1 - beta1) * decoupling * rate**2 / all_weights)
        average = (1 - share) * average + share * z
    return average


@pytest.mark.parametrize("beta1", [0.5, 0.9, 0.98])
@pytest.mark.parametrize("decoupling", [0.5, 8.0, 200.0])
def test_average_is_that_of_the_equations(beta1, decoupling):
    found = steps(f"schedulefree_adamw:beta1={beta1},beta2=0.99,decoupling={decoupling},weight_decay=0.1")
    torch.testing.assert_close(found, by_the_equations(beta1, decoupling, 0.1), rtol=0, atol=1e-12)


def test_the_first_form_is_a_special_case():
    first, refined = (steps(f"schedulefree_adamw:beta1=0.75{more}") for more in ("", ",decoupling=4"))
    torch.testing.assert_close(refined, first, rtol=0, atol=1e-14)
    assert not torch.equal(steps("schedulefree_adamw:beta1=0.75,decoupling=5"), first)


def test_an_update_at_a_rate_of_0_changes_nothing():
    weights = torch.nn.Parameter(torch.ones(2))
    optimizer = get_optimizer("schedulefree_adamw:decoupling=50", [weights], 1e-2)
    optimizer.param_groups[0]["lr"] = 0.0
    weights.grad = torch.ones(2)
    optimizer.step()
    optimizer.eval()
    assert torch.equal(weights.detach(), torch.ones(2))
