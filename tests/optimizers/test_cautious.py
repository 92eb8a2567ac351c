"""Cautious weight decay (arXiv 2510.12402) against the optimizers' formulas written here in float64."""

import io
from importlib.util import find_spec

import numpy as np
import torch
from tables import cases

from diffusers_lrlab import get_optimizer
from diffusers_lrlab.optimizers.newton_schulz import orthogonalised

LR, DECAY, STEPS = 1e-2, 0.3, 12


def problem(shape=(6, 5)):
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(shape, generator=generator, dtype=torch.float64)
    weights[0] = 0.0
    gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(STEPS)]
    return weights, gradients


def trained(spec, weights, gradients):
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = get_optimizer(spec, [parameter], LR)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    assert all(group["weight_decay"] == DECAY for group in optimizer.param_groups)
    return parameter.detach().numpy()


def adamw_updates(gradients, beta1=0.9, beta2=0.999, eps=1e-8):
    mean, square = np.zeros_like(gradients[0]), np.zeros_like(gradients[0])
    for step, gradient in enumerate(gradients, 1):
        mean, square = beta1 * mean + (1 - beta1) * gradient, beta2 * square + (1 - beta2) * gradient**2
        yield (mean / (1 - beta1**step)) / (np.sqrt(square / (1 - beta2**step)) + eps)


def lion_updates(gradients, beta1=0.9, beta2=0.99):
    mean = np.zeros_like(gradients[0])
    for gradient in gradients:
        yield np.sign(beta1 * mean + (1 - beta1) * gradient)
        mean = beta2 * mean + (1 - beta2) * gradient


def muon_updates(gradients, momentum=0.95):
    mean = np.zeros_like(gradients[0])
    for gradient in gradients:
        mean = momentum * mean + (1 - momentum) * gradient
        update = (1 - momentum) * gradient + momentum * mean
        (made,) = orthogonalised([torch.from_numpy(update)])
        yield 0.2 * np.sqrt(max(update.shape)) * made.numpy()


UPDATES = {"adamw": adamw_updates, "muon": muon_updates}
if find_spec("lion_pytorch") is not None:
    UPDATES["lion"] = lion_updates


@cases("name", UPDATES)
def test_it_is_the_papers_equation(name):
    weights, gradients = problem()
    expected, opposed = weights.numpy().copy(), 0
    for update in UPDATES[name]([gradient.numpy() for gradient in gradients]):
        mask = update * expected >= 0
        opposed += (~mask).sum()
        expected = expected - LR * (update + DECAY * mask * expected)
    spec = f"{name}:weight_decay={DECAY}"
    np.testing.assert_allclose(trained(f"{spec},cautious=true", weights, gradients), expected, rtol=1e-9, atol=1e-12)
    assert 0.2 * expected.size * STEPS < opposed < 0.8 * expected.size * STEPS
    assert np.abs(trained(spec, weights, gradients) - expected).max() > 1e-3


def test_vectors_of_muon_decay_cautiously_too():
    weights, gradients = problem((7,))
    matrix, vector = torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(weights.clone())
    optimizer = get_optimizer(f"muon:weight_decay={DECAY},cautious=true", [matrix, vector], LR)
    for gradient in gradients:
        vector.grad = gradient.clone()
        optimizer.step()
    alone = trained(f"adamw:weight_decay={DECAY},cautious=true", weights, gradients)
    np.testing.assert_array_equal(vector.detach().numpy(), alone)


@cases("name", UPDATES)
def test_a_closure_and_hooks_are_called_once_a_step(name):
    weights, (gradient, *_) = problem()
    trained(f"{name}:weight_decay={DECAY}", weights, [gradient])  # torch wraps the steps of a class at its first object
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = get_optimizer(f"{name}:weight_decay={DECAY},cautious=true", [parameter], LR)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        calls.append("closure")
        parameter.grad = gradient.clone()
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert calls == ["before", "closure", "after"]


@cases("name", UPDATES)
def test_a_parameter_without_gradient_stays(name):
    kept, moved = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    optimizer = get_optimizer(f"{name}:weight_decay={DECAY},cautious=true", [kept, moved], LR)
    moved.grad = torch.randn(4, 4)
    optimizer.step()
    assert (kept == 1).all()
    assert (moved != 1).all()


@cases("spec", [f"{name}:weight_decay={DECAY},cautious=true" for name in UPDATES])
def test_going_on_from_a_saved_state_is_exact(spec):
    weights, gradients = problem()
    whole = torch.from_numpy(trained(spec, weights, gradients))
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = get_optimizer(spec, [parameter], LR)
    for step, gradient in enumerate(gradients):
        if step == 5:
            file = io.BytesIO()
            torch.save([parameter.detach(), optimizer.state_dict()], file)
            file.seek(0)
            values, state = torch.load(file, weights_only=True)
            parameter = torch.nn.Parameter(values)
            optimizer = get_optimizer(spec, [parameter], LR)
            optimizer.load_state_dict(state)
        parameter.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(parameter.detach(), whole)
