"""Options describe themselves: what is derived from that, and that nothing is left undescribed."""

import dataclasses
import math
import re
import typing

import pytest
from tables import cases

from diffusers_lrlab.core.errors import LabError, arguments_named, must_be
from diffusers_lrlab.core.options import (
    SPEED,
    WHOLE_RUN,
    Need,
    Option,
    Role,
    check_needs,
    check_ranges,
    check_types,
    defaults_of,
    names_where,
    option,
    options_of,
)
from diffusers_lrlab.core.program import report_error
from diffusers_lrlab.finder.range_test import FinderConfig
from diffusers_lrlab.finder.result import deciding
from diffusers_lrlab.training.config import CONFIG_GROUPS, ResolvedConfig, TrainingConfig
from diffusers_lrlab.training.kinds.points import Points
from diffusers_lrlab.training.prepare import resolve_and_check
from diffusers_lrlab.training.resolve import resolve_config

FAST = Need("--fast", lambda config: config.fast)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    fast: bool = option(False, "Fast.", SPEED)
    rate: float | None = option(None, "Rate.", WHOLE_RUN, range="(0, inf)")
    steps: int = option(5, "Steps.", WHOLE_RUN, range="[1, inf)", needs=(FAST,))
    token: str | None = option(None, "Token.", WHOLE_RUN, needs=(FAST,), repr=False)
    beta: float = option(0.9, "Beta.", WHOLE_RUN, range="[0, 1)", kinds=("images",))


def _numbers(config_class):
    """The options that take numbers."""
    hints = typing.get_type_hints(config_class)
    return [name for name, hint in hints.items() if {int, float} & {hint, *typing.get_args(hint)}]


def test_every_option_of_a_run_is_classified():
    """A field that is declared without `option` has no role, and every list that is derived would miss it in silence."""
    for group in CONFIG_GROUPS:
        for field in dataclasses.fields(group):
            described = field.metadata.get("option")
            assert isinstance(described, Option), f"{group.__name__}.{field.name} is not declared by core.options.option"
            assert isinstance(described.role, Role)
    assert {field.name for group in CONFIG_GROUPS for field in dataclasses.fields(group)} == {*options_of(TrainingConfig)}
    assert options_of(ResolvedConfig) == options_of(TrainingConfig)


def test_roles_agree_with_each_other():
    for name, known in options_of(TrainingConfig).items():
        role = known.role
        assert not role.decides_draws or role.decides_result, name
        assert not role.defines_loss or role.decides_result, name
        assert role.finder != "refuses" or role.study == "no" or name == "scale_lr", name


def test_what_decides_the_draws_and_what_a_resumed_run_may_not_change():
    assert set(names_where(TrainingConfig, decides_draws=True)) == {
        *("seed", "timestep_sampler", "timestep_sampler_kwargs", "loss_weighting", "loss_weighting_kwargs", "timestep_lr"),
        *("timestep_lr_kwargs", "noise", "noise_kwargs", "label_dropout"),
    }
    fixed = names_where(TrainingConfig, may_change_on_resume=False)
    assert {"learning_rate", "seed", "noise", "dataset_name", "log_timestep_bins"} <= {*fixed}
    assert not {"output_dir", "distance_samples", "push_to_hub"} & {*fixed}


def test_tokens_are_not_compared_or_repeated():
    role = options_of(TrainingConfig)["hub_token"].role
    assert not role.is_repeated
    assert not role.decides_result
    assert "hub_token" not in TrainingConfig(hub_token="secret").to_dict()
    assert "secret" not in repr(TrainingConfig(hub_token="secret"))


def test_ranges():
    check_ranges(Settings(steps=1, rate=1e-9, beta=0.0), Settings)
    with pytest.raises(LabError, match=r"--steps 0: must be a whole number in \[1, inf\), got 0. Hint: Steps.$"):
        check_ranges(Settings(steps=0), Settings)
    with pytest.raises(LabError, match=r"--rate 0.0: must be a number in \(0, inf\)"):
        check_ranges(Settings(rate=0.0), Settings)


ABSURD = (10**10, 10**400, -1, -(10**10), 1e300, math.nan, math.inf, -math.inf)
# What has a meaning all the same.
RATES = {(name, 10**10) for name in ("learning_rate", "start_lr", "end_lr")}  # of a run that diverges
MEANT = RATES | {("seed", 10**10), ("local_rank", -1)}


