"""InfoNoise against code of its own in float64, the density that it leaves behind, and Curriculum Sampling."""

import math

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from scipy import integrate
from tables import cases

from diffusers_lrlab import LabError, get_loss_weighting, get_timestep_sampler
from diffusers_lrlab.timesteps.noise_levels import noise_levels

SCHEDULERS = {
    "flow": FlowMatchEulerDiscreteScheduler(),
    "flow, shift 3": FlowMatchEulerDiscreteScheduler(shift=3.0),
    "noise": DDPMScheduler(),
    "velocity": DDPMScheduler(prediction_type="v_prediction", beta_schedule="squaredcos_cap_v2"),
    "zero terminal SNR": DDPMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True),
}
QUICK = "infonoise:warmup_updates=1,refresh_every=1,min_count=1,ema_decay=0.0,uniform_share=0.0"


def weights_on_data(name):
    """The weight that the plain loss has on the squared error of the data, and sigma: by each scheduler's own tables."""
    scheduler = SCHEDULERS[name]
    if name.startswith("flow"):
        share = np.sort(scheduler.sigmas[:1000].double().numpy())
        share = np.where(share > 1 - 1e-5, 1.0, share)
        with np.errstate(divide="ignore"):
            return 1 / share**2, share / (1 - share)
    alphas = scheduler.alphas_cumprod.double().numpy()
    with np.errstate(divide="ignore"):
        return (alphas / (1 - alphas) if name == "noise" else 1 / (1 - alphas)), np.sqrt((1 - alphas) / alphas)


def by_hand(sigma, weights, errors, num_bins, onset=0.002):
    """The probabilities of timesteps by the paper's equations, bin by bin: one loss of each timestep, no averages."""
    inside = [t for t in range(len(sigma)) if sigma[t] < 1e11]
    x = [math.log(sigma[t]) for t in inside]
    middles = [(a + b) / 2 for a, b in zip(x, x[1:], strict=False)]
    borders = [2 * x[0] - middles[0], *middles, 2 * x[-1] - middles[-1]]
    width = (borders[-1] - borders[0]) / num_bins
    bins = {}
    for place, t in enumerate(inside):
        bins.setdefault(min(int((x[place] - borders[0]) / width), num_bins - 1), []).append((x[place], errors[t]))
    places, means = zip(*[np.mean(bins[k], axis=0) for k in sorted(bins)], strict=True)
    levels = np.exp(places)
    cubes = [mean / level**3 for mean, level in zip(means, levels, strict=True)]
    pivot = max(level for level, cube in zip(levels, cubes, strict=True) if cube > onset * max(cubes))
    centres = [borders[0] + (k + 0.5) * width for k in range(num_bins)]
    rates = np.exp(np.interp(centres, places, np.log(means / levels**2)))
    loads = np.exp(np.interp(centres, x, [math.log(weights[t]) for t in inside]))
    gates = [math.exp(c) ** 3 / (math.exp(c) ** 3 + pivot**3) for c in centres]
    density = [rate * gate / load for rate, gate, load in zip(rates, gates, loads, strict=True)]
    found = np.zeros(len(sigma))
    for place, t in enumerate(inside):
        for k in range(num_bins):
            low = max(borders[place], borders[0] + k * width)
            high = min(borders[place + 1], borders[0] + (k + 1) * width)
            found[t] += max(high - low, 0.0) * density[k]
    return found / found.sum()


def made_up(sigma, seed=0):
    """Errors of the data that rise with the noise, with luck."""
    return 0.4 / (0.4 / sigma**2 + 1) * np.random.default_rng(seed).uniform(0.5, 2, len(sigma))


@cases("num_bins", [7, 64])
@cases("name", SCHEDULERS)
def test_the_density_is_that_of_its_equations(name, num_bins):
    weights, sigma = weights_on_data(name)
    errors = made_up(sigma)
    sampler = get_timestep_sampler(f"{QUICK},num_bins={num_bins}", noise_scheduler=SCHEDULERS[name])
    sampler.observe(torch.arange(1000), torch.from_numpy(errors * weights))
    expected = by_hand(sigma, weights, errors, num_bins)
    # The schedulers' tables are float32, and so are losses.
    assert sampler.probabilities(0).numpy() == pytest.approx(expected, rel=2e-4, abs=1e-9)
    assert np.ptp(expected) > 1e-3


