"""What an update learns from, put together: every sampler with every weighting and every noise."""

from itertools import cycle

import pytest
import torch
from diffusers import DDPMScheduler
from registrations import restored
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.options import BatchLayout
from diffusers_lrlab.objective.noise import NOISES, register_noise
from diffusers_lrlab.objective.objective import Objective
from diffusers_lrlab.objective.processes import DDPM
from diffusers_lrlab.timesteps.bands import TIMESTEP_LRS
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.resolve import objective_spec, resolve_config

INFONOISE = "infonoise:num_bins=3,warmup_updates=2,refresh_every=1,min_count=1,ema_decay=0.0"
IMAGES = torch.linspace(-1, 1, 8 * 16).view(8, 1, 4, 4)


def make_objective(layout=None, **options):
    spec = objective_spec(resolve_config(TrainingConfig(ddpm_num_steps=20, max_train_steps=10, **options)))
    return Objective.of(spec, spec.make_process(), layout or BatchLayout(8), 10, torch.device("cpu"), gather=None)


def test_a_users_noise_draws_from_its_generator_alone():
    with restored(NOISES):
        register = register_noise("own", description="a test's", source="none")
        register(lambda noise, images, generator: noise + 0 * torch.rand(noise.shape))
        with pytest.raises(LabError, match="draws global random numbers"):
            list(make_objective(noise="own").noise(0, IMAGES))


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
    spec = objective_spec(resolve_config(TrainingConfig(max_train_steps=10, loss_weighting=weighting)))
    objective = Objective.of(spec, process, BatchLayout(8), 10, torch.device("cpu"), gather=None)
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
