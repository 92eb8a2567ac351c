"""InfoNoise against code of its own in float64, and when its density begins."""

import math

import numpy as np
import pytest
import torch
from continued_runs import new_run
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from helpers import load_data_once
from registrations import restored
from runs import read_record
from tables import cases

from diffusers_lrlab import LabError, TrainingConfig, get_loss_weighting, get_timestep_sampler, register_loss_weighting
from diffusers_lrlab.timesteps.noise_levels import prediction_type_of
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.resolve import resolve_config

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


@cases(("name", "num_bins"), [*zip(SCHEDULERS, (7, 64, 7, 64, 7), strict=True)])
@cases("weighting", [None, "p2"])
def test_the_density_is_that_of_its_equations(name, num_bins, weighting):
    weights, sigma = weights_on_data(name)
    errors, scheduler = made_up(sigma), SCHEDULERS[name]
    sampler = get_timestep_sampler(f"{QUICK},num_bins={num_bins}", noise_scheduler=scheduler)
    if weighting:
        table = get_loss_weighting(weighting, scheduler).table
        weights = weights * table.numpy()
        sampler.losses_are(prediction_type_of(scheduler), lambda: table)
    # Where the weight is 0, which is pure noise alone, so is the loss.
    sampler.observe(torch.arange(1000), torch.from_numpy(errors * weights))
    expected = by_hand(sigma, weights, errors, num_bins)
    # The schedulers' tables are float32, and so are losses.
    assert sampler.probabilities(0).numpy() == pytest.approx(expected, rel=2e-4, abs=1e-9)
    assert np.ptp(expected) > 1e-3


@cases("name", ["flow, shift 3", "velocity"])
def test_its_density_can_be_held(name):
    spec = f"{QUICK},num_bins=32".replace("share=0.0", "share=0.01")
    sampler = get_timestep_sampler(spec, noise_scheduler=SCHEDULERS[name])
    assert sampler.held() == ""
    weights, sigma = weights_on_data(name)
    sampler.observe(torch.arange(1000), torch.from_numpy(made_up(sigma) * weights))
    held = get_timestep_sampler(sampler.held(), noise_scheduler=SCHEDULERS[name])
    assert held.probabilities(0).numpy() == pytest.approx(sampler.probabilities(0).numpy(), rel=2e-3, abs=1e-9)
    assert get_timestep_sampler("clts", 10, 10).held() == ""


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


@cases("before", ["clts", "uniform:draw=stratified", "no_such"])
def test_the_density_before_is_one_that_stays(before):
    with pytest.raises(LabError, match="before=.* of 'infonoise': must be|no_such"):
        get_timestep_sampler("infonoise", 100, 10, before=before)


FLOW = FlowMatchEulerDiscreteScheduler()
SHORT = "infonoise:num_bins=2,warmup_updates=2,refresh_every=2,min_count=1"


@cases(
    ("guards", "num_updates", "why", "is_unlikely"),
    [
        ("warmup_updates=500,refresh_every=100,num_bins=4", 500, "and update 500. Hint: lower min_count, num_bins", False),
        ("warmup_updates=0,refresh_every=1,num_bins=4", 10, "4 parts with 20 losses each under the density uniform", True),
    ],
)
def test_a_run_in_which_it_cannot_begin_is_refused_and_an_unlikely_one_is_warned(guards, num_updates, why, is_unlikely):
    sampler = get_timestep_sampler(f"infonoise:{guards}", noise_scheduler=FLOW)
    with pytest.raises(LabError, match=f"--timestep_sampler infonoise: must be able to begin in .*{why}"):
        sampler.check_length(num_updates, 8)
    assert ("this run gives the rarest part about" in str(sampler.check_length(num_updates + 1, 8))) == is_unlikely
    assert sampler.check_length(10_000, 8) is None
    assert get_timestep_sampler("loss_second_moment", noise_scheduler=FLOW).check_length(1, 8) is None
    never = get_timestep_sampler("infonoise", noise_scheduler=FLOW, before="piecewise:densities=[1|0],uniform_share=0")
    with pytest.raises(LabError, match="give `before` a density above 0 in every part, or use piecewise"):
        never.check_length(10**6, 8)


def test_noise_levels_that_the_loss_leaves_out_are_not_waited_for():
    with restored(LOSS_WEIGHTINGS):
        register_loss_weighting("lower_half", description="of a test", source="this test")(
            lambda levels: (np.arange(len(levels.snr)) < len(levels.snr) / 2).astype(float)
        )
        options = {"dataset_name": "moons", "max_train_steps": 300, "timestep_sampler": "infonoise"}
        config = resolve_config(TrainingConfig(loss_weighting="lower_half", **options))
        with pytest.raises(LabError, match="30 parts with"):
            make_plan(config, load_data_once(config), None)


def test_a_run_says_whether_it_began(tmp_path, capsys):
    run = new_run(tmp_path, "begun", "constant", 8, timestep_sampler=SHORT, logging_steps=3)
    assert "infonoise: its own density of the timesteps began at update 2." in capsys.readouterr().err
    assert read_record(run)["train"]["timestep_density_began"] == 2
    assert "update 2; `uniform` until then" in (run / "README.md").read_text()
    never = "infonoise:num_bins=64,warmup_updates=2,refresh_every=2,min_count=1"
    run = new_run(tmp_path, "run", "constant", 8, timestep_sampler=never, objective="flow_matching:num_steps=1000")
    printed = capsys.readouterr().out
    assert "warning  'infonoise' keeps the density uniform" in printed
    assert "infonoise: its own density of the timesteps never began; uniform was used for 8 updates." in printed
    assert read_record(run)["train"]["timestep_density_began"] is None
    assert "never: all updates had `uniform`" in (run / "README.md").read_text()
