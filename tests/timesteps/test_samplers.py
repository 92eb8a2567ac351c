"""Timestep samplers: what holds for all of them, and each density against a form of its own."""

import functools
import math

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler, VQDiffusionScheduler
from scipy import integrate, stats
from scipy.special import logit
from tables import cases

from diffusers_lrlab import LabError, get_timestep_sampler
from diffusers_lrlab.timesteps.bands import TimestepLR, band_of_update
from diffusers_lrlab.timesteps.noise_levels import noise_levels
from diffusers_lrlab.timesteps.registries import DRAWS, TIMESTEP_SAMPLERS

UPDATES = 40


def make(name, num=1000, **kwargs):
    if name == "infonoise":
        kwargs = {"warmup_updates": 1, "refresh_every": 1, "min_count": 1, **kwargs}
    sampler = get_timestep_sampler(name, num_train_timesteps=num, num_training_steps=UPDATES, **kwargs)
    if sampler.follows_losses:
        # Often enough, so that every timestep has its history.
        for _ in range(20):
            sampler.observe(torch.arange(num), torch.linspace(0.1, 1, num))
    return sampler


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@cases("num", [1000, 37, 1])
@cases("name", TIMESTEP_SAMPLERS)
def test_probabilities_are_a_distribution_at_every_update(name, num):
    if num == 1 and "restricted" in TIMESTEP_SAMPLERS[name].traits and name != "range":
        with pytest.raises(LabError, match="band|num_clusters|holds none"):
            make(name, num)
        return
    sampler = make(name, num)
    updates = [*range(UPDATES), UPDATES, 10 * UPDATES, 10**9]
    table = sampler.probabilities(np.array(updates))
    assert table.shape == (len(updates), num)
    assert table.dtype == torch.float64
    assert (table >= 0).all()
    assert (table.sum(dim=1) - 1).abs().max() < 1e-12
    for row, update in zip(table, updates, strict=True):
        assert row.equal(sampler.probabilities(update))
    assert sampler.probabilities(np.array([[0, 3, 5], [3, UPDATES, 0]]))[1, 0].equal(table[3])
    if name != "banded":
        assert table[-1].equal(table[UPDATES]), "it stays where it is past the end"


def chance_of(counts, probabilities):
    """The p-value of a chi-square test of such counts; cells in which less than 5 are expected are one."""
    expected = probabilities * counts.sum()
    assert (counts[expected == 0] == 0).all()
    parts = [np.append(each[expected >= 5], each[expected < 5].sum()) for each in (counts, expected)]
    return stats.chisquare(*(part[parts[1] > 0] for part in parts)).pvalue


