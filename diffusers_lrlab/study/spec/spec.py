"""The specification of a study, and of a run of it, as data."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...core.options import defaults_of, options_of
from ...training.config import ResolvedConfig, TrainingConfig

ARM_NOTES = ("description", "controls")  # what an arm has besides fields of the training configuration
PRESETS = "(presets)"  # what is saved as the folder of those of the package
Cell = tuple[str, str]  # an arm and a data set, as a cell of the design
_FORMAT = 1  # of result files; part of the identity of a run


def controlled(arms: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of an arm and a control."""
    return [(arm, control) for arm, fields in arms.items() for control in fields.get("controls", ())]


@dataclass(frozen=True)
class Tuning:
    """How the learning rate of each arm is chosen: on each data set, by the best mean of a metric over seeds of its own."""

    learning_rates: tuple[float, ...]
    factors: tuple[float, ...]  # instead: what to multiply the arm's own learning rate by
    seeds: tuple[int, ...]  # none of those that the comparison uses
    metric: str  # smaller is better
    extensions: int  # rates on each side, at most, by which a grid is extended whose best rate is at its edge

    @property
    def grid(self) -> tuple[float, ...]:
        """Learning rates, or factors of the arm's own."""
        return self.learning_rates or self.factors

    def rate(self, number: float, config: ResolvedConfig) -> float:
        """The learning rate that a number of the grid stands for."""
        return number if self.learning_rates else config.learning_rate * number


@dataclass(frozen=True)
class StudySpec:
    """A study, as docs/reference/studies.md describes it."""

    name: str  # of the file or preset
    title: str
    base: dict[str, Any]  # fields of the training configuration that all runs share
    arms: dict[str, dict[str, Any]]  # by name: such fields, a `description`, and `controls` to compare with, too
    datasets: dict[str, dict[str, Any]]  # by name: such fields
    seeds: tuple[int, ...]  # of each arm on each data set
    baseline: str  # the arm that the others are compared with
    metrics: tuple[str, ...]
    primary_metric: str  # what the findings are about first
    tune: Tuning | None = None
    evaluation_points: int = 20  # validations over a run
    speedup_metric: str | None = None  # the validation loss that speed-ups are measured by
    precision: str = "fp32"  # a name in `PRECISIONS`
    folder: str = "."  # what paths in the fields start from; `PRESETS` for those of the package
    paper: str | None = None  # "table": the figures of the study paper beside ours; "nearest": which arms come near them

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class RunSpec:
    """
    A run of a study.

    `given` are the paths among the fields of `config` as they stand in the specification. What lies there counts: where
    that is on this machine is not published, and a study can be moved together with it.
    """

    arm: str
    dataset: str
    seed: int
    stage: str  # "tune" if it only serves to choose a learning rate, else "compare"
    config: ResolvedConfig = field(repr=False)
    metrics: tuple[str, ...] = field(repr=False)  # what is measured at its end
    precision: str = field(default="fp32", repr=False)
    model: dict[str, Any] | None = field(default=None, repr=False)  # the model's configuration, if one was asked for
    given: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def fields(self) -> dict[str, Any]:
        """Every field of the configuration that may be published, with paths as they were given."""
        return {key: value for key, value in (self.config.to_dict() | self.given).items() if key != "output_dir"}

    @cached_property
    def digest(self) -> str:
        """Changes with everything that decides the result."""
        options, defaults = options_of(TrainingConfig), defaults_of(TrainingConfig)
        # Options at their defaults are left out, so that results keep their names when a new option comes.
        fields = {
            name: value
            for name, value in self.fields.items()
            if options[name].role.decides_result and value != defaults[name]
        }
        if self.model is not None:  # what is in the file counts, not where it is
            fields["model_config_name_or_path"] = self.model
        stage = [] if self.stage == "compare" else [self.stage]
        text = json.dumps([_FORMAT, fields, sorted(self.metrics), self.precision, *stage], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    @property
    def id(self) -> str:
        return f"{self.arm}--{self.dataset}--{self.seed}--{self.digest}"