@cases("name", ["flow", "noise"])
def test_it_is_divided_by_the_weights_of_a_loss_weighting(name):
    weights, sigma = weights_on_data(name)
    errors = made_up(sigma)
    table = get_loss_weighting("p2", SCHEDULERS[name]).table
    sampler = get_timestep_sampler(f"{QUICK},num_bins=16", noise_scheduler=SCHEDULERS[name])
    sampler.losses_are("flow_velocity" if name == "flow" else "epsilon", lambda: table)
    # Where the weight is 0, which is pure noise alone, so is the loss.
    sampler.observe(torch.arange(1000), torch.from_numpy(errors * weights * table.numpy()))
    expected = by_hand(sigma, weights * table.numpy(), errors, 16)
    assert sampler.probabilities(0).numpy() == pytest.approx(expected, rel=2e-4, abs=1e-9)
    plain = get_timestep_sampler(f"{QUICK},num_bins=16", noise_scheduler=SCHEDULERS[name])
    plain.observe(torch.arange(1000), torch.from_numpy(errors * weights))
    assert (plain.probabilities(0) - sampler.probabilities(0)).abs().sum() > 0.1


@cases("shift", [1.0, 3.0, 0.5])
def test_a_shift_moves_timesteps_and_not_the_density_over_sigma(shift):
    """For Gaussian data the error of the best prediction is known, and so is the whole density."""

    def density(x):  # over ln sigma; the weight of the velocity's error on that of the data is ((1 + sigma) / sigma)^2
        sigma = math.exp(x)
        return 0.25 * sigma**2 / (0.25 + sigma**2) / (1 + sigma) ** 2 * sigma**3 / (sigma**3 + pivot**3)

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    sampler = get_timestep_sampler(f"{QUICK},num_bins=500", noise_scheduler=scheduler)
    sigma = noise_levels(scheduler).snr[:-1] ** -0.5
    errors = 0.25 * sigma**2 / (0.25 + sigma**2)
    sampler.observe(torch.arange(999), torch.from_numpy(errors * ((1 + sigma) / sigma) ** 2))
    rates = errors / sigma**3
    pivot = sigma[rates > 0.002 * rates.max()].max()
    total = integrate.quad(density, -12, 12)[0]
    cumulative = sampler.probabilities(0).cumsum(0)
    for level in (0.2, 0.5, 1.0, 2.0, 5.0):
        t = int(np.searchsorted(sigma, level)) - 1
        expected = integrate.quad(density, -12, math.log(sigma[t] * sigma[t + 1]) / 2)[0] / total
        assert cumulative[t].item() == pytest.approx(expected, abs=0.01), level
    assert pivot < 1


@cases("name", SCHEDULERS)
def test_its_density_can_be_held(name):
    sampler = get_timestep_sampler(
        f"{QUICK},num_bins=32".replace("share=0.0", "share=0.01"), noise_scheduler=SCHEDULERS[name]
    )
    assert sampler.held() == ""
    weights, sigma = weights_on_data(name)
    sampler.observe(torch.arange(1000), torch.from_numpy(made_up(sigma) * weights))
    held = get_timestep_sampler(sampler.held(), noise_scheduler=SCHEDULERS[name])
    assert held.probabilities(0).numpy() == pytest.approx(sampler.probabilities(0).numpy(), rel=2e-3, abs=1e-9)
    assert get_timestep_sampler("clts", 10, 10).held() == ""


# --- guards --------------------------------------------------------------------------------------------------------------


def test_it_begins_after_the_warm_up_with_enough_losses_in_every_bin_and_only_at_a_refresh():
    spec = "infonoise:num_bins=4,warmup_updates=4,refresh_every=2,min_count=3,before=logit_normal:mean=1.0"
    sampler, before = get_timestep_sampler(spec, 20), get_timestep_sampler("logit_normal:mean=1.0", 20).probabilities(0)
    everything, losses = torch.arange(20), torch.linspace(0.1, 1, 20)
    most = everything[sampler.state.bins != 0]
    for update in range(1, 13):
        seen = everything if update in (2, 7, 8) else most  # the first bin has one timestep: its third loss is at update 8
        sampler.observe(seen, losses[seen] * (1 + (update > 8) * seen))
        assert sampler.probabilities(0).equal(before) == (update < 8), update
        if update == 9:
            kept = sampler.probabilities(0)
        if update > 9:  # a refresh at 10, of the bins that have new losses
            assert sampler.probabilities(0).equal(kept) == (update < 10), update


