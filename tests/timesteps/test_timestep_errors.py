"""What the command line says of timesteps, weightings, noise and bands that cannot be: before it looks at any data."""

import pytest
from accelerate.state import AcceleratorState
from helpers import config as small_config
from helpers import image_folder, load_data_once
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.objective.noise import NOISES
from diffusers_lrlab.run.train import run_training
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_LRS, TIMESTEP_SAMPLERS
from diffusers_lrlab.training.arguments import parse_arguments
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.plan_text import describe_plan
from diffusers_lrlab.training.prepare import prepare
from diffusers_lrlab.training.resolve import resolve_config


@pytest.fixture
def broken_data(tmp_path):
    """A folder of images that cannot be read; where a run that begins to read them would leave something."""
    folder = image_folder(tmp_path / "images", count=10)
    for path in folder.rglob("*.png"):
        path.write_bytes(b"no image")
    small = ["--resolution=8", "--image_channels=1", "--train_batch_size=1", "--num_epochs=1"]
    return [f"--train_data_dir={folder}", f"--cache_dir={tmp_path / 'cache'}", f"--output_dir={tmp_path / 'run'}", *small]


def told(arguments, more=()):
    """The message of a run that cannot start; arguments come as on the command line."""
    with pytest.raises(LabError) as error:
        run_training(parse_arguments([*more, *arguments], ""))
    return str(error.value)


def test_the_data_cannot_be_read(broken_data):
    """So that messages about anything else were made before it was tried."""
    try:
        assert "cannot be read" in told([], broken_data)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def spelled(option, name, hint, known):
    return [f"--{option}={name}"], [f"{name!r}", f"Did you mean {hint!r}?", "Known: ", known]


BANDED = "--timestep_lr=banded:factors=[1|2]"

