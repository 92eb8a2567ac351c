"""The sharpness of the held-out loss."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler

from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.evaluation.landscape import sharpness
from diffusers_lrlab.evaluation.validation_loss import ValidationLoss
from diffusers_lrlab.models.mlp_denoiser import MLPDenoiser
from diffusers_lrlab.objective.ddpm import DDPM


def test_sharpness_is_the_largest_eigenvalue():
    torch.manual_seed(3)
    model = MLPDenoiser(dimension=2, hidden_size=4, embedding_size=4, num_layers=1).double()
    scheduler = DDPMScheduler(num_train_timesteps=10)
    points = torch.randn(50, 2, dtype=torch.float64)
    validation = ValidationLoss(Batch(points), DDPM(scheduler), 50, "cpu")
    validation.noise = validation.noise.double()
    found = sharpness(SimpleNamespace(model=model, validation=validation))
    parameters = list(model.parameters())
    noisy = scheduler.add_noise(points, validation.noise, validation.timesteps)
    loss = (model(noisy, validation.timesteps)[0] - validation.noise).square().mean()
    gradients = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters, create_graph=True)])
    rows = [
        torch.cat([part.flatten() for part in torch.autograd.grad(entry, parameters, retain_graph=True)])
        for entry in gradients
    ]
    eigenvalues = torch.linalg.eigvalsh(torch.stack(rows)).numpy()
    largest = eigenvalues[np.argmax(np.abs(eigenvalues))]
    assert found == pytest.approx(largest, rel=0.02)
