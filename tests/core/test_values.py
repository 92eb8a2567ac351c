"""Allowed values: arguments of public functions, none of which may get a wrong value past its annotation, and intervals."""

import doctest
import enum
import functools
import inspect
import math
import re
import warnings
from fractions import Fraction

import numpy as np
import printed
import pytest
import torch
from diffusers import DDPMScheduler, UNet2DModel
from hypothesis import given
from hypothesis import strategies as st
from tables import cases

import diffusers_lrlab as lab
from diffusers_lrlab.core import values
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.registry import Parameter
from diffusers_lrlab.core.values import COUNT, REFUSED, SEED, Range, checked, read_as
from diffusers_lrlab.data.toy2d import toy_log_prob, toy_points
from diffusers_lrlab.evaluation import distances, features

WRONG = {
    "None": None,
    "5": 5,
    "-2.5": -2.5,
    "0": 0,
    "10**400": 10**400,
    "nan": math.nan,
    "True": True,
    "zzz": "zzz",
    "empty": "",
    "[]": [],
    "{}": {},
    "object": object(),
    "bytes": b"cosine",
    "1j": 1j,
    "tensor": torch.zeros(2, 3),
    "array of objects": np.array([None, "a"], dtype=object),
}
# Values that are not of an annotation, whatever its range: they have to be refused, not only survived.
NOT_OF = {
    "int": ("-2.5", "nan", "True", "zzz", "[]", "object", "bytes", "1j", "tensor", "{}"),
    "float": ("nan", "True", "zzz", "[]", "object", "bytes", "1j", "tensor", "{}"),
    "str": ("5", "nan", "True", "[]", "object", "bytes", "1j", "tensor", "{}"),
    "bool": ("5", "0", "nan", "zzz", "[]", "object", "1j", "{}"),
    "dict[str, typing.Any]": ("5", "nan", "True", "zzz", "[]", "object", "bytes", "tensor"),
    "Optimizer": tuple({*WRONG} - {"None"}),
    "torch.device | str": ("nan", "zzz", "[]", "object", "tensor", "{}"),
}


def optimizer():
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, 2))], lr=1e-3)


def points():
    return np.random.default_rng(0).normal(size=(20, 2))


def noise_scheduler():
    return DDPMScheduler()


def config():
    return lab.TrainingConfig()


def sampler(name="uniform", **kwargs):
    return lab.get_timestep_sampler(name, 100, **kwargs)


def labelled_unet():
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (8,)}
    return UNet2DModel(4, 1, 1, layers_per_block=1, norm_num_groups=2, num_class_embeds=4, **blocks)


def weighting():
    return lab.get_loss_weighting("min_snr", DDPMScheduler())


@functools.wraps(Parameter)
def registered_parameter(**fields):
    """A plug-in's parameter, whose fields are checked when it is registered."""
    with printed.registrations_undone():
        lab.register_schedule(**ABOUT, parameters=(Parameter(**fields),))(lambda *_: 1.0)


ABOUT = {"name": "made_up", "description": "d", "source": "s"}
CURVE = {"name": "cosine", "base_lr": 1e-3, "num_warmup_steps": 2, "num_training_steps": 20}
SCHEDULER = {"name": "cosine", "optimizer": optimizer, "num_training_steps": 20}
SETS = {"first": points, "second": points}
REAL = {"real": points, "generated": points}
DRAWN = {"timesteps": lambda: torch.tensor([1, 2]), "losses": lambda: torch.ones(2)}