@cases("name", [name for each in (TrainingConfig, FinderConfig) for name in _numbers(each)])
def test_absurd_numbers_are_refused_before_anything_is_done(name):
    for value in ABSURD:
        if (name, value) in MEANT:
            continue
        of_finder = name in options_of(FinderConfig)

        def check(value=value, of_finder=of_finder):
            return FinderConfig(**{name: value}).check() if of_finder else resolve_and_check(TrainingConfig(**{name: value}))

        with pytest.raises(LabError, match=name.removeprefix("lr_")) as refused:
            check()
        assert len(str(refused.value)) < 800


def test_types():
    check_types(Settings(rate=1))  # a whole number is one
    with pytest.raises(LabError, match=r"must be a whole number, got 1.5 "):
        check_types(Settings(steps=1.5))
    with pytest.raises(LabError, match="must be a number or None, got 'fast'"):
        check_types(Settings(rate="fast"))


def test_an_option_without_effect_is_an_error():
    with pytest.raises(LabError, match="--steps 6 has no effect without --fast. Hint: add that, or leave it out"):
        check_needs(Settings(steps=6), Settings, "images")
    with pytest.raises(LabError, match="--beta 0.5 has no effect without a data set of images"):
        check_needs(Settings(beta=0.5), Settings, "points")
    with pytest.raises(LabError, match="steps=6 has no effect without --fast"), arguments_named():
        check_needs(Settings(steps=6), Settings, "images")
    check_needs(Settings(steps=6, fast=True, beta=0.5), Settings, "images")
    check_needs(Settings(), Settings, "points")
    with pytest.raises(LabError, match=r"--token '\*\*\*' has no effect without --fast"):
        check_needs(Settings(token="hf_secret"), Settings, "points")


def test_nothing_of_a_resolved_configuration_contradicts_its_type():
    points = {"dataset_name": "moons", "optimizer": "sgd"}
    for options in ({}, points, {"optimizer": "lion"}, {"timestep_lr": "banded:factors=[1|2]"}):
        check_types(resolved := resolve_config(TrainingConfig(**options)))
        assert resolve_config(TrainingConfig(**options)) == resolved
        open_fields = {name for name, hint in ResolvedConfig.__annotations__.items() if "None" not in str(hint)}
        assert not [name for name in open_fields if getattr(resolved, name) is None]
        assert resolve_config(TrainingConfig(**resolved.to_dict())).to_dict() == resolved.to_dict()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"data_kind": "points", "dataset_name": "digits"}, "must be left out for the images of 'digits'"),
        ({"data_kind": "images", "dataset_name": "dino"}, "must be left out for the points of 'dino'"),
        ({"data_kind": "imgs"}, "Unknown kind of data 'imgs'"),
        ({"distance_samples": 1}, "--distance_samples 1 against 256 held-out images"),
    ],
)
def test_a_kind_that_the_data_are_not_of(options, expected):
    with pytest.raises(LabError, match=re.escape(expected)):
        resolve_config(TrainingConfig(**options))


def test_a_default_that_a_kind_forgot_is_an_error(monkeypatch):
    monkeypatch.setattr(Points, "defaults", lambda self, config: {"learning_rate": 1e-3})
    with pytest.raises(LabError, match="--num_validation_images is missing"):
        resolve_config(TrainingConfig(dataset_name="dino"))


@pytest.mark.parametrize(("rank", "all_ranks", "printed"), [("0", False, True), ("1", False, False), ("1", True, True)])
def test_which_processes_print_an_error(monkeypatch, capsys, rank, all_ranks, printed):
    monkeypatch.setenv("RANK", rank)
    assert report_error(LabError("Give another\x1b[2J one."), all_ranks) == 2
    assert capsys.readouterr().err == "error: Give another\\x1b[2J one.\n" * printed  # it cannot clear the terminal


def test_configurations_do_not_change():
    config = TrainingConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.learning_rate = 1.0
    resolved = resolve_config(config)
    assert config == TrainingConfig()
    assert resolved.schedule is resolved.schedule  # made once
    assert dataclasses.replace(resolved, lr_scheduler="constant", lr_scheduler_kwargs={}).schedule.name == "constant"


def test_a_finders_result_is_compared_by_all_that_it_depends_on():
    fields = deciding(TrainingConfig().to_dict(), 10, 4)["config"]
    assert fields.keys() == {*names_where(TrainingConfig, finder="compares")}
    assert fields["mixed_precision"] == "no"
    assert defaults_of(TrainingConfig)["optimizer"] == fields["optimizer"]


def test_values_of_any_form_are_named_as_arguments():
    """Lists and words stand behind a flag too, where a pattern for numbers does not find them."""
    with pytest.raises(LabError, match=r"^beta=\[1, 'x y'\]: must be"), arguments_named():
        raise must_be("--beta", [1, "x y"], "a number", "0.9 is usual")
