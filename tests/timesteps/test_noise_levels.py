"""Noise levels under ddpm and flow matching; densities and weights against integrals, published forms and diffusers."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from registrations import restored
from tables import cases
from test_samplers import chance_of

from diffusers_lrlab import LabError, get_loss_weighting, get_timestep_sampler
from diffusers_lrlab.data.options import BatchLayout
from diffusers_lrlab.objective.objective import Objective
from diffusers_lrlab.timesteps.noise_levels import PREDICTIONS, NoiseLevels, flow_levels, flow_sigmas, noise_levels
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS
from diffusers_lrlab.timesteps.sampling import TimestepSampler
from diffusers_lrlab.timesteps.weighting import LossWeighting
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.resolve import objective_spec, resolve_config

T = 1000
FLOW, SHIFTED = FlowMatchEulerDiscreteScheduler(T), FlowMatchEulerDiscreteScheduler(T, shift=3.0)
SCHEDULERS = {"flow": FLOW, "shifted": SHIFTED, "ddpm": DDPMScheduler(T)}
FIXED = [name for name, entry in LOSS_WEIGHTINGS.items() if "feedback" not in entry.traits]


BOTH_ENDS = NoiseLevels(np.array([1.0, 0.9, 0.5, 0.1, 0.0]))
MANY = NoiseLevels(np.linspace(1, 0, 40))


def test_the_levels_of_flow_matching():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    levels = flow_levels(scheduler)
    sigma = scheduler.sigmas[:1000].double().numpy()[::-1]
    np.testing.assert_allclose(levels.snr, ((1 - sigma) / sigma) ** 2, rtol=1e-9, atol=1e-12)
    assert (np.diff(levels.snr) < 0).all()
    of_data, of_noise = (flow_levels(FlowMatchEulerDiscreteScheduler(), of_data) for of_data in (True, False))
    np.testing.assert_allclose(of_data.snr[1:], of_noise.snr[:-1], rtol=1e-3)
    for each in (of_data, of_noise):
        assert np.isfinite(each.snr).all()
        assert np.isfinite(each.log_sigma_borders).all()


def test_both_ends_are_safe_and_nothing_else_is_moved():
    assert BOTH_ENDS.snr[1:].tolist() == [0.9 / (1 - 0.9), 1.0, 0.1 / 0.9, 0.0]
    assert BOTH_ENDS.snr[0] == pytest.approx(1e12, rel=1e-3)
    assert BOTH_ENDS.inner_alphas_cumprod[1:4].tolist() == [0.9, 0.5, 0.1]
    assert BOTH_ENDS.inner_alphas_cumprod[[0, 4]].tolist() == [1 - 1e-12, 1e-12]
    assert np.isfinite(BOTH_ENDS.log_sigma_borders).all()


@cases("name", LOSS_WEIGHTINGS)
@cases("prediction_type", PREDICTIONS)
def test_weights_are_finite_at_both_ends(name, prediction_type):
    table = LossWeighting(name, LOSS_WEIGHTINGS[name].resolve({}), BOTH_ENDS, prediction_type).table
    assert table.isfinite().all()
    assert (table >= 0).all()


@cases("name", TIMESTEP_SAMPLERS)
def test_densities_are_finite_at_both_ends(name):
    sampler = TimestepSampler(name, TIMESTEP_SAMPLERS[name].resolve({}), MANY, 10)
    for update in (0, 9):
        probabilities = sampler.probabilities(update)
        assert probabilities.sum() == pytest.approx(1)
        assert (probabilities >= 0).all()


@cases("name", [name for name in FIXED if name != "none"])
@cases("scheduler", SCHEDULERS)
def test_one_prediction_has_one_loss_whatever_is_predicted(name, scheduler):
    """Of the data, the noise and the velocity that one predicted velocity implies, with their own weights."""
    levels = noise_levels(SCHEDULERS[scheduler])
    generator = torch.Generator().manual_seed(0)
    data, noise, predicted = torch.randn(3, T, 6, generator=generator, dtype=torch.float64)
    sigma = torch.from_numpy(levels.flow_sigma)[:, None]
    mixed = (1 - sigma) * data + sigma * noise
    errors = {
        "flow_velocity": predicted - (noise - data),
        "sample": mixed - sigma * predicted - data,
        "epsilon": mixed + (1 - sigma) * predicted - noise,
    }
    losses = {
        kind: error.square().mean(1) * get_loss_weighting(name, SCHEDULERS[scheduler], kind).table
        for kind, error in errors.items()
    }
    for kind in ("sample", "epsilon"):  # but for pure noise, where the error of the noise says nothing
        torch.testing.assert_close(losses[kind][:-1], losses["flow_velocity"][:-1], rtol=1e-6, atol=1e-12)


@cases("scheme", ["sigma_sqrt", "cosmap"])
@cases("scheduler", ["flow", "shifted"])
def test_weights_of_stable_diffusion_3_are_diffusers(scheme, scheduler):
    sigmas = SCHEDULERS[scheduler].sigmas[:T]
    expected = compute_loss_weighting_for_sd3(scheme, sigmas).flip(0)
    found = get_loss_weighting(scheme, SCHEDULERS[scheduler]).weights(torch.arange(T))
    torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)  # of float32, which diffusers computes in


def test_a_weighting_without_a_meaning_at_pure_noise_is_refused():
    with restored(LOSS_WEIGHTINGS), np.errstate(divide="ignore"):
        LOSS_WEIGHTINGS.register("inverse", description="1 / SNR of noise", source="a test")(lambda levels: 1 / levels.snr)
        assert get_loss_weighting("inverse", SCHEDULERS["ddpm"]).table.isfinite().all()
        with pytest.raises(LabError, match="timestep 999, whose SNR is 0, a weight of nan .* no meaning there"):
            get_loss_weighting("inverse", FLOW)


BY_NOISE_LEVEL = {  # distribution functions of x = ln(sigma / (1 - sigma)): EDM's ln sigma, and log SNR = -2 x
    "edm_log_normal:p_mean=-0.5,p_std=1": lambda x: scipy.stats.norm.cdf(x, -0.5, 1),
    "laplace:mean=1,scale=0.5": lambda x: scipy.stats.laplace.sf(-2 * x, 1, 0.5),
}


@cases("spec", BY_NOISE_LEVEL)
@cases("scheduler", SCHEDULERS)
def test_densities_over_the_noise_level_are_one_under_every_objective(spec, scheduler):
    sigma = noise_levels(SCHEDULERS[scheduler]).flow_sigma[:-1]
    places = np.log(sigma / (1 - sigma))
    found = get_timestep_sampler(spec, noise_scheduler=SCHEDULERS[scheduler]).probabilities(0).numpy()
    found, expected = found[1 : T - 2], np.diff(BY_NOISE_LEVEL[spec]((places[1:] + places[:-1]) / 2))
    # The noise schedule of ddpm ends where the density has not: the rest is made up for.
    np.testing.assert_allclose(found / found.sum(), expected / expected.sum(), rtol=1e-6, atol=1e-10)


@cases("shift", [1.0, 3.0, 0.5])
def test_densities_over_shares_are_moved_by_the_shift(shift):
    """The probability of a sigma or less is that of its share of the timesteps."""
    scheduler = FlowMatchEulerDiscreteScheduler(T, shift=shift)
    sampler = get_timestep_sampler("logit_normal:mean=0.8", noise_scheduler=scheduler)
    sigma = flow_sigmas(scheduler)
    share = sigma / (shift - (shift - 1) * sigma)
    expected = scipy.stats.norm.cdf(scipy.special.logit(share), 0.8, 1)
    np.testing.assert_allclose(sampler.probabilities(0).numpy().cumsum(), expected, atol=2e-6)


@pytest.mark.filterwarnings("ignore:.* assumes that high noise is easy")
@cases("name", TIMESTEP_SAMPLERS)
def test_traits_say_which_densities_are_over_the_noise_level(name):
    """The others have one probability for each timestep, whatever its noise."""
    entry = TIMESTEP_SAMPLERS[name]
    if "feedback" in entry.traits:
        return
    tables = [
        get_timestep_sampler(name, num_training_steps=10, noise_scheduler=each).probabilities(7) for each in (FLOW, SHIFTED)
    ]
    assert torch.equal(*tables) == ("noise_level" not in entry.traits)


@pytest.mark.filterwarnings("ignore:'clts'")
@cases("share", [0.0, 0.3, 1.0])
def test_a_curriculum_by_the_noise_rate_is_its_integral(share):
    """`1 - lambda + lambda (1 - rate)^q`, with the rate of the variance-preserving state of the same SNR."""
    sampler = get_timestep_sampler("clts:noise_rate_exponent=2", T, 100, noise_scheduler=SHIFTED)
    sigmas = flow_sigmas(SHIFTED)

    def density(tau):
        sigma = 3 * tau / (1 + 2 * tau)
        rate = sigma / math.hypot(sigma, 1 - sigma)
        return 1 - share + share * (1 - rate) ** 2

    whole, _ = scipy.integrate.quad(density, 0, 1)
    found = sampler.probabilities(round(100 * share)).numpy().cumsum()
    for timestep in (99, 499, 899):
        tau = sigmas[timestep] / (3 - 2 * sigmas[timestep])
        assert found[timestep] == pytest.approx(scipy.integrate.quad(density, 0, tau)[0] / whole, abs=1e-3)


# weighting_scheme of diffusers' scripts, its arguments, and the sampler that is the same; their u falls with the noise.
SCHEMES = [
    ("none", {}, "uniform"),
    ("logit_normal", {"logit_mean": 0.7, "logit_std": 0.5}, "logit_normal:mean=-0.7,std=0.5"),
    ("mode", {"mode_scale": 1.29}, "mode:scale=1.29"),
    ("mode", {"mode_scale": -0.8}, "mode:scale=-0.8"),
]


@cases(("scheme", "arguments", "spec"), SCHEMES)
def test_draws_of_diffusers_functions_are_of_our_density(scheme, arguments, spec):
    """A chi-square test of 200,000 draws, as diffusers' scripts turn them into entries of the table."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # older versions take no generator
        u = compute_density_for_timestep_sampling(scheme, 200_000, **arguments)
    entries = (u * T).long().clamp(max=T - 1)
    found = torch.bincount(T - 1 - entries, minlength=T).view(50, -1).sum(1).numpy()
    probabilities = get_timestep_sampler(spec, noise_scheduler=FLOW).probabilities(0).view(50, -1).sum(1).numpy()
    assert chance_of(found, probabilities) > 1e-3


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