# Valid arguments of what is exported, beyond the defaults; a callable makes one of them anew.
VALID = {
    "FinderConfig": {},
    "MLPDenoiser": {},
    "ImagePipeline": {"scheduler": noise_scheduler, "unet": lambda: labelled_unet()},
    "PointDDPMPipeline": {"denoiser": lambda: lab.MLPDenoiser(hidden_size=4), "scheduler": noise_scheduler},
    "Progress": {"update": 1, "total_updates": 10},
    "TrainingConfig": {},
    "find_lr": {"config": config},
    "get_loss_weighting": {"name": "min_snr", "noise_scheduler": noise_scheduler},
    "get_momentum_scheduler": SCHEDULER | {"name": "demon"},
    "get_optimizer": {"name": "adamw", "params": lambda: [torch.nn.Parameter(torch.zeros(2, 2))], "lr": 1e-3},
    "extend": {"run": "no run", "max_train_steps": 10},
    "get_scheduler": SCHEDULER,
    "get_timestep_sampler": {"name": "uniform", "num_train_timesteps": 100},
    "load_image_dataset": {"name": "shapes", "n": 2},
    "load_toy_dataset": {"name": "moons", "n": 10},
    "lr_curve": CURVE,
    "read_study": {"folder": "no study"},
    "run_study": {"spec": "no study", "out": "nowhere"},  # and so an error before anything runs
    "train": {"config": config},
    **{name: ABOUT for name in lab.__all__ if name.startswith("register_")},
    **{name: {} for name in lab.__all__ if name.startswith("list_")},
}
# What comes beside the exports: methods of what they give, and what the pages import from inside.
BESIDE = {
    "TimestepSampler.probabilities": (lambda: sampler().probabilities, {"update": 3}),
    "TimestepSampler.sample": (lambda: sampler().sample, {"batch_size": 4, "update": 0}),
    "TimestepSampler.loss_weights": (
        lambda: sampler("clts", unbiased=True, num_training_steps=9).loss_weights,
        {"timesteps": DRAWN["timesteps"], "update": 0},
    ),
    "TimestepSampler.observe": (lambda: sampler("loss_second_moment").observe, DRAWN),
    "LossWeighting.weights": (lambda: weighting().weights, {"timesteps": DRAWN["timesteps"]}),
    "Parameter": (lambda: registered_parameter, {"name": "a", "kind": int, "default": 1, "help": "h"}),
    "PointDDPMPipeline()": (
        lambda: lab.PointDDPMPipeline(lab.MLPDenoiser(hidden_size=4), DDPMScheduler(num_train_timesteps=4)),
        {"num_points": 4, "num_inference_steps": 2},
    ),
    "ImagePipeline()": (
        lambda: lab.ImagePipeline(DDPMScheduler(num_train_timesteps=4), labelled_unet()),
        {"class_labels": lambda: [0, 2], "num_inference_steps": 2},
    ),
    "MLPDenoiser()": (
        lambda: lab.MLPDenoiser(hidden_size=4),
        {"sample": lambda: torch.zeros(3, 2), "timestep": 1},
    ),
    "toy_points": (lambda: toy_points, {"name": "moons", "n": 10}),
    "toy_log_prob": (lambda: toy_log_prob, {"name": "moons"}),
    "knn_kl": (lambda: distances.knn_kl, REAL),
    "energy_distance": (lambda: distances.energy_distance, SETS),
    "sliced_wasserstein": (lambda: distances.sliced_wasserstein, SETS),
    "density_and_coverage": (lambda: distances.density_and_coverage, REAL),
    "frechet_distance": (lambda: features.frechet_distance, SETS),
}
SCHEDULES = ("get_cosine_schedule", "get_one_cycle_schedule")  # out of functions that one function makes

# Their files import nothing of ours, so they raise what `LabError` is a kind of.
FREE_OF_US = ("MLPDenoiser", "PointDDPMPipeline", "ImagePipeline", "MLPDenoiser()", "PointDDPMPipeline()", "ImagePipeline()")


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
    found = inspect.signature(subject(name)[0]).parameters
    return {name: parameter for name, parameter in found.items() if parameter.kind not in kinds}


