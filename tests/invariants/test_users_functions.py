"""Registered functions that misbehave: a run ends with an error that names the function, its file and line.

Each is tried by `lrlab train` in this process, so that whatever is not explained fails the test with its traceback.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from printed import registrations_undone
from registrations import restored
from tables import cases

import diffusers_lrlab as lab
from diffusers_lrlab.averaging.forms import EMA_FORMS
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core import plugins
from diffusers_lrlab.data.toy2d import TOY_DATASETS
from diffusers_lrlab.evaluation.metrics import METRICS
from diffusers_lrlab.hub.records import read_record
from diffusers_lrlab.models.registry import DENOISERS
from diffusers_lrlab.objective.noise import NOISES
from diffusers_lrlab.optimizers.entries import OPTIMIZERS
from diffusers_lrlab.schedules.registries import MOMENTUM_SCHEDULERS, SCHEDULERS
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS
from diffusers_lrlab.training.kinds import KINDS

FILE = Path(__file__).parents[1] / "scripts" / "misbehaving.py"
OPTIONS = {
    "lr_scheduler": SCHEDULERS,
    "momentum_scheduler": MOMENTUM_SCHEDULERS,
    "timestep_sampler": TIMESTEP_SAMPLERS,
    "loss_weighting": LOSS_WEIGHTINGS,
    "noise": NOISES,
    "optimizer": OPTIMIZERS,
    "ema": EMA_FORMS,
    "denoiser": DENOISERS,
    "dataset_name": TOY_DATASETS,
    "data_kind": KINDS,
}
SMALL = {
    "dataset_name": "dino",
    "max_train_steps": 4,
    "checkpointing_steps": 2,
    "train_batch_size": 8,
    "num_validation_images": 16,
    "eval_batch_size": 16,
    "distance_samples": 0,
    "ddpm_num_steps": 10,
    "num_inference_steps": 2,
    "lr_warmup_steps": 0,
}
SAYS = {  # beside the name, the file and the line; by the end of the name
    "optimizer_still": "changes nothing",
    "optimizer_lbfgs": "needs a closure",
    "momentum_one_number": "two",
    "noise_global": "global random numbers",
    "denoiser_tied": "again.weight and linear.weight",
    "denoiser_overlapping": "its lower and upper share their memory",
    "denoiser_detached": "gradient",
    "sampler_changes": "traits=('curriculum',)",
    "random": "at the second call",
    "exits": "ended the program (SystemExit",
}
# Methods of what the functions return, which are called from everywhere.
METHODS = ("sampler_state_raises", "optimizer_step_raises", "kind_cannot_sample")


@pytest.fixture(scope="module", autouse=True)
def registered():
    """The functions of the file, as `--import` loads them, for the time of these tests."""
    with registrations_undone(*OPTIONS.values()):
        plugins.load_plugins(str(FILE))
        yield


@pytest.fixture(autouse=True)
def accelerate_begins_anew():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def train(folder, **options):
    """The exit status of a small run by its command, in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    of_kind = {"distance_samples": None} if "data_kind" in options else {}
    given = {**SMALL, **of_kind, **options, "import": FILE, "output_dir": folder}
    known = (f"--{name}={value}" for name, value in given.items() if value is not None)
    return main(["train", *known, "--no_preflight"])


def functions():
    """Option and name of each function of the file: read, since nothing of it is registered yet."""
    text = FILE.read_text(encoding="utf-8")
    names = re.findall(r'^(?:@KINDS\.register|\w+)\("(\w+)", ', text, re.MULTILINE)
    options = {
        **{"schedule": "lr_scheduler", "feedback": "lr_scheduler", "momentum": "momentum_scheduler"},
        **{"sampler": "timestep_sampler", "weighting": "loss_weighting", "toy": "dataset_name", "kind": "data_kind"},
    }
    return [(options.get(name.split("_")[0], name.split("_")[0]), name) for name in names]


def test_there_is_a_case_of_every_registry():
    assert {option for option, _ in functions()} == OPTIONS.keys()
    assert len(functions()) > 50


@pytest.mark.slow
@cases("option, name", functions())
def test_a_run_says_what_is_wrong(option, name, tmp_path, capsys):
    assert train(tmp_path / "run", **{option: name}) == 2
    error = capsys.readouterr().err.split("error: ")[-1]
    assert (repr(name) if name not in METHODS else "Code of the plug-in 'misbehaving'") in error
    assert re.search(r"misbehaving\.py:\d+", error), error
    assert all(text in error for end, text in SAYS.items() if name.endswith(end)), error
    record = tmp_path / "run" / "lrlab" / "run.json"
    if record.exists():  # it began
        run = json.loads(record.read_text())["run"]
        assert (run["status"], run["error"].partition(": ")[2]) == ("failed", error.strip())


def test_a_part_of_the_parameters_a_tensor_as_rate_and_a_metric_that_is_nan_are_told(tmp_path, capsys):
    def own(params, lr):
        return torch.optim.AdamW([parameter for parameter in params if parameter.dim() == 1], lr=torch.tensor(lr))

    about = {"description": "of a test", "source": "this test"}
    with restored(OPTIMIZERS, METRICS):
        lab.register_optimizer("of_biases", **about)(own)
        lab.register_metric("undefined", **about, facts={"form": "points"})(lambda real, generated: np.float32("nan"))
        assert train(tmp_path / "run", optimizer="of_biases", distance_samples=16) == 0
    said = capsys.readouterr()
    told = "the optimizer trains 5 of 10 tensors of the model (1,026 of 296,450 parameters); the others keep their values."
    assert f"warning: {told}" in said.err
    assert "warning: the metric 'undefined' is nan, and is left out of the record." in said.err
    assert "as expected, within the rounding of the optimizer's tensors (1.2e-07)." in said.out
    results = read_record(tmp_path / "run")["train"]["results"]
    assert "kl" in results
    assert "undefined" not in results
