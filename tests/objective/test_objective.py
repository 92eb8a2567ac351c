"""What an update learns from: every sampler with every weighting and every noise; and each noise by itself."""

import itertools
import math
from itertools import cycle

import pytest
import torch
from diffusers import DDPMScheduler
from helpers import seeded
from tables import cases

from diffusers_lrlab.core.streams import block_randn
from diffusers_lrlab.data.options import BatchLayout
from diffusers_lrlab.objective.noise import NOISES, immiscible, offset, pyramid
from diffusers_lrlab.objective.objective import Objective
from diffusers_lrlab.objective.processes import DDPM
from diffusers_lrlab.timesteps.bands import TIMESTEP_LRS
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.resolve import objective_spec, resolve_config

INFONOISE = "infonoise:num_bins=3,warmup_updates=2,refresh_every=1,min_count=1,ema_decay=0.0"
IMAGES = torch.linspace(-1, 1, 8 * 16).view(8, 1, 4, 4)


def make_objective(process=None, **options):
    spec = objective_spec(resolve_config(TrainingConfig(ddpm_num_steps=20, max_train_steps=10, **options)))
    return Objective.of(spec, process or spec.make_process(), BatchLayout(8), 10, torch.device("cpu"), gather=None)


ROWS = [*zip(TIMESTEP_SAMPLERS, cycle(LOSS_WEIGHTINGS), cycle(["epsilon", "sample", "v_prediction"]), strict=False)]


@cases(("sampler", "weighting", "prediction_type"), ROWS, ids=[" ".join(row) for row in ROWS])
def test_samplers_go_with_weightings_and_noises(sampler, weighting, prediction_type):
    options = {"timestep_sampler": sampler, "loss_weighting": weighting, "prediction_type": prediction_type}
    for noise in NOISES:
        objective = make_objective(noise=noise, **options)
        for update in (0, 9):
            timesteps = objective.draw(update)
            weights = objective.weights(timesteps, update)
            assert objective.is_weighted or weights is None
            if weights is not None:
                assert weights.isfinite().all()
                assert (weights >= 0).all()
            (part,) = objective.noise(update, IMAGES)
            assert part.shape == IMAGES.shape
            assert part.isfinite().all()
            before = objective.weighting.table.clone()
            objective.observe(timesteps, torch.rand(8))
            assert objective.weighting.table.equal(before) == ("feedback" not in LOSS_WEIGHTINGS[weighting].traits)


@cases("weighting", LOSS_WEIGHTINGS)
def test_where_the_loss_has_the_weight_0_the_weights_are_finite(weighting):
    """Where nothing is left of the data, an error of the predicted image is no error of the noise."""
    process = DDPM(DDPMScheduler(20, prediction_type="sample", rescale_betas_zero_snr=True))
    assert process.built_in_weights[-1] == 0
    objective = make_objective(process, loss_weighting=weighting)
    weights = objective.weights(torch.arange(20), 0)
    assert weights is None or weights.isfinite().all()


@cases("form", TIMESTEP_LRS)
@cases("weighting", LOSS_WEIGHTINGS)
def test_rates_per_timestep_multiply_what_is_there(form, weighting):
    plain = make_objective(loss_weighting=weighting)
    objective = make_objective(loss_weighting=weighting, timestep_lr=f"{form}:factors=[1|3]")
    everything = torch.arange(20)
    before, after = (each.weights(everything, 0) for each in (plain, objective))
    before, after = (torch.ones(20) if weights is None else weights for weights in (before, after))
    factors = torch.tensor([1.0] * 10 + [3.0] * 10) if form == "weight" else torch.ones(20)
    assert after.equal(before * factors)


@cases("weighting", ["none", "p2", "learned_log_variance"])
@cases("objective", ["ddpm:num_steps=20", "flow_matching:num_steps=20,shift=3"])
def test_infonoise_gets_the_error_of_the_data_whatever_weighs_it(objective, weighting):
    """The means of its bins are those of the plain losses over the weight that the prediction's error has on the data's."""
    options = {"objective": objective, "loss_weighting": weighting, "timestep_sampler": INFONOISE}
    spec = objective_spec(resolve_config(TrainingConfig(max_train_steps=10, **options)))
    process = spec.make_process()
    made = Objective.of(spec, process, BatchLayout(20), 10, torch.device("cpu"), gather=None)
    everything = torch.arange(19)  # without pure noise, whose SNR may be 0
    for update in range(3):
        losses = (0.1 + everything / 20) * (1 + 0.3 * torch.sin(everything * (update + 1.0)))
        made.observe(everything, losses)
        snr = torch.from_numpy(process.levels.snr)[:19]
        errors = losses / (snr if objective.startswith("ddpm") else (1 + snr.sqrt()) ** 2)
        bins = made.sampler.state.bins[:19]
        expected = torch.stack([errors[bins == number].mean() for number in range(3)])
        torch.testing.assert_close(made.sampler.state.means, expected, rtol=1e-5, atol=0)


SHAPES = {"colour": (4, 3, 16, 16), "oblong": (3, 1, 8, 20), "one image": (1, 3, 8, 8), "grey": (5, 1, 8, 8)}


def randn(*shape, seed=0):
    return torch.randn(shape, generator=seeded(seed))


def make(name, noise, images, seed=0):
    entry = NOISES[name]
    return entry.factory(noise, images, seeded(seed), **entry.resolve({}))


