"""Consistency of runs and the loss between them."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from small_studies import write_spec

from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.evaluation.landscape import barrier, curvature, losses_between, sharpness
from diffusers_lrlab.evaluation.validation_loss import ValidationLoss
from diffusers_lrlab.models.mlp_denoiser import MLPDenoiser
from diffusers_lrlab.objective.ddpm import DDPM
from diffusers_lrlab.study.analysis.consistency import consistency
from diffusers_lrlab.study.runs.context import StudyContext
from diffusers_lrlab.study.runs.results import StudyFolder
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import load_spec

pytestmark = pytest.mark.usefixtures("bare")


# --- consistency and the loss between runs ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_seeds(home, stacked):
    """Runs of one arm on one data set with their results, and where they are."""
    context = StudyContext(StudyFolder(stacked), quiet=True)
    runs = [run for run in expand(load_spec(str(write_spec(home)))) if (run.arm, run.dataset) == ("constant", "dino")]
    return runs, context.folder.results(runs), context


def test_a_run_and_itself_are_no_distance_apart(two_seeds):
    runs, (result, _), context = two_seeds
    twin = copy.deepcopy(result)
    twin.seed = 1
    (row,) = consistency(runs, [result, twin], context)
    assert row["distance"] == 0 == row["ratio"]
    assert row["distance_of_unrelated_starts"] > 0.5
    assert row["loss_barrier"] == pytest.approx(0, abs=1e-6)
    assert row["curvature_of_the_loss"] == pytest.approx(0, abs=1e-4)


def test_networks_of_another_size_are_compared_by_seed(two_seeds):
    runs, results, context = two_seeds
    others = copy.deepcopy(results)
    for result in others:
        result.arm = "wide"
        result.record["train"]["num_parameters"] += 1
    rows = {
        row["between"]: row for row in consistency(runs, results, context) + consistency(runs, results + others[:1], context)
    }
    between = rows["constant and wide, by seed"]
    assert (between["pairs"], between["distance"]) == (1, 0)
    assert "loss_barrier" not in between
    assert "seeds of wide" not in rows


def test_runs_that_diverged_are_left_out(two_seeds):
    runs, results, context = two_seeds
    lost = copy.deepcopy(results[1])
    lost.status = "diverged"
    assert consistency(runs, [results[0], lost], context) == []


def test_losses_along_a_line():
    """Of one weight from -1 to 1: a parabola, two valleys with a hill of height 1 between them, and a slope."""
    model = torch.nn.Linear(1, 1, bias=False)
    first, second = ({"weight": torch.full((1, 1), end)} for end in (-1.0, 1.0))
    x = np.linspace(-1, 1, 11)
    bowl = losses_between(model, first, second, lambda model: model.weight.square().item())
    np.testing.assert_allclose(bowl, x**2, atol=1e-6)
    assert barrier(bowl) == 0
    assert curvature(bowl) == pytest.approx(8, rel=1e-5)  # of (2 s - 1)^2
    assert model.weight.item() == 1
    hill = losses_between(model, first, second, lambda model: (model.weight.item() ** 2 - 1) ** 2)
    assert barrier(hill) == pytest.approx(1)
    slope = losses_between(model, first, second, lambda model: 3 * model.weight.item(), num_points=5)
    assert slope == pytest.approx([-3, -1.5, 0, 1.5, 3])
    assert barrier(slope) == pytest.approx(0, abs=1e-12)
    assert curvature(slope) == pytest.approx(0, abs=1e-12)
    assert barrier(np.array([0.0, 4.0, 2.0])) == 3


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