@pytest.mark.slow
@cases("draw", DRAWS)
@cases("name", TIMESTEP_SAMPLERS)
def test_many_draws_have_the_density(name, draw):
    sampler, num, update = make(name, draw=draw), 200_000, UPDATES // 2
    drawn = sampler.sample(num, update, seeded())
    if draw == "antithetic":
        drawn = drawn[: num // 2]  # the others follow from these
    assert chance_of(np.bincount(drawn.numpy(), minlength=1000), sampler.probabilities(update).numpy()) > 1e-6


@cases("draw", DRAWS)
@cases("name", TIMESTEP_SAMPLERS)
def test_draws_follow_from_the_generator(name, draw):
    sampler = make(name, draw=draw)
    first, again, other = (sampler.sample(65, 7, seeded(seed)) for seed in (3, 3, 4))
    assert first.equal(again)
    assert not first.equal(other)
    assert first.dtype == torch.int64
    assert first.shape == (65,)
    torch.manual_seed(3)
    assert sampler.sample(65, 7).equal(first), "torch's own generator does as well"
    for update in (7, UPDATES, 3):  # whatever was drawn before
        assert sampler.sample(40, update, seeded()).equal(make(name, draw=draw).sample(40, np.int64(update), seeded()))
    sampler.probabilities(7).zero_()  # which are the caller's own
    assert sampler.sample(65, 7, seeded(3)).equal(first)


def test_uniform_draws_are_those_of_diffusers_scripts():
    assert make("uniform").sample(64, 0, seeded()).equal(torch.randint(0, 1000, (64,), generator=seeded()))


@cases("name", TIMESTEP_SAMPLERS)
def test_two_samplers_draw_timesteps_of_the_same_rank(name):
    uniform = make("uniform").sample(500, UPDATES, seeded())
    other = make(name, draw="independent").sample(500, UPDATES, seeded())
    order = uniform.argsort(stable=True)
    steps = other[order].diff()[uniform[order].diff() > 0]
    assert (steps >= 0).all()


@cases("name", TIMESTEP_SAMPLERS)
@cases("update", [0, UPDATES // 2, UPDATES])
def test_unbiased_weights_give_back_the_uniform_mean(name, update):
    if "restricted" in TIMESTEP_SAMPLERS[name].traits:
        with pytest.raises(LabError, match="never draws some timesteps"):
            make(name, unbiased=True)
        return
    sampler = make(name, unbiased=True)
    weights = sampler.loss_weights(torch.arange(1000), update)
    weights = torch.ones(1000) if weights is None else weights
    losses = torch.rand(1000, generator=seeded(), dtype=torch.float64)
    # float32 weights reach 1e-6; a weight of 1e8 at a timestep that is never drawn counts as little as any other.
    assert (sampler.probabilities(update) * weights.double() * losses).sum() == pytest.approx(losses.mean().item(), rel=1e-6)
    if name != "loss_second_moment":
        assert make(name).loss_weights(torch.arange(1000), update) is None


# --- draws that depend on each other ---------------------------------------------------------------------------------


def test_one_draw_in_each_part_of_the_density():
    sampler = make("logit_normal", draw="stratified")
    drawn = sampler.sample(64, 0, seeded()).sort().values
    upper, parts = sampler.probabilities(0).cumsum(0)[drawn], torch.arange(64) / 64
    assert (upper > parts - 1e-9).all()
    assert (upper - sampler.probabilities(0)[drawn] < parts + 1 / 64 + 1e-9).all()


def test_places_have_nothing_to_do_with_timesteps():
    sampler, generator = make("stratified"), seeded()
    means = torch.stack([sampler.sample(8, 0, generator) for _ in range(4000)]).double().mean(dim=0)
    # The standard error of each mean is 288 / sqrt(4000).
    assert (means - 499.5).abs().max() < 5 * 288.7 / math.sqrt(4000)


@cases("count", [1, 2, 7, 64])
def test_antithetic_pairs_lie_opposite(count):
    drawn = make("antithetic").sample(count, 0, seeded())
    pairs = count // 2
    assert (drawn[:pairs] + drawn[count - pairs :] == 999).all()


# --- densities -------------------------------------------------------------------------------------------------------

LEVELS = noise_levels(DDPMScheduler(num_train_timesteps=50))
CENTRE = (np.arange(50) + 0.5) / 50


def by_integral(density):
    """Mass of each of 50 equal parts of [0, 1]."""
    return np.array([integrate.quad(density, t / 50, (t + 1) / 50)[0] for t in range(50)])


def by_nearest(cdf, centres):
    """Probability of the values that lie nearest to each of rising centres, without those outside of their range."""
    middles = (centres[1:] + centres[:-1]) / 2
    edges = np.concatenate([[2 * centres[0] - middles[0]], middles, [2 * centres[-1] - middles[-1]]])
    mass = np.diff(cdf(edges))
    return mass / mass.sum()


def mode_density(scale, num=2_000_000):
    u = (np.arange(num) + 0.5) / num
    return np.histogram(1 - u - scale * (np.cos(np.pi * u / 2) ** 2 - 1 + u), 50, (0, 1))[0] / num


QUARTER_AND_REST = functools.partial(np.interp, xp=[-3, -2, -1], fp=[0, 0.25, 1])
LOG_SIGMA = -0.5 * np.log(LEVELS.snr)
GAUSSIAN = stats.norm.pdf(np.arange(50) / 50, 0.3, 0.3)
# What the density should be and how exactly it is known.
EXPECTED = {
    **dict.fromkeys(("uniform", "stratified", "antithetic"), (np.full(50, 1 / 50), 1e-15)),
    "logit_normal:mean=0.3,std=0.8": (by_integral(lambda u: stats.norm.pdf(logit(u), 0.3, 0.8) / (u * (1 - u))), 1e-9),
    "mode": (mode_density(1.29), 1e-5),
    "mode:scale=-0.5": (mode_density(-0.5), 1e-5),
    # The middle of a part stands for its mean.
    "cosine_map": (by_integral(lambda u: 2 / (np.pi - 2 * np.pi * u + 2 * np.pi * u**2)), 1e-5),
    "truncated_normal:mean=0.2": (stats.norm.pdf(CENTRE, 0.2, 0.25) / stats.norm.pdf(CENTRE, 0.2, 0.25).sum(), 1e-12),
    "beta:alpha=0.85": (np.diff(stats.beta.cdf(np.arange(51) / 50, 0.85, 1)), 1e-12),
    "piecewise:densities=[1|3],low=-3,high=-1": (by_nearest(QUARTER_AND_REST, LOG_SIGMA), 1e-12),
    "speed:k=2": (np.array([2.0] * 35 + [1.0] * 15) / 85, 1e-12),
    "range:low=0.1,high=0.5": (np.array([0] * 5 + [1 / 20] * 20 + [0] * 25), 1e-15),
    "snr_range:min_snr=2,max_snr=50": (((LEVELS.snr >= 2) & (LEVELS.snr <= 50)) / 50, None),
    "clts_static": (GAUSSIAN / GAUSSIAN.sum(), 1e-12),
}


@cases("spec", EXPECTED)
def test_densities_against_forms_of_their_own(spec):
    expected, tolerance = EXPECTED[spec]
    found = get_timestep_sampler(spec, noise_scheduler=DDPMScheduler(num_train_timesteps=50)).probabilities(0).numpy()
    if tolerance is None:
        expected, tolerance = expected / expected.sum(), 1e-12
        assert 0 < (expected > 0).sum() < 50
    assert found == pytest.approx(expected, abs=tolerance)


def test_bands_take_turns_as_often_as_they_are_wide():
    starts = np.array([0, 100, 400, 1000])
    bands = band_of_update(np.arange(10_000), starts)
    assert np.bincount(bands) / 10_000 == pytest.approx([0.1, 0.3, 0.6], abs=2e-3)
    shares = [(bands[start : start + 100] == 0).mean() for start in range(0, 9000, 97)]
    assert max(abs(share - 0.1) for share in shares) < 3 / 100
    sampler = make("banded", num_bands=3, edges=[0.1, 0.4])
    for update in range(20):
        expected = np.zeros(1000)
        first, last = starts[bands[update]], starts[bands[update] + 1]
        expected[first:last] = 1 / (last - first)
        assert sampler.probabilities(update).numpy() == pytest.approx(expected, abs=1e-15)


def test_bands_have_rates_and_weights_have_losses():
    banded, weight = (TimestepLR(form, [0.5, 2.0], [0.25]) for form in ("banded", "weight"))
    assert weight.weights(8).tolist() == [0.5] * 2 + [2.0] * 6
    assert TimestepLR("weight", [2.0], []).weights(4).tolist() == [2.0] * 4
    # Multiples of the golden ratio: 0.62, 0.24, 0.85, 0.47, 0.09 and 0.71 of the way.
    assert banded.lr_factors(np.arange(6), 8).tolist() == [2.0, 0.5, 2.0, 2.0, 0.5, 2.0]
    assert banded.weights(8) is None
    assert weight.lr_factors(np.arange(6), 8) is None


# --- limits of parameters --------------------------------------------------------------------------------------------

EXTREMES = (1e-300, 0.5, 1e300, -1e300)


def extremes(parameter):
    yield from (value for value in (*map(float, parameter.interval.bounds), *EXTREMES) if value in parameter.interval)


LIMITS = [
    pytest.param(name, parameter.name, value, id=f"{name} {parameter.name}={value:g}")
    for name, entry in TIMESTEP_SAMPLERS.items()
    for parameter in entry.parameters
    if parameter.kind is float
    for value in extremes(parameter)
]


@cases(("name", "parameter", "value"), LIMITS)
def test_what_is_allowed_gives_a_distribution_or_says_why_not(name, parameter, value):
    try:
        sampler = make(name, 60, **{parameter: value})
    except LabError as error:
        assert f"{value:g}" in str(error) or repr(value) in str(error)  # noqa: PT017
        return
    for update in (0, 5, UPDATES):
        probabilities = sampler.probabilities(update)
        assert (probabilities >= 0).all()
        assert probabilities.sum().item() == pytest.approx(1, abs=1e-12)
        assert (probabilities[sampler.sample(100, update, seeded())] > 0).all()


def test_unbiased_weights_of_a_narrow_density_are_numbers_or_refused():
    """A timestep that is never drawn in truth is one that no weight makes up for, as in a restricted range."""
    with pytest.raises(LabError, match="unbiased=True cannot hold"):
        make("clts_static:sigma=0.02", unbiased=True)
    sampler = make("clts_static:sigma=0.06", unbiased=True)
    weights = sampler.loss_weights(torch.arange(1000), UPDATES).double()
    assert (sampler.probabilities(UPDATES) * weights).sum().item() == pytest.approx(1, rel=1e-6)


@cases("num", [5, 7, 38, 60])
def test_easy_to_hard_is_never_an_update_late(num):
    """Part k joins at the first update at or after (k - 1) / (K - 1) of the ramp, in whole numbers."""
    for updates in (*range(1, 60), 1000):
        sampler = get_timestep_sampler("easy_to_hard", num, updates, num_clusters=5, ramp_share=0.5)
        table = sampler.probabilities(np.arange(updates + 1)) > 0
        stages = [min(1 + 2 * update * 4 // updates, 5) for update in range(updates + 1)]
        assert table.sum(dim=1).tolist() == [-(-stage * num // 5) for stage in stages]
        assert table[:, -1].all()


# --- wrong input -----------------------------------------------------------------------------------------------------


@cases("update", [-1, 2.5, "5", np.array([0, -1])], ids=str)
def test_updates_are_counts(update):
    with pytest.raises(LabError, match="it is the number of optimizer updates done so far"):
        make("clts").probabilities(update)


@cases(
    ("arguments", "words"),
    [
        ({"name": "clts:after=uniform"}, "after='uniform'.*no effect"),
        ({"name": "snr_range:min_snr=1e6,max_snr=1e7"}, "whose SNR goes from"),
        ({"name": "piecewise:densities=[]"}, "got no densities"),
        ({"name": "piecewise:low=2,high=1"}, "Make high larger than low"),
        ({"num_train_timesteps": None}, "How many timesteps"),
        ({"num_training_steps": None}, "give num_training_steps"),
        ({"num_train_timesteps": 999, "noise_scheduler": DDPMScheduler()}, "has, 1000"),
        ({"noise_scheduler": VQDiffusionScheduler(4)}, "Scheduler has no alphas_cumprod"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(LabError, match=words):
        get_timestep_sampler(**{"name": "clts", "num_train_timesteps": 1000, "num_training_steps": 10, **arguments})


@cases("name", [name for name, entry in TIMESTEP_SAMPLERS.items() if "epsilon" in entry.traits])
@cases(
    ("scheduler", "words"),
    [
        (DDPMScheduler(prediction_type="sample"), "high noise is the hard end"),
        (FlowMatchEulerDiscreteScheduler(), "velocity of flow matching is as hard to predict at high noise"),
    ],
)
def test_a_premise_that_does_not_hold_is_warned_of(name, scheduler, words):
    with pytest.warns(UserWarning, match=words):
        get_timestep_sampler(name, num_training_steps=10, noise_scheduler=scheduler)
    get_timestep_sampler(name, num_training_steps=10, noise_scheduler=DDPMScheduler())  # a warning would be an error