@cases("shape", SHAPES.values(), ids=SHAPES)
@cases("name", NOISES)
def test_noise_is_a_function_of_batch_and_generator(name, shape):
    noise, images = randn(*shape), randn(*shape, seed=1)
    kept = noise.clone(), images.clone()
    first = make(name, noise, images)
    assert torch.equal(first, make(name, noise, images))
    assert first.shape == shape
    assert first.dtype == torch.float32
    assert first.isfinite().all()
    assert torch.equal(noise, kept[0])
    assert torch.equal(images, kept[1])


@cases("name", NOISES)
def test_noise_has_mean_0_and_is_not_constant(name):
    noise = make(name, randn(200, 1, 8, 8), randn(200, 1, 8, 8, seed=1))
    means = noise.flatten(1).mean(dim=1)
    assert means.mean().abs() < 4 * means.std() / math.sqrt(200)
    assert noise.flatten(1).std(dim=1).min() > 0.5


@cases("seed", range(5))
def test_the_assignment_has_the_smallest_sum_of_distances(seed):
    noise, images = randn(5, 1, 2, 2, seed=seed), randn(5, 1, 2, 2, seed=100 + seed)
    given = immiscible(noise, images)
    order = [next(index for index in range(5) if torch.equal(noise[index], row)) for row in given]

    def total(order):
        return sum(math.dist(images[place].flatten(), noise[index].flatten()) for place, index in enumerate(order))

    best = min(itertools.permutations(range(5)), key=total)
    assert tuple(order) == best


@cases("shape", SHAPES.values(), ids=SHAPES)
def test_offset_adds_one_number_to_each_image_and_channel(shape):
    noise = randn(*shape)
    added = offset(noise, None, seeded(), 0.5) - noise
    constants = added.mean(dim=(2, 3), keepdim=True)
    torch.testing.assert_close(added, constants.expand(shape), rtol=0, atol=1e-6)
    assert len(constants.unique()) == constants.numel()
    # 20,000 independent constants: their variance is known to 1 in 100.
    noise = offset(randn(20_000, 1, 4, 4), None, seeded(1), 0.5)
    assert noise.mean(dim=(2, 3)).var().item() == pytest.approx(1 / 16 + 0.25, rel=0.05)


@cases("shape", SHAPES.values(), ids=SHAPES)
@cases("num_levels", [1, 2, 10])
def test_pyramid_noise_has_the_mean_square_of_plain_noise(shape, num_levels):
    noise = pyramid(randn(*shape), None, seeded(1), 0.8, num_levels)
    # The means of images count: they are noise too, and x_t must have as much as its SNR says.
    torch.testing.assert_close(noise.square().mean(), torch.ones(()))


def test_pyramid_noise_has_more_power_at_low_frequencies_and_ends_at_one_pixel():
    plain = randn(100, 1, 16, 16)
    made = [pyramid(plain, None, seeded(1), discount, 10) for discount in (1e-3, 0.3, 0.6, 0.9)]
    variances = [torch.nn.functional.avg_pool2d(noise, 4).var().item() for noise in made]
    assert variances[0] == pytest.approx(1 / 16, rel=0.1)
    assert variances == sorted(variances)
    assert variances[-1] > 5 / 16
    levels = {num: pyramid(plain, None, seeded(1), 0.8, num) for num in (3, 4, 100)}
    assert torch.equal(levels[4], levels[100])
    assert not torch.equal(levels[3], levels[4])


GLOBAL_BATCH = 24  # one and a half of the blocks that noise is drawn in


def global_noise(name, processes, accumulation, update=7):
    """The noise of the whole global batch, put together from what every process has of it."""
    images = randn(GLOBAL_BATCH, 1, 6, 4, seed=5)
    config = resolve_config(TrainingConfig(noise=name, seed=3))
    layouts = [
        BatchLayout(GLOBAL_BATCH // (processes * accumulation), accumulation, processes, rank) for rank in range(processes)
    ]
    shares = [torch.cat([images[place.start : place.stop] for place in layout.positions()]) for layout in layouts]
    whole = torch.full_like(images, math.nan)
    for layout, share in zip(layouts, shares, strict=True):

        def gather(values, share=share):
            assert torch.equal(values, share)
            return torch.cat(shares)

        spec = objective_spec(config)
        objective = Objective.of(spec, spec.make_process(), layout, 100, torch.device("cpu"), gather)
        parts = objective.noise(update, share)
        for place, part in zip(layout.positions(), parts, strict=True):
            whole[place.start : place.stop] = part
    return whole


@cases(("processes", "accumulation"), [(1, 4), (2, 1), (3, 2)])
@cases("name", NOISES)
def test_noise_does_not_depend_on_how_the_batch_is_shared_out(name, processes, accumulation):
    assert torch.equal(global_noise(name, processes, accumulation), global_noise(name, 1, 1))


@cases("name", NOISES)
def test_the_noise_of_training_is_that_of_the_entry(name):
    """Made of the noise that plain training would have had, for the whole global batch."""
    plain = block_randn(3, "noise", 7, range(GLOBAL_BATCH), (1, 6, 4), "cpu")
    assert torch.equal(global_noise("gaussian", 1, 1), plain)
    whole = global_noise(name, 2, 2)
    assert not torch.equal(global_noise(name, 2, 2, update=8), whole)
    if name == "immiscible":
        assert torch.equal(whole, immiscible(plain, randn(GLOBAL_BATCH, 1, 6, 4, seed=5)))
    if name == "offset":
        torch.testing.assert_close((whole - plain).std(dim=(2, 3)), torch.zeros(GLOBAL_BATCH, 1), rtol=0, atol=1e-6)
