"""What the steps of the probability-flow ODE do to `exact_kl`: its bias, where the exact answer is known.

    python benchmarks/likelihood_steps.py

The model is the exact one of eight Gaussians, so the KL of the data with the noise of the first timestep is a number that
many steps give; the points are those a run has. Runs integrate in 100 steps.
"""

import math
from types import SimpleNamespace

import numpy as np
import torch
from common import machine, make_parser, parse
from diffusers import DDPMScheduler

_RADIUS, _WIDTH = 3.0, 0.3


class ExactModel:
    """The noise that the best of all models predicts for a mixture of Gaussians of one width."""

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


def main():
    """Prints the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--reference", type=int, default=800, help="steps of what counts as exact")
    options = parse(parser, points=20, reference=40)
    from diffusers_lrlab.data.toy2d import load_toy_dataset, toy_log_prob
    from diffusers_lrlab.evaluation.likelihood import _NoisePrediction, exact_kl, log_likelihood
    from diffusers_lrlab.objective.ddpm import DDPM

    points = load_toy_dataset("eight_gaussians", options.points, 0).with_format("numpy")["x"][:].astype(np.float64)
    angles = torch.arange(8, dtype=torch.float64) * math.pi / 4
    centres = _RADIUS * torch.stack((angles.cos(), angles.sin()), 1)
    process = DDPM(DDPMScheduler())
    model = ExactModel(_NoisePrediction(None, process).log_sigmas, centres, _WIDTH)
    known = toy_log_prob("eight_gaussians")(points)

    def kl(num_steps):
        return exact_kl(known, log_likelihood(model, process, torch.from_numpy(points), num_steps).numpy())

    exact, _ = kl(options.reference)
    print(machine())
    print("| steps | exact_kl, bits | bias, bits | its standard error by the points |\n|---|---|---|---|")
    for num_steps in (50, 100, 200):
        value, error = kl(num_steps)
        print(f"| {num_steps} | {value:.5f} | {value - exact:+.5f} | {error:.5f} |")


if __name__ == "__main__":
    main()
