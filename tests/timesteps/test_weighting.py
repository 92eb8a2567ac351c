"""Loss weightings against their published forms, written down here in terms of the signal-to-noise ratio."""

import math
import re

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.data.layout import BatchLayout
from diffusers_lrlab.objective.objective import Objective
from diffusers_lrlab.timesteps.loss_weights import get_loss_weighting, list_loss_weightings
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.resolve import objective_spec, resolve_config

PREDICTION_TYPES = ["epsilon", "sample", "v_prediction"]

# On the squared error of the image, at the defaults of the parameters.
ON_IMAGES = {
    "none": lambda snr: snr,
    "min_snr": lambda snr: min(snr, 5),
    "soft_min_snr": lambda snr: 4 * snr / (4 + snr),
    "max_snr": lambda snr: max(snr, 5),
    "truncated_snr": lambda snr: max(snr, 1),
    "p2": lambda snr: snr / (1 + snr),
    "debiased": math.sqrt,
    "edm": lambda snr: (1 / snr + 0.5**2) / (math.sqrt(1 / snr) * 0.5) ** 2,
    # On the velocity of flow matching: at a fraction of noise of 1 / (1 + sqrt(SNR)), the error of the image is its square.
    "sigma_sqrt": lambda snr: (1 + math.sqrt(snr)) ** 4,
    "cosmap": lambda snr: 2 / math.pi * (1 + math.sqrt(snr)) ** 4 / (1 + snr),
}
LEARNED = [name for name, entry in LOSS_WEIGHTINGS.items() if "feedback" in entry.traits]
FIXED = [name for name in LOSS_WEIGHTINGS if name not in LEARNED]

TIMESTEPS = [0, 1, 50, 100, 200, 300, 500, 700, 998, 999]


def closed_form(name, prediction_type, snr):
    """The weight on the plain squared error of the prediction."""
    if name == "none" and prediction_type == "v_prediction":
        return 1.0
    return ON_IMAGES[name](snr) / {"epsilon": snr, "sample": 1, "v_prediction": 1 + snr}[prediction_type]


def signal_to_noise(timestep, scheduler=None):
    """Of `DDPMScheduler()`, from its float32 table so that nothing but the form is tested."""
    alpha = (scheduler or DDPMScheduler()).alphas_cumprod[timestep].double().item()
    return alpha / (1 - alpha)


def test_there_is_a_closed_form_of_every_weighting():
    assert [*ON_IMAGES, *LEARNED] == [*LOSS_WEIGHTINGS]
    assert list_loss_weightings() == [*LOSS_WEIGHTINGS, *LOSS_WEIGHTINGS.aliases]


@cases("prediction_type", PREDICTION_TYPES)
@cases("name", FIXED)
def test_weights_are_the_closed_forms(name, prediction_type):
    scheduler = DDPMScheduler(prediction_type=prediction_type)
    weights = get_loss_weighting(name, scheduler).weights(torch.tensor(TIMESTEPS))
    assert weights.dtype == torch.float32
    expected = [closed_form(name, prediction_type, signal_to_noise(timestep)) for timestep in TIMESTEPS]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


@cases(
    ("spec", "form"),
    [
        ("min_snr:gamma=1", lambda snr: min(snr, 1) / snr),
        ("max_snr:gamma=2", lambda snr: max(snr, 2) / snr),
        ("soft_min_snr:gamma=1", lambda snr: 1 / (snr + 1)),
        ("p2:gamma=2,k=3", lambda snr: 1 / (3 + snr) ** 2),
        ("p2:gamma=0", lambda snr: 1),
        ("debiased:min_snr=0.5", lambda snr: 1 / math.sqrt(max(snr, 0.5))),
        ("edm:sigma_data=2", lambda snr: (1 / snr + 4) / (4 / snr) / snr),
    ],
)
def test_parameters_are_those_of_the_papers(spec, form):
    weights = get_loss_weighting(spec, DDPMScheduler()).table[TIMESTEPS]
    np.testing.assert_allclose(weights, [form(signal_to_noise(timestep)) for timestep in TIMESTEPS], rtol=1e-9)