def test_means_move_by_the_decay_and_only_with_enough_losses():
    sampler = get_timestep_sampler(
        "infonoise:num_bins=1,warmup_updates=1,refresh_every=1,min_count=2,ema_decay=0.75", 2, noise_scheduler=None
    )
    snr = torch.from_numpy(sampler.levels.snr)
    for errors, expected in (([3.0, 5.0], 4.0), ([8.0], 4.0), ([6.0], 0.75 * 4 + 0.25 * 7), ([math.nan, 1.0], 4.75)):
        timesteps = torch.arange(len(errors))
        sampler.observe(timesteps, torch.tensor(errors) * snr[timesteps].float())
        assert sampler.state.means.item() == pytest.approx(expected, rel=1e-6)


def test_the_gate_opens_above_the_pivot_and_not_below():
    """A reversed gate, or one without it, prefers the least noise, where the rate is highest."""
    weights, sigma = weights_on_data("flow")
    errors = 0.4 / (0.4 / sigma**2 + 1)
    sampler = get_timestep_sampler(QUICK, noise_scheduler=SCHEDULERS["flow"])
    sampler.observe(torch.arange(1000), torch.from_numpy(errors * weights))
    tenths = sampler.probabilities(0).view(10, 100).sum(1)
    assert 2 <= tenths.argmax() <= 5
    assert tenths[0] < 0.01
    assert tenths[-1] < 0.05


@pytest.mark.parametrize(("num_levels", "pivot"), [(1000, 0.36), (100, 1.5)])
def test_the_pivot_depends_on_the_least_noise_level_as_documented(num_levels, pivot):
    """For data of unit variance, whose best prediction has the error sigma^2 / (1 + sigma^2)."""
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=num_levels)
    state = get_timestep_sampler("infonoise", noise_scheduler=scheduler).state
    sigma = state.places.exp()
    assert float(state._pivot((sigma**2 / (1 + sigma**2)).log()).exp()) == pytest.approx(pivot, rel=0.05)


def test_a_saved_state_continues_to_the_same_bits():
    spec = "infonoise:num_bins=8,warmup_updates=3,refresh_every=2,min_count=2"
    whole, first, second = (get_timestep_sampler(spec, 50) for _ in range(3))
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randint(0, 50, (64,), generator=generator), torch.rand(64, generator=generator)) for _ in range(12)]
    for update, batch in enumerate(batches):
        whole.observe(*batch)
        (first if update < 5 else second).observe(*batch)
        if update == 4:
            second.load_state_dict(first.state_dict())
    assert whole.probabilities(0).equal(second.probabilities(0))
    assert not whole.probabilities(0).equal(first.probabilities(0))
    for name, value in whole.state_dict().items():
        assert value.equal(second.state_dict()[name]), name


@cases("before", ["clts", "infonoise", "range", "uniform:draw=stratified", "no_such"])
def test_the_density_before_is_one_that_stays(before):
    with pytest.raises(LabError, match="before=.* of 'infonoise': must be|no_such"):
        get_timestep_sampler("infonoise", 100, 10, before=before)


@cases(
    ("spec", "words"),
    [
        ("piecewise:densities=[]", "got no densities"),
        ("piecewise:densities=[1|-1]", "densities"),
        ("piecewise:low=2,high=1", "Make high larger than low"),
        ("piecewise:low=100,high=101", "gives no timestep any probability"),
        ("piecewise:densities=[0|0]", "gives no timestep any probability"),
    ],
)
def test_densities_that_cannot_be_held(spec, words):
    with pytest.raises(LabError, match=words):
        get_timestep_sampler(spec, 100)


# --- Curriculum Sampling ---------------------------------------------------------------------------------------------------


def test_curriculum_sampling_switches_once():
    """At 60,000 of 150,000 updates, as published."""
    sampler = get_timestep_sampler("logit_normal_then_uniform", 1000, 150_000)
    reverse = get_timestep_sampler("uniform_then_logit_normal", 1000, 150_000)
    middle = get_timestep_sampler("logit_normal:mean=0.8,std=1.0", 1000).probabilities(0)
    flat = torch.full((1000,), 1e-3, dtype=torch.float64)
    for update in (0, 59_999):
        assert torch.allclose(sampler.probabilities(update), middle, rtol=1e-12)
    for update in (60_000, 150_000):
        assert sampler.probabilities(update).equal(flat)
    for update in (0, 89_999):
        assert reverse.probabilities(update).equal(flat)
    for update in (90_000, 150_000):
        assert torch.allclose(reverse.probabilities(update), middle, rtol=1e-12)
    assert sampler.probabilities(np.array([0, 60_000])).shape == (2, 1000)
    assert sampler.loss_weights(torch.arange(9), 70_000) is None