def annotation_of(parameter):
    """As text, without `None`."""
    hint = parameter.annotation
    return re.sub(r"typing\.Optional\[(.*)\]| \| None", r"\1", hint.__name__ if inspect.isclass(hint) else str(hint))


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch):
    with printed.registrations_undone(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of momentum and learning rate decaying twice, and the like
        yield


def test_all_that_is_exported_is_attacked():
    missing = {name for name in lab.__all__ if name != "LabError"} - VALID.keys()
    assert not missing, f"Give valid arguments of {missing} in VALID, so that all wrong ones are tried."


@pytest.mark.slow
@cases("name", [*VALID, *BESIDE, *SCHEDULES], ids=str)
def test_no_wrong_value_ends_in_an_error_of_pythons_or_torchs(name):
    allowed = ValueError if name in FREE_OF_US else LabError
    bad, parameters = [], parameters_of(name)
    for parameter in parameters:
        for label, value in WRONG.items():
            function, valid = subject(name)
            kwargs = {key: each() if inspect.isfunction(each) else each for key, each in valid.items()}
            if value is parameters[parameter].default or (name in ("train", "find_lr") and value is None):
                continue
            is_of_another_type = label in NOT_OF.get(annotation_of(parameters[parameter]), ())
            try:
                function(**{**kwargs, parameter: value})
                # NaN is a matter of ranges there: a run refuses it before it starts (test_options.py).
                is_checked_later = name.endswith("Config") and label == "nan"
                if is_of_another_type and not is_checked_later:
                    bad.append(f"{parameter}={label} passes")
            except allowed as error:
                is_named = str(error).startswith(f"{parameter}=") and ": must be " in str(error)
                if not str(error).strip() or (is_of_another_type and allowed is LabError and not is_named):
                    bad.append(f"{parameter}={label}: {error}")
            except Exception as error:
                bad.append(f"{parameter}={label}: {type(error).__name__}: {error}")
    assert not bad, f"{name}: {len(bad)}: " + "\n".join(bad)


@cases("call, expected", [
    (lambda: lab.lr_curve(5, 1e-3, 0, 10), r"name=5 of lr_curve\(\): must be a text, got 5 \(int\)\. Hint: help"),
    (lambda: lab.get_scheduler("cosine", optimizer(), 0, 10, last_epoch=3), "last_epoch=3: must be -1, or 0 or more for an"),
    (lambda: lab.register_schedule("x", description="d", source="s", traits="no_warmup"), "='no_warmup' .*must be tuple"),
    (lambda: lab.get_loss_weighting("min_snr", 5), "int has no alphas_cumprod"),
    (lambda: lab.get_scheduler("cosine", optimizer(), 10**5000, 9), "num_warmup_steps=.a number of about 5000 digits"),
    (lambda: sampler().sample(-3, 0), "batch_size=-3: must be a whole number"),
    (lambda: weighting().weights(torch.ones(2)), "timesteps=torch.float32: must be a tensor of int64"),
])  # fmt: skip
def test_errors_name_argument_value_and_remedy(call, expected):
    with pytest.raises(LabError, match=f"(?s){expected}"):
        call()


class Letters(enum.Enum):
    COSINE = "cosine"


def test_what_stands_for_a_type_is_taken_as_it():
    curve = lab.lr_curve("cosine", 1e-3, 2, 20)
    for stands in (
        {"name": Letters.COSINE},
        {"num_training_steps": np.int64(20)},
        {"num_training_steps": 20.0},
        {"base_lr": np.float32(1e-3)},
    ):
        assert np.allclose(lab.lr_curve(**CURVE | stands), curve)
    assert distances.knn_kl(points().tolist(), points() + 1) == distances.knn_kl(points(), points() + 1)


KINDS = [(int, int), (float, (int, float)), (str, str), (bool, bool), (list[int], list), (int | None, (int, type(None)))]


@given(st.one_of(st.integers(), st.floats(), st.booleans(), st.text(), st.none(), st.lists(st.integers(), max_size=3)))
def test_a_reader_gives_what_it_says_or_refuses(value):
    for hint, kind in KINDS:
        found = read_as(value, hint)
        if found is not REFUSED:
            assert isinstance(found, kind)
            assert found == value
        elif isinstance(value, kind):  # only these two are refused beside what is of another type
            assert isinstance(value, bool) or (hint is float and (value != value or abs(value) > 1e308))


def test_signature_and_help_are_those_of_the_function():
    def plain(a: int, *rest: int, b: str = "x", **others: float) -> str:
        """Help."""
        return f"{a}{rest}{b}{others}"

    wrapped = checked(plain)
    assert inspect.signature(wrapped) == inspect.signature(plain)
    assert wrapped.__doc__ == "Help."
    assert wrapped(1, 2, b="y", c=3) == plain(1, 2, b="y", c=3)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        wrapped()
    assert [*inspect.signature(lab.get_scheduler).parameters][:2] == ["name", "optimizer"]


# --- intervals --------------------------------------------------------------------------------------------------------

INSIDE = {
    "[0, 1)": (0, 0.0, 1 - 2**-53, np.float32(0.5), np.int64(0), Fraction(1, 3)),
    "(0, 1]": (5e-324, 1, True + 0),
    "[1, inf)": (1, 1e308, 10**400),
    "(-inf, inf)": (-(10**400), 0),
    f"[0, {2**63 - 1}]": (0, 2**63 - 1),
}
OUTSIDE = {
    "[0, 1)": (1, -5e-324, math.nan, "0", None, True, 1j, np.zeros(1)),
    "(0, 1]": (0, 1 + 2**-52, math.inf),
    "[1, inf)": (math.inf, 0.999, -math.inf),
    "(-inf, inf)": (math.inf, math.nan),
    f"[0, {2**63 - 1}]": (2**63, -1),
}


@cases("text", INSIDE)
def test_what_is_inside(text):
    assert all(value in Range(text) for value in INSIDE[text])
    assert not any(value in Range(text) for value in OUTSIDE[text])


def test_whole_numbers():
    assert all(value in COUNT for value in (1, np.int64(7), 10**9))
    assert not any(value in COUNT for value in (0, 1.0, True, 10**9 + 1, math.nan))
    assert 2**63 - 1 in SEED
    assert 2**63 not in SEED


@cases("text", ["0, 1", "[0; 1]", "[1, 0]", "[a, b]", "[0, nan]", "", "[0, 1, 2]"])
def test_what_is_no_interval_is_refused(text):
    with pytest.raises(LabError, match=re.escape(f"{text!r}: must be an interval, got {text!r}. Hint: ")):
        Range(text).check("d", 0.5, "a share")
    with pytest.raises(LabError, match="must be an interval"):
        Parameter("d", float, 0.5, "a share", text).check_fields()


@cases(
    "name, value, expected",
    [
        ("--beta", 1.0, "--beta 1.0: must be a number in [0, 1), got 1.0. Hint: 0.9 is usual."),
        ("beta", 10**400, "beta=(a number of about 400 digits): must be a number in [0, 1), got (a number of"),
        ("beta of 'a'", "x", "beta of 'a' 'x': must be a number in [0, 1), got 'x'. Hint: 0.9 is usual."),
    ],
)
def test_the_form_of_an_error(name, value, expected):
    with pytest.raises(LabError, match=re.escape(expected)):
        Range("[0, 1)").check(name, value, "0.9 is usual")
    Range("[0, 1)").check(name, 0.5, "0.9 is usual")
    Range("[0, 1)").check(name, None, "0.9 is usual")


def test_the_examples_are_true():
    result = doctest.testmod(values)
    assert result.attempted
    assert not result.failed