TIMESTEPS = [0, 1, 50, 100, 200, 300, 500, 700, 998, 999]


def closed_form(name, prediction_type, snr):
    """The weight on the plain squared error of the prediction."""
    if name == "none" and prediction_type == "v_prediction":
        return 1.0
    return ON_IMAGES[name](snr) / {"epsilon": snr, "sample": 1, "v_prediction": 1 + snr}[prediction_type]


# From diffusers' float32 table, so that nothing but the form is tested.
ALPHAS = DDPMScheduler().alphas_cumprod.double().numpy()
SNR = ALPHAS / (1 - ALPHAS)


@cases("prediction_type", PREDICTION_TYPES)
@cases("name", ON_IMAGES)
def test_weights_and_those_of_a_run_with_its_losses_own_are_the_closed_forms(name, prediction_type):
    scheduler = DDPMScheduler(prediction_type=prediction_type)
    weights = get_loss_weighting(name, scheduler).weights(torch.tensor(TIMESTEPS))
    assert weights.dtype == torch.float32
    expected = [closed_form(name, prediction_type, snr) for snr in SNR[TIMESTEPS]]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    spec = objective_spec(resolve_config(TrainingConfig(loss_weighting=name, prediction_type=prediction_type)))
    process = spec.make_process()
    objective = Objective.of(spec, process, BatchLayout(10), 100, torch.device("cpu"), gather=None)
    of_run = objective.weights(torch.tensor(TIMESTEPS), 0)
    assert (of_run is None) == (name == "none")
    of_losses = process.built_in_weights[TIMESTEPS] * (1 if of_run is None else of_run.numpy())
    np.testing.assert_allclose(of_losses, expected, rtol=1e-6)


