"""Arguments of public functions: every one is checked by its annotation, and no wrong value gets past it."""

import enum
import inspect
import math
import typing
import warnings
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import printed
import pytest
import torch
from diffusers import DDPMScheduler
from hypothesis import given
from hypothesis import strategies as st
from tables import cases

import diffusers_lrlab as lab
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.registry import Parameter
from diffusers_lrlab.core.signatures import REFUSED, checked, reader
from diffusers_lrlab.data.toy2d import toy_log_prob, toy_points
from diffusers_lrlab.evaluation import distances, frechet, kl
from diffusers_lrlab.preview.schedules import Run, preview
from diffusers_lrlab.preview.timesteps import preview_timesteps
from diffusers_lrlab.schedules import functions

WRONG = {
    "None": None,
    "5": 5,
    "-1": -1,
    "-2.5": -2.5,
    "0": 0,
    "1e300": 1e300,
    "10**400": 10**400,
    "nan": math.nan,
    "inf": math.inf,
    "True": True,
    "zzz": "zzz",
    "empty": "",
    "colon": ":",
    "[]": [],
    "[None]": [None],
    "{}": {},
    "{1: 2}": {1: 2},
    "object": object(),
    "class": int,
    "bytes": b"cosine",
    "1j": 1j,
    "tensor": torch.zeros(2, 3),
    "array of objects": np.array([None, "a"], dtype=object),
    "set": {1},
    "function": len,
}
# Values that are not of these types, whatever their range: they have to be refused, not only survived.
NOT_OF = {
    int: ("-2.5", "nan", "inf", "True", "zzz", "[]", "object", "bytes", "1j", "tensor", "{}"),
    float: ("nan", "True", "zzz", "[]", "object", "bytes", "1j", "tensor", "{}"),
    str: ("5", "nan", "True", "[]", "object", "bytes", "1j", "tensor", "{}"),
    bool: ("5", "0", "nan", "zzz", "[]", "object", "1j", "{}"),
    dict: ("5", "nan", "True", "zzz", "[]", "object", "bytes", "tensor"),
    torch.optim.Optimizer: tuple(set(WRONG)),
    torch.device: ("-1", "nan", "zzz", "[]", "object", "tensor", "{}"),
}


def optimizer():
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, 2))], lr=1e-3)


def points():
    return np.random.default_rng(0).normal(size=(20, 2))


def noise_scheduler():
    return DDPMScheduler()


def config():
    return lab.TrainingConfig()


def sampler():
    return lab.get_timestep_sampler("uniform", 100)


def weighting():
    return lab.get_loss_weighting("min_snr", DDPMScheduler())


ABOUT = {"name": "made_up", "description": "d", "source": "s"}
CURVE = {"name": "cosine", "base_lr": 1e-3, "num_warmup_steps": 2, "num_training_steps": 20}
SCHEDULER = {"name": "cosine", "optimizer": optimizer, "num_training_steps": 20}
SETS = {"first": points, "second": points}
REAL = {"real": points, "generated": points}
DRAWN = {"timesteps": lambda: torch.tensor([1, 2]), "losses": lambda: torch.ones(2)}

