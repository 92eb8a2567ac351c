"""The specification of a study, and of a run of it, as data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...core.options import defaults_of, options_of
from ...training.config import ResolvedConfig, TrainingConfig

# Identities have these, of options that decide nothing, at these values: the form that results are named after.
_ALWAYS_THERE = {"cache_dir": None, "dataloader_num_workers": 0}
ARM_NOTES = ("description", "controls")  # what an arm has besides fields of the training configuration
PRESETS = "(presets)"  # the folder of those of the package
_FORMAT = 1  # of result files; part of the identity of a run


def controlled(arms: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of an arm and a control."""
    return [(arm, control) for arm, fields in arms.items() for control in fields.get("controls", ())]


@dataclass(frozen=True)
class Tuning:
    """
    How the learning rate of each arm is chosen: on each data set, by the best mean of a metric over seeds of its own.

    Args:
        learning_rates (`tuple` of `float`): To choose from.
        factors (`tuple` of `float`): Instead: what to multiply the arm's own learning rate by.
        seeds (`tuple` of `int`): None of those that the comparison uses.
        metric (`str`): Smaller is better.
    """

    learning_rates: tuple[float, ...]
    factors: tuple[float, ...]
    seeds: tuple[int, ...]
    metric: str

    def rates_for(self, config: ResolvedConfig) -> list[float]:
        return list(self.learning_rates) or [config.learning_rate * factor for factor in self.factors]


@dataclass(frozen=True)
class StudySpec:
    """
    A study.

    Args:
        name (`str`): Of the file or preset.
        title (`str`): For people.
        base (`dict`): Fields of the training configuration that all runs share.
        arms (`dict`): From the name of an arm to its fields, its `description`, and the `controls` that it is compared with
            besides the baseline.
        datasets (`dict`): From the name of a data set to its fields.
        seeds (`tuple` of `int`): Of each arm on each data set.
        baseline (`str`): The arm that the others are compared with.
        metrics (`tuple` of `str`): What is compared.
        primary_metric (`str`): What the findings are about first.
        tune ([`Tuning`], *optional*): How learning rates are chosen.
        evaluation_points (`int`): Validations over a run.
        speedup_metric (`str`, *optional*): The validation loss that speed-ups are measured by.
        precision (`str`): A name in `PRECISIONS`.
        folder (`str`): What paths in the fields start from; `PRESETS` for those of the package.
        paper (`str`, *optional*): "table" to put the figures of the study paper beside those of arms of the same names,
            "nearest" to list the arms that come nearest to them.
    """

    name: str
    title: str
    base: dict[str, Any]
    arms: dict[str, dict[str, Any]]
    datasets: dict[str, dict[str, Any]]
    seeds: tuple[int, ...]
    baseline: str
    metrics: tuple[str, ...]
    primary_metric: str
    tune: Tuning | None = None
    evaluation_points: int = 20
    speedup_metric: str | None = None
    precision: str = "fp32"
    folder: str = "."
    paper: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class RunSpec:
    """
    A run of a study.

    Args:
        arm (`str`): Its arm.
        dataset (`str`): Its data set.
        seed (`int`): Its seed.
        stage (`str`): "tune" if it only serves to choose a learning rate, else "compare".
        config ([`ResolvedConfig`]): Of the run.
        metrics (`tuple` of `str`): What is measured at its end.
        precision (`str`): Of products of matrices.
        model (`dict`, *optional*): The configuration of the model, if one was asked for.
        given (`dict`): Paths among the fields of `config` as they stand in the specification. What lies there counts.
            Where that is on this machine is not published, and a study can be moved together with it.
    """

    arm: str
    dataset: str
    seed: int
    stage: str
    config: ResolvedConfig = field(repr=False)
    metrics: tuple[str, ...] = field(repr=False)
    precision: str = field(default="fp32", repr=False)
    model: dict[str, Any] | None = field(default=None, repr=False)
    given: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def fields(self) -> dict[str, Any]:
        """Every field of the configuration that may be published, with paths as they were given."""
        return {key: value for key, value in (self.config.to_dict() | self.given).items() if key != "output_dir"}

    @cached_property
    def digest(self) -> str:
        """Changes with everything that decides the result."""
        options, defaults = options_of(TrainingConfig), defaults_of(TrainingConfig)
        fields = _ALWAYS_THERE | {
            name: value
            for name, value in self.fields.items()
            if options[name].role.decides_result and not (options[name].omit_default and value == defaults[name])
        }
        if self.model is not None:  # what is in the file counts, not where it is
            fields["model_config_name_or_path"] = self.model
        stage = [] if self.stage == "compare" else [self.stage]
        text = json.dumps([_FORMAT, fields, sorted(self.metrics), self.precision, *stage], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    @property
    def id(self) -> str:
        return f"{self.arm}--{self.dataset}--{self.seed}--{self.digest}"