# name -> (arguments, what the message must contain)
ERRORS = {
    # names
    "unknown sampler": spelled("timestep_sampler", "unifrm", "uniform", "clts_reversed"),
    "unknown weighting": spelled("loss_weighting", "min_sn", "min_snr", "debiased"),
    "unknown noise": spelled("noise", "pyramyd", "pyramid", "offset"),
    "unknown per-timestep learning rate": spelled("timestep_lr", "bandet", "banded", "weight"),
    "unlike any sampler": (["--timestep_sampler=zzz"], ["'zzz'", "Known: ", "uniform"]),
    "kwarg unknown to a sampler": (
        ["--timestep_sampler=clts:sigm=1"],
        ["'clts' does not take 'sigm'", "Did you mean 'sigma'?", "lambda_max"],
    ),
    "kwarg unknown to a noise": (["--noise=gaussian:strength=1"], ["'gaussian' does not take 'strength'"]),
    "kwarg unknown to bands": (["--timestep_lr=banded:factor=[1]"], ["'factor'", "Did you mean 'factors'?"]),
    # values
    "sigma 0": (["--timestep_sampler=clts:sigma=0"], ["sigma=0 of 'clts'", "(0, inf)", "width"]),
    "mu 2": (["--timestep_sampler=clts:mu=2"], ["mu=2 of 'clts'", "[0, 1]"]),
    "negative lambda": (["--timestep_sampler=clts:lambda_max=-0.5"], ["lambda_max=-0.5", "[0, 1]"]),
    "draw": (["--timestep_sampler=uniform:draw=sobol"], ["draw='sobol'", "independent", "stratified", "antithetic"]),
    "std 0": (["--timestep_sampler=logit_normal:std=0"], ["std=0 of 'logit_normal'", "(0, inf)"]),
    "offset of 0": (["--noise=offset:strength=0"], ["strength=0 of 'offset'", "(0, inf)"]),
    "discount 1": (["--noise=pyramid:discount=1"], ["discount=1 of 'pyramid'", "(0, 1)"]),
    "gamma 0": (["--loss_weighting=min_snr:gamma=0"], ["gamma=0 of 'min_snr'", "(0, inf)"]),
    "gamma in words": (["--loss_weighting=min_snr:gamma=much"], ["gamma='much'", "a number in"]),
    "history 0": (["--timestep_sampler=loss_second_moment:history=0"], ["history=0", "[1, inf)"]),
    "sigma without effect": (
        ["--timestep_sampler=clts:sigma=0.5,noise_rate_exponent=2"],
        ["sigma=0.5", "no effect with noise_rate_exponent=2", "Drop one"],
    ),
    # densities that are nothing
    "empty range": (
        ["--timestep_sampler=range:low=0.5,high=0.5"],
        ["low=0.5", "high=0.5", "none of the 1000", "Choose a range"],
    ),
    "range that is upside down": (["--timestep_sampler=range:low=0.9,high=0.1"], ["low=0.9", "high=0.1", "none of the"]),
    "range between two timesteps": (
        ["--timestep_sampler=range:low=0.41,high=0.44", "--ddpm_num_steps=10"],
        ["low=0.41", "high=0.44", "none of the 10"],
    ),
    "empty range of SNR": (
        ["--timestep_sampler=snr_range:min_snr=1e6,max_snr=1e7"],
        ["min_snr=1e+06", "none of the 1000", "goes from 1e+04 down to 4.04e-05"],
    ),
    "density out of sight": (
        ["--timestep_sampler=edm_log_normal:p_mean=100"],
        ["'edm_log_normal'", "100.0", "no timestep any probability", "less extreme"],
    ),
    "more clusters than timesteps": (
        ["--timestep_sampler=easy_to_hard:num_clusters=30", "--ddpm_num_steps=20"],
        ["num_clusters=30", "20 timesteps", "at most 20"],
    ),
    # unbiased where nothing makes up for what is never drawn
    "unbiased range": (["--timestep_sampler=range:unbiased=true"], ["'range'", "unbiased=True cannot hold", "Drop it"]),
    "unbiased bands": (["--timestep_sampler=banded:unbiased=true"], ["'banded'", "unbiased=True cannot hold"]),
    "unbiased growing range": (["--timestep_sampler=easy_to_hard:unbiased=true"], ["'easy_to_hard'", "unbiased=True"]),
    "unbiased sampler in bands": (
        [BANDED, "--timestep_sampler=uniform:unbiased=true"],
        ["--timestep_lr banded", "unbiased=true of --timestep_sampler"],
    ),
    # bands
    "bands of a curriculum": (
        [BANDED, "--timestep_sampler=clts"],
        ["--timestep_lr banded", "--timestep_sampler 'clts'", "uniform, stratified, antithetic", "--timestep_lr weight"],
    ),
    "bands of bands": (
        [BANDED, "--timestep_sampler=banded:num_bands=2"],
        ["--timestep_lr banded", "--timestep_sampler 'banded'", "one of uniform"],
    ),
    "bands without factors": (["--timestep_lr=banded"], ["needs factors", "factors=[0.5|1|2]"]),
    "weights without factors": (["--timestep_lr=weight"], ["needs factors", "factors=[0.5|1|2]"]),
    "factor 0": (["--timestep_lr=banded:factors=[1|0]"], ["factors=[1, 0] of 'banded'", "(0, inf)"]),
    "one factor": (["--timestep_lr=weight:factors=[2]"], ["weight with one factor", "--learning_rate"]),
    "negative factor": (["--timestep_lr=weight:factors=[-1|2]"], ["factors=[-1, 2] of 'weight'", "(0, inf)"]),
    "one factor that is no list": (["--timestep_lr=banded:factors=2"], ["factors=2", "a list of numbers"]),
    "edges that do not rise": (
        ["--timestep_lr=banded:factors=[1|2|3],edges=[0.6|0.4]"],
        ["[0, 600, 400]", "increasing edges"],
    ),
    "edges that are equal": (
        ["--timestep_lr=weight:factors=[1|2|3],edges=[0.5|0.5]"],
        ["[0, 500, 500]", "increasing edges"],
    ),
    "an edge too many": (
        ["--timestep_lr=banded:factors=[1|2],edges=[0.2|0.6]"],
        ["2 bands meet at 1 edges", "edges=[0.2, 0.6]"],
    ),
    "an edge too few": (
        ["--timestep_lr=weight:factors=[1|2|3],edges=[0.2]"],
        ["3 bands meet at 2 edges", "edges=[0.2]"],
    ),
    "edge out of range": (["--timestep_lr=weight:factors=[1|2],edges=[1.5]"], ["edges=[1.5]", "(0, 1)"]),
    "edge at the border": (["--timestep_lr=weight:factors=[1|2],edges=[0]"], ["edges=[0]", "(0, 1)"]),
    "edge without timesteps below it": (
        ["--timestep_lr=weight:factors=[1|2],edges=[0.01]", "--ddpm_num_steps=10"],
        ["of 10 timesteps", "[0, 0]"],
    ),
    "more bands than timesteps": (
        ["--timestep_lr=weight:factors=[1|2|3]", "--ddpm_num_steps=2"],
        ["of 2 timesteps", "fewer bands"],
    ),
    "bands of a sampler without timesteps": (
        ["--timestep_sampler=banded:num_bands=9", "--ddpm_num_steps=8"],
        ["of 8 timesteps", "fewer bands"],
    ),
    # flags that need another
    "kwargs without name": (
        ['--timestep_lr_kwargs={"factors": [1, 2]}'],
        ["--timestep_lr_kwargs", "[1, 2]", "without --timestep_lr", "add that, or leave it out"],
    ),
    "gradients without bins": (
        ["--timestep_grad_every=5", "--log_timestep_bins=0"],
        ["--timestep_grad_every 5 has no effect", "--log_timestep_bins above 0"],
    ),
    "gradients without images": (
        ["--timestep_grad_every=5", "--num_validation_images=0"],
        ["--timestep_grad_every 5 has no effect", "--num_validation_images above 0"],
    ),
    # numbers
    "gradients every 0 updates": (["--timestep_grad_every=0"], ["--timestep_grad_every 0: must be"]),
    "gradients every -1 updates": (["--timestep_grad_every=-1"], ["--timestep_grad_every -1: must be"]),
    "gradients now and then": (["--timestep_grad_every=often"], ["--timestep_grad_every", "'often'"]),
    "negative bins": (["--log_timestep_bins=-1"], ["--log_timestep_bins -1: must be a whole number in [0, 1e5], got -1"]),
    "more bins than timesteps": (
        ["--log_timestep_bins=21", "--ddpm_num_steps=20"],
        ["--log_timestep_bins 21: must be a whole number in [0, 20], got 21. Hint: --ddpm_num_steps"],
    ),
    # twice, or unreadable
    "kwarg in spec and JSON": (
        ["--timestep_sampler=clts:sigma=0.5", '--timestep_sampler_kwargs={"sigma": 0.1}'],
        ["'sigma' is given twice", "0.5", "0.1", "Drop one"],
    ),
    "kwarg twice in a spec": (["--timestep_sampler=clts:sigma=0.5,sigma=0.1"], ["'sigma' is given twice"]),
    "factors in spec and JSON": (
        [BANDED, '--timestep_lr_kwargs={"factors": [3, 4]}'],
        ["'factors' is given twice", "[3, 4]", "Drop one"],
    ),
    "bad JSON": (["--noise_kwargs={strength: 1}"], ["--noise_kwargs", "{strength: 1}", "not valid JSON"]),
    "JSON, but no object": (["--loss_weighting_kwargs=[1, 2]"], ["--loss_weighting_kwargs", "[1, 2]", "JSON object"]),
    "spec without a value": (["--loss_weighting=min_snr:gamma"], ["Cannot read the spec string", "min_snr:gamma"]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_done_is_explained_before_data_is_read(broken_data, tmp_path, name):
    arguments, parts = ERRORS[name]
    message = told(arguments, broken_data)
    for part in parts:
        assert part in message
    assert "cannot be read" not in message
    assert len(message.splitlines()) < 10
    assert {path.name for path in tmp_path.iterdir()} == {"images"}


REGISTRIES = {
    "timestep_sampler": TIMESTEP_SAMPLERS,
    "loss_weighting": LOSS_WEIGHTINGS,
    "timestep_lr": TIMESTEP_LRS,
    "noise": NOISES,
}


@pytest.mark.parametrize("option", REGISTRIES)
def test_a_letter_too_many_is_noticed(broken_data, option):
    """Of every name of every registry, and parameters that no entry takes."""
    from diffusers_lrlab.training.resolve import resolve_config

    for name in REGISTRIES[option]:
        with pytest.raises(LabError) as error:
            resolve_config(parse_arguments([*broken_data, f"--{option}={name}x"], ""))
        assert f"'{name}x'. Did you mean '{name}'?" in str(error.value)
        with pytest.raises(LabError, match=f"'{name}' does not take 'zzz'"):
            resolve_config(parse_arguments([*broken_data, f"--{option}={name}:zzz=1"], ""))


def test_what_is_contradictory_but_possible_is_only_a_warning(monkeypatch, tmp_path):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    arguments = ["--timestep_sampler=logit_normal", "--loss_weighting=min_snr", "--prediction_type=sample"]
    try:
        plan = describe_plan(prepare(parse_arguments([*arguments, f"--output_dir={tmp_path / 'run'}"], ""))[0])
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert "'logit_normal' samples the middle noise levels more often and 'min_snr' weights them more" in plan
    assert "timesteps  sampler logit_normal, weighting min_snr, noise gaussian" in plan


# --- what the data and the length of the run decide ------------------------------------------------------------------


def test_gradients_need_held_out_images_that_are_there(tmp_path):
    folder = image_folder(tmp_path / "images", count=4)
    config = small_config(folder, num_validation_images=2, timestep_grad_every=5, max_train_steps=9)
    with pytest.raises(LabError, match="--timestep_grad_every 5: must be left out without"):
        make_plan(config, load_data_once(config), None)


@pytest.mark.slow
@cases(
    ("options", "words"),
    [
        (
            {"timestep_sampler": "loss_second_moment", "max_train_steps": 100},
            "10000 images, and this run sees 6400",
        ),
        ({"timestep_sampler": "loss_second_moment", "max_train_steps": 200}, None),
        ({"noise": "immiscible", "train_batch_size": 1}, "'immiscible' has no effect on updates of a single image"),
        (
            {"timestep_sampler": "stratified", "train_batch_size": 1},
            "'stratified' has no effect on updates of a single image",
        ),
        ({"timestep_sampler": "stratified", "noise": "immiscible", "train_batch_size": 2}, None),
        ({"timestep_sampler": "clts", "prediction_type": "sample"}, "high noise is the hard end"),
        ({"timestep_sampler": "laplace", "loss_weighting": "min_snr"}, "together they leave"),
        ({"timestep_sampler": "laplace", "loss_weighting": "p2"}, None),
        ({"timestep_grad_every": 11}, "--timestep_grad_every 11 never comes in 10 updates"),
        ({"timestep_grad_every": 10}, None),
        ({"timestep_grad_every": 10, "num_validation_images": 31}, "only norms will be measured"),
    ],
    ids=str,
)
def test_the_plan_warns_of_what_has_little_effect(options, words):
    config = resolve_config(TrainingConfig(**{"max_train_steps": 10, **options}))
    described = describe_plan(make_plan(config, load_data_once(config), None))
    assert ("warning" in described) == (words is not None)
    assert (words or "") in described
