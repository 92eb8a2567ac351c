"""What the command line says of timesteps, weightings, noise and bands that cannot be: before it looks at any data."""

import re

import pytest
from accelerate.state import AcceleratorState
from helpers import config as small_config
from helpers import image_folder, load_data_once
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.run.train import run_training
from diffusers_lrlab.training.arguments import parse_arguments
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.plan_text import describe_plan
from diffusers_lrlab.training.resolve import resolve_config


@pytest.fixture
def broken_data(tmp_path):
    """A folder of images that cannot be read; where a run that begins to read them would leave something."""
    folder = image_folder(tmp_path / "images", count=10)
    for path in folder.rglob("*.png"):
        path.write_bytes(b"no image")
    small = ["--resolution=8", "--image_channels=1", "--train_batch_size=1", "--num_epochs=1"]
    return [f"--train_data_dir={folder}", f"--cache_dir={tmp_path / 'cache'}", f"--output_dir={tmp_path / 'run'}", *small]


BANDED = "--timestep_lr=banded:factors=[1|2]"

# name -> (arguments, text of the message)
ERRORS = {
    "without effect": (["--timestep_sampler=clts:sigma=0.5,noise_rate_exponent=2"], "no effect with noise_rate_exponent=2"),
    "empty range": (["--timestep_sampler=range:low=0.41,high=0.44", "--ddpm_num_steps=10"], "holds none of the 10"),
    "no density": (["--timestep_sampler=edm_log_normal:p_mean=100"], "no timestep any probability that can be computed"),
    "unbiased bands": ([BANDED, "--timestep_sampler=uniform:unbiased=true"], "unbiased=true of --timestep_sampler"),
    "bands of a curriculum": ([BANDED, "--timestep_sampler=clts"], "uniform, stratified, antithetic"),
    "bands without factors": (["--timestep_lr=banded"], "needs factors, one for each band, such as factors=[0.5|1|2]"),
    "an edge too few": (["--timestep_lr=weight:factors=[1|2|3],edges=[0.2]"], "3 bands meet at 2 edges, not at the 1 of"),
    "more bands than timesteps": (["--timestep_lr=weight:factors=[1|2|3]", "--ddpm_num_steps=2"], "of 2 timesteps"),
    "gradients without bins": (
        ["--timestep_grad_every=5", "--log_timestep_bins=0"],
        "--timestep_grad_every 5 has no effect",
    ),
    "more bins than timesteps": (
        ["--log_timestep_bins=21", "--ddpm_num_steps=20"],
        "--log_timestep_bins 21: must be a whole number in [0, 20], got 21. Hint: --ddpm_num_steps",
    ),
}


@pytest.mark.parametrize("name", ["nothing", *ERRORS])
def test_errors_come_before_data_are_read(broken_data, tmp_path, name):
    arguments, text = ERRORS.get(name, ([], "cannot be read"))
    with pytest.raises(LabError, match=re.escape(text)):
        run_training(parse_arguments([*broken_data, *arguments], ""))
    if name == "nothing":
        AcceleratorState._reset_state(reset_partial_state=True)
    else:
        assert {path.name for path in tmp_path.iterdir()} == {"images"}


def test_gradients_need_held_out_images_that_are_there(tmp_path):
    folder = image_folder(tmp_path / "images", count=4)
    config = small_config(folder, num_validation_images=2, timestep_grad_every=5, max_train_steps=9)
    with pytest.raises(LabError, match="--timestep_grad_every 5: must be left out without"):
        make_plan(config, load_data_once(config), None)


@pytest.mark.slow
@cases(
    ("options", "words"),
    [
        ({"timestep_sampler": "loss_second_moment", "max_train_steps": 100}, "10000 images, and this run sees 6400"),
        ({"timestep_sampler": "loss_second_moment", "max_train_steps": 200}, None),
        ({"noise": "immiscible", "train_batch_size": 1}, "'immiscible' has no effect on updates of a single image"),
        ({"timestep_sampler": "clts", "prediction_type": "sample"}, "high noise is the hard end"),
        ({"timestep_sampler": "laplace", "loss_weighting": "p2"}, None),
        ({"timestep_sampler": "logit_normal", "loss_weighting": "min_snr"}, "more often and 'min_snr' weights them more"),
        ({"timestep_grad_every": 11}, "--timestep_grad_every 11 never comes in 10 updates"),
        ({"timestep_grad_every": 10, "num_validation_images": 31}, "only norms will be measured"),
    ],
    ids=str,
)
def test_the_plan_warns_of_what_has_little_effect(options, words):
    config = resolve_config(TrainingConfig(**{"max_train_steps": 10, **options}))
    described = describe_plan(make_plan(config, load_data_once(config), None))
    assert ("warning" in described) == (words is not None)
    assert (words or "") in described
