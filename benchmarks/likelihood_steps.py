"""Error of `exact_kl` by the number of steps of the probability-flow ODE, where the answer is known.

    python benchmarks/likelihood_steps.py

The models are the exact ones of Gaussians, one or several, so that many steps give the log-likelihood of the points; and
a small network that is trained here, whose divergence jumps. Beside the steps of runs stands what was used before: Heun's
method, and Richardson's extrapolation of it, at as many evaluations of the model or more.
"""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import torch
from common import machine, make_parser, parse
from diffusers import DDPMScheduler

from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.evaluation.likelihood import NUM_STEPS, _NoisePrediction, log_likelihood
from diffusers_lrlab.objective.processes import DDPM


class ExactModel:
    """The noise that an optimal model predicts for a mixture of Gaussians of one width."""

    dtype, device = torch.float64, torch.device("cpu")

    def __init__(self, log_sigmas, centres, width):
        self.log_sigmas, self.centres, self.width = log_sigmas.numpy(), centres, width

    def __call__(self, noisy, timesteps):
        sigma = math.exp(np.interp(float(timesteps[0]), np.arange(len(self.log_sigmas)), self.log_sigmas))
        scaled = noisy * math.sqrt(1 + sigma**2)
        variance = self.width**2 + sigma**2
        offsets = scaled[:, None] - self.centres
        shares = (-(offsets**2).sum(-1) / (2 * variance)).softmax(1)
        return SimpleNamespace(sample=sigma * (shares[..., None] * offsets).sum(1) / variance)


def heun(model, process, points, num_steps):
    """Heun's method in sigma, evenly in its logarithm."""
    predict = _NoisePrediction(model, process)
    first, last = float(predict.log_sigmas[0]), float(predict.log_sigmas[-1])
    logs, levels = torch.zeros(len(points), dtype=torch.float64), torch.linspace(first, last, num_steps + 1).tolist()
    slope, divergence = predict.with_divergence(points, first)
    for before, after in itertools.pairwise(levels):
        step = math.exp(after) - math.exp(before)
        trial, trial_divergence = predict.with_divergence(points + step * slope, after)
        points = points + step * (slope + trial) / 2
        logs += (after - before) * (math.exp(before) * divergence + math.exp(after) * trial_divergence) / 2
        slope, divergence = predict.with_divergence(points, after)
    variance = 1 + math.exp(2 * levels[-1])
    return logs - (points**2).sum(1) / (2 * variance) - points.shape[1] / 2 * math.log(2 * math.pi * variance)


def richardson(model, process, points, num_steps):
    half = num_steps // 2
    return (4 * heun(model, process, points, num_steps) - heun(model, process, points, half)) / 3


def trained(process, num_updates):
    """A network of ReLUs after a few updates on eight Gaussians."""
    from diffusers_lrlab import MLPDenoiser
    from diffusers_lrlab.data.toy2d import load_toy_dataset

    torch.manual_seed(0)
    model, data = MLPDenoiser(), load_toy_dataset("eight_gaussians", 10_000, 1).with_format("torch")["x"][:]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for update in range(num_updates):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - update / num_updates)
        points, timesteps = (
            data[torch.randint(len(data), (256,))].float(),
            torch.randint(process.num_train_timesteps, (256,)),
        )
        optimizer.zero_grad()
        process.losses(model, Batch(points), torch.randn_like(points), timesteps).mean().backward()
        optimizer.step()
    return model.eval()


WAYS = {  # name -> (log-likelihoods, steps, evaluations of the model at each point)
    "Heun, 100 steps": (heun, 100, 201),
    "Richardson, 64 and 32 steps": (richardson, 64, 194),
    "Runge-Kutta, 20 steps": (log_likelihood, 20, 80),
    f"{NUM_STEPS} steps, as in runs": (log_likelihood, NUM_STEPS, 4 * NUM_STEPS),
}


def main():
    """Prints the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--points", type=int, default=300)
    parser.add_argument("--reference", type=int, default=500, help="steps of what counts as exact")
    parser.add_argument("--updates", type=int, default=1000, help="of the network")
    options = parse(parser, points=20, reference=60, updates=2)
    torch.set_num_threads(1)
    angles = torch.arange(40, dtype=torch.float64) * math.pi / 20
    circle = torch.stack((angles.cos(), angles.sin()), 1)
    mixtures = {
        "eight Gaussians": (3 * circle[::5], 0.3),
        "ring": (2 * circle, 0.08),
        "wide Gaussian": (0 * circle[:1], 2.0),
    }
    print(machine())
    print("Error of the mean, and root mean square of the errors of points, bits; evaluations of the model at a point.\n")
    print(f"| timesteps, betas | model | {' | '.join(f'{way}: {each[2]}' for way, each in WAYS.items())} |")
    print("|---|---" + "|---" * len(WAYS) + "|")
    for timesteps, betas in ((100, "linear"), (1000, "linear"), (1000, "squaredcos_cap_v2")):
        process = DDPM(DDPMScheduler(timesteps, beta_schedule=betas))
        levels = _NoisePrediction(None, process).log_sigmas
        for name in (*mixtures, "network"):
            rng = torch.Generator().manual_seed(0)
            centres, width = mixtures["eight Gaussians" if name == "network" else name]
            chosen = centres[torch.randint(len(centres), (options.points,), generator=rng)]
            points = chosen + width * torch.randn(chosen.shape, generator=rng, dtype=torch.float64)
            model = trained(process, options.updates) if name == "network" else ExactModel(levels, centres, width)
            exact = log_likelihood(model, process, points, options.reference)
            shown = []
            for function, steps, _ in WAYS.values():
                errors = (function(model, process, points, steps) - exact) / math.log(2)
                shown.append(f"{float(errors.mean()):+.5f}, {float(errors.square().mean().sqrt()):.5f}")
            print(f"| {timesteps}, {betas} | {name} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