@cases("prediction_type", PREDICTION_TYPES)
@cases("name", LOSS_WEIGHTINGS)
def test_normalized_weights_have_mean_1(name, prediction_type):
    plain = get_loss_weighting(name, DDPMScheduler(), prediction_type)
    normalized = get_loss_weighting(name, DDPMScheduler(), prediction_type, normalize=True)
    assert normalized.table.mean().item() == pytest.approx(1, rel=1e-6)
    torch.testing.assert_close(normalized.table, plain.table / plain.table.mean(), rtol=1e-6, atol=0)


def test_weights_are_limited_before_the_mean_is_divided_out():
    form = np.array([closed_form("debiased", "epsilon", snr) for snr in SNR])
    cut = np.minimum(form, 3)
    assert 0 < (form > 3).sum() < 1000
    np.testing.assert_allclose(get_loss_weighting("debiased:max_weight=3", DDPMScheduler()).table, cut, rtol=1e-9)
    both = get_loss_weighting("debiased", DDPMScheduler(), max_weight=3, normalize=True)
    np.testing.assert_allclose(both.table, cut / cut.mean(), rtol=1e-9)
    assert both.table.max() < 3
    limited = get_loss_weighting("debiased:min_snr=0.5", DDPMScheduler()).table[TIMESTEPS]
    np.testing.assert_allclose(limited, np.maximum(SNR[TIMESTEPS], 0.5) ** -0.5, rtol=1e-9)


ZERO = DDPMScheduler(rescale_betas_zero_snr=True)


@cases("prediction_type", ["sample", "v_prediction"])
@cases("name", ON_IMAGES)
def test_pure_noise_is_weighed_by_the_limit(name, prediction_type):
    """There the error of the image and that of the velocity are one; only that of the noise says nothing any more."""
    expected = closed_form(name, prediction_type, 1e-20)
    assert get_loss_weighting(name, ZERO, prediction_type).table[-1].item() == pytest.approx(expected, abs=1e-9)


def test_what_no_model_predicts_is_refused():
    with pytest.raises(LabError, match="'x0'; known: epsilon, sample, v_prediction"):
        get_loss_weighting("none", DDPMScheduler(), "x0")