# Valid arguments of what is exported, beyond the defaults; a callable makes one of them anew.
VALID = {
    "FinderConfig": {},
    "LabError": {},
    "MLPDenoiser": {},
    "PointDDPMPipeline": {"denoiser": lambda: lab.MLPDenoiser(hidden_size=4), "scheduler": noise_scheduler},
    "Progress": {"update": 1, "total_updates": 10},
    "TrainingConfig": {},
    "find_lr": {"config": config},
    "get_loss_weighting": {"name": "min_snr", "noise_scheduler": noise_scheduler},
    "get_momentum_scheduler": SCHEDULER | {"name": "demon"},
    "get_optimizer": {"name": "adamw", "params": lambda: [torch.nn.Parameter(torch.zeros(2, 2))], "lr": 1e-3},
    "get_scheduler": SCHEDULER,
    "get_timestep_sampler": {"name": "uniform", "num_train_timesteps": 100},
    "load_toy_dataset": {"name": "moons", "n": 10},
    "lr_curve": CURVE,
    "train": {"config": config},
    **{name: ABOUT for name in lab.__all__ if name.startswith("register_")},
    **{name: {} for name in lab.__all__ if name.startswith("list_")},
}
# What comes beside the exports: methods of what they give, and what the pages import from inside.
BESIDE = {
    "TimestepSampler.probabilities": (lambda: sampler().probabilities, {"update": 3}),
    "TimestepSampler.sample": (lambda: sampler().sample, {"batch_size": 4, "update": 0}),
    "TimestepSampler.loss_weights": (lambda: sampler().loss_weights, {"timesteps": DRAWN["timesteps"], "update": 0}),
    "TimestepSampler.observe": (lambda: sampler().observe, DRAWN),
    "LossWeighting.weights": (lambda: weighting().weights, {"timesteps": DRAWN["timesteps"]}),
    "Parameter": (lambda: Parameter, {"name": "a", "kind": int, "default": 1, "help": "h"}),
    "PointDDPMPipeline()": (
        lambda: lab.PointDDPMPipeline(lab.MLPDenoiser(hidden_size=4), DDPMScheduler(num_train_timesteps=4)),
        {"num_points": 4, "num_inference_steps": 2},
    ),
    "MLPDenoiser()": (
        lambda: lab.MLPDenoiser(hidden_size=4),
        {"sample": lambda: torch.zeros(3, 2), "timestep": 1},
    ),
    "toy_points": (lambda: toy_points, {"name": "moons", "n": 10}),
    "toy_log_prob": (lambda: toy_log_prob, {"name": "moons"}),
    "knn_kl": (lambda: kl.knn_kl, REAL),
    "histogram_kl": (lambda: kl.histogram_kl, REAL),
    "energy_distance": (lambda: distances.energy_distance, SETS),
    "squared_mmd": (lambda: distances.squared_mmd, SETS),
    "sliced_wasserstein": (lambda: distances.sliced_wasserstein, SETS),
    "exact_wasserstein": (lambda: distances.exact_wasserstein, SETS),
    "median_bandwidth": (lambda: distances.median_bandwidth, {"points": points}),
    "density_and_coverage": (lambda: distances.density_and_coverage, REAL),
    "frechet_distance": (lambda: frechet.frechet_distance, SETS),
    "preview.Run": (lambda: Run, {"num_updates": 20}),
    "preview": (lambda: preview, {"spec": "cosine", "run": lambda: Run(20)}),
    "preview_timesteps": (
        lambda: preview_timesteps,
        {"samplers": lambda: ["uniform"], "weightings": lambda: [], "num_updates": 5, "num_train_timesteps": 50}
        | {"prediction_type": "epsilon"},
    ),
}
SCHEDULES = [name for name in dir(functions) if name.startswith("get_") and name.endswith("_schedule")]

# Their files import nothing of ours, so they raise what `LabError` is a kind of.
FREE_OF_US = ("MLPDenoiser", "PointDDPMPipeline", "MLPDenoiser()", "PointDDPMPipeline()")
ANYTHING = {("LabError", "args")}


def subject(name):
    """A public callable, and valid arguments for it."""
    if name in BESIDE:
        make, valid = BESIDE[name]
        return make(), valid
    if name in SCHEDULES:
        return getattr(lab, name), {"optimizer": optimizer, "num_training_steps": 20}
    return getattr(lab, name), VALID[name]


def parameters_of(name):
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(subject(name)[0]).parameters.values()
    return [parameter.name for parameter in found if parameter.kind not in kinds]


def hints_of(name):
    """The types that a parameter's annotation names, by parameter."""
    function = subject(name)[0]
    if inspect.isclass(function):
        function = function.__init__
    holder = subject(name)[0] if name in ("TrainingConfig", "FinderConfig") else inspect.unwrap(function)
    if name in SCHEDULES:
        return {each.name: each.annotation for each in inspect.signature(function).parameters.values()}
    return typing.get_type_hints(holder, localns={"torch": torch, "datasets": Any})


def members(hint):
    inner = typing.get_args(hint)
    return [each for one in inner for each in members(one)] if type(None) in inner or typing.get_origin(hint) is typing.Union else [hint]


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch):
    with printed.registrations_undone(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of momentum and learning rate decaying twice, and the like
        yield


def test_all_that_is_exported_is_attacked():
    missing = {name for name in lab.__all__ if callable(getattr(lab, name))} - VALID.keys()
    assert not missing, f"Give valid arguments of {missing} in VALID, so that all wrong ones are tried."


@cases("name", [*VALID, *BESIDE, *SCHEDULES], ids=str)
def test_no_wrong_value_ends_in_an_error_of_pythons_or_torchs(name):
    allowed = ValueError if name in FREE_OF_US else LabError
    bad = []
    for parameter in parameters_of(name):
        for label, value in WRONG.items():
            function, valid = subject(name)
            kwargs = {key: each() if inspect.isfunction(each) else each for key, each in valid.items()}
            default = inspect.signature(function).parameters[parameter].default
            if value is default or (name in ("train", "find_lr") and value is None):
                continue
            try:
                function(**{**kwargs, parameter: value})
            except allowed as error:
                assert str(error).strip()
            except Exception as error:
                bad.append(f"{parameter}={label}: {type(error).__name__}: {error}")
    assert not bad, f"{name}: {len(bad)}: " + "\n".join(bad)