class TinyModel(torch.nn.Module):
    """Knows the timestep, so that gradients of different ones are not parallel."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.kernel = torch.nn.Parameter(torch.randn(1, 1, 3, 3, generator=generator) / 3)
        self.bias = torch.nn.Parameter(torch.zeros(10))

    def forward(self, noisy_images, timesteps):
        predicted = torch.nn.functional.conv2d(noisy_images, self.kernel, padding=1)
        bias = self.bias[timesteps * 10 // 1000].view(-1, 1, 1, 1)
        return type("Output", (), {"sample": predicted + bias})


def plain_errors(model, scheduler, images, noise, timesteps):
    """The unweighted squared error of each image, in float64 and without the library."""
    alpha = scheduler.alphas_cumprod[timesteps].double().view(-1, 1, 1, 1)
    noisy = alpha.sqrt() * images + (1 - alpha).sqrt() * noise
    target = {
        "epsilon": noise,
        "sample": images,
        "v_prediction": alpha.sqrt() * noise - (1 - alpha).sqrt() * images,
    }[scheduler.config.prediction_type]
    return (model(noisy.float(), timesteps).sample - target).square().mean(dim=(1, 2, 3))


def objective(layout, **options):
    config = resolve_config(TrainingConfig(**options))
    spec = objective_spec(config)
    process = spec.make_process()
    return Objective.of(spec, process, layout, 100, torch.device("cpu"), gather=lambda values: values), process


@cases("micro_batches", [1, 3])
@cases("prediction_type", PREDICTION_TYPES)
@cases("name", FIXED)
def test_the_gradient_is_the_weighted_mean_of_those_of_images(name, prediction_type, micro_batches):
    """The weights of training, on the losses of training, against closed forms on plain errors."""
    layout = BatchLayout(6 // micro_batches, micro_batches)
    weights_of, process = objective(layout, loss_weighting=name, prediction_type=prediction_type)
    scheduler = process.scheduler
    generator = torch.Generator().manual_seed(2)
    images, noise = torch.randn(2, 6, 1, 5, 5, generator=generator)
    timesteps = torch.tensor([5, 100, 250, 400, 700, 999])
    model = TinyModel()
    weights = weights_of.weights(timesteps, 0)
    assert (weights is None) == (name == "none")
    for part in (slice(place.start, place.stop) for place in layout.positions()):
        losses = process.losses(model, Batch(images[part]), noise[part], timesteps[part])
        ((losses if weights is None else losses * weights[part]).mean() / micro_batches).backward()

    errors = plain_errors(model, scheduler, images, noise, timesteps)
    forms = [closed_form(name, prediction_type, signal_to_noise(t, scheduler)) for t in timesteps]
    gradients = [torch.autograd.grad(error, [*model.parameters()], retain_graph=True) for error in errors]
    for index, parameter in enumerate(model.parameters()):
        expected = sum(form * gradient[index] for form, gradient in zip(forms, gradients, strict=True)) / 6
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@cases("prediction_type", PREDICTION_TYPES)
@cases("name", LOSS_WEIGHTINGS)
def test_normalized_weights_have_mean_1(name, prediction_type):
    plain = get_loss_weighting(name, DDPMScheduler(), prediction_type)
    normalized = get_loss_weighting(name, DDPMScheduler(), prediction_type, normalize=True)
    assert normalized.table.mean().item() == pytest.approx(1, rel=1e-6)
    torch.testing.assert_close(normalized.table, plain.table / plain.table.mean(), rtol=1e-6, atol=0)


def test_the_largest_weight_is_cut_before_the_mean_is_divided_out():
    form = np.array([closed_form("debiased", "epsilon", signal_to_noise(timestep)) for timestep in range(1000)])
    cut = np.minimum(form, 3)
    assert 0 < (form > 3).sum() < 1000
    np.testing.assert_allclose(get_loss_weighting("debiased:max_weight=3", DDPMScheduler()).table, cut, rtol=1e-9)
    both = get_loss_weighting("debiased", DDPMScheduler(), max_weight=3, normalize=True)
    np.testing.assert_allclose(both.table, cut / cut.mean(), rtol=1e-9)
    assert both.table.max() < 3


ZERO = DDPMScheduler(rescale_betas_zero_snr=True)


# What the forms in ON_IMAGES tend to where SNR falls to 0.
LIMITS_ON_IMAGES = {
    "none": 0,
    "min_snr": 0,
    "soft_min_snr": 0,
    "max_snr": 5,
    "truncated_snr": 1,
    "p2": 0,
    "debiased": 0,
    "edm": 4,
    "sigma_sqrt": 1,
    "cosmap": 2 / math.pi,
}


@cases("prediction_type", ["sample", "v_prediction"])
@cases("name", FIXED)
def test_pure_noise_is_weighed_by_the_limit(name, prediction_type):
    """There the error of the image and that of the velocity are one; only that of the noise says nothing any more."""
    plain_velocity = (name, prediction_type) == ("none", "v_prediction")
    expected = 1 if plain_velocity else LIMITS_ON_IMAGES[name]
    assert get_loss_weighting(name, ZERO, prediction_type).table[-1].item() == pytest.approx(expected, abs=1e-9)


def test_weights_have_the_shape_of_the_timesteps():
    weighting = get_loss_weighting("min_snr", DDPMScheduler())
    timesteps = torch.tensor([[1, 50, 999], [300, 0, 500]])
    assert weighting.weights(timesteps).shape == (2, 3)
    assert torch.equal(weighting.weights(timesteps)[1], weighting.weights(timesteps[1]))


@cases(
    ("name", "kwargs", "text"),
    [
        ("min_snr:gamma=0", {}, "gamma=0 of 'min_snr': must be a number in (0, inf)"),
        ("none", {"max_weight": 0}, "max_weight=0"),
        ("none", {"normalize": 1}, "normalize=1"),
        (3, {}, "got 3"),
    ],
)
def test_wrong_arguments(name, kwargs, text):
    with pytest.raises(LabError, match=re.escape(text)):
        get_loss_weighting(name, DDPMScheduler(), **kwargs)
    with pytest.raises(LabError, match="'x0'; known: epsilon, sample, v_prediction"):
        get_loss_weighting("none", DDPMScheduler(), "x0")
