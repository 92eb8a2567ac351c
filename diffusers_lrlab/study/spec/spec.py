"""The specification of a study and of its runs, as data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...core.options import defaults_of, options_of
from ...models.loading import StartWeights
from ...training.config import ResolvedConfig, TrainingConfig
from ..shown_command import PRESETS as PRESETS

ARM_NOTES = ("description", "controls")  # keys of an arm that are not training options
Cell = tuple[str, str]  # an arm and a data set, as a cell of the design
_FORMAT, _PRECISION = 1, "fp32"  # of result files, and of products; parts of the digest of a run


def controlled(arms: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of an arm and a control."""
    return [(arm, control) for arm, fields in arms.items() for control in fields.get("controls", ())]


@dataclass(frozen=True)
class Tuning:
    """How learning rates are chosen: for each arm and data set, by the best mean of a metric over separate seeds."""

    learning_rates: tuple[float, ...]
    factors: tuple[float, ...]  # or factors of the arm's own learning rate
    seeds: tuple[int, ...]  # disjoint from those of the comparison
    metric: str  # smaller is better
    extensions: int  # most rates added on each side while the best one is at the edge

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
    base: dict[str, Any]  # training options that all runs share
    arms: dict[str, dict[str, Any]]  # by name: training options, a `description`, and `controls`
    datasets: dict[str, dict[str, Any]]  # by name: training options
    seeds: tuple[int, ...]  # of each arm on each data set
    baseline: str  # the arm that the others are compared with
    metrics: tuple[str, ...]
    primary_metric: str  # the metric of the first findings
    tune: Tuning | None = None
    evaluation_points: int = 20  # validations over a run
    folder: str = "."  # base of relative paths in the options; `PRESETS` for presets of the package
    resolved: dict[Cell, RunSpec] = field(default_factory=dict, init=False, repr=False, compare=False)  # once, by `expand`

    def to_dict(self) -> dict[str, Any]:
        saved = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.init}
        return saved | {"tune": dataclasses.asdict(self.tune) if self.tune else None}


@dataclass(frozen=True)
class RunSpec:
    """
    A run of a study.

    `given` holds the paths among the options as the specification has them: locations on this machine are not published,
    and a study can be moved together with its files.
    """

    arm: str
    dataset: str
    seed: int
    stage: str  # "tune" if it only serves to choose a learning rate, else "compare"
    config: ResolvedConfig = field(repr=False)
    metrics: tuple[str, ...] = field(repr=False)
    model: dict[str, Any] | None = field(default=None, repr=False)  # configuration of the model, if one is given
    given: dict[str, Any] = field(default_factory=dict, repr=False)
    start: StartWeights | None = field(default=None, repr=False)  # the weights that the model starts from

    @property
    def fields(self) -> dict[str, Any]:
        """The options that may be published, with paths as they were given."""
        return {key: value for key, value in (self.config.to_dict() | self.given).items() if key != "output_dir"}

    @cached_property
    def digest(self) -> str:
        """A hash of everything that determines the result."""
        options, defaults = options_of(TrainingConfig), defaults_of(TrainingConfig)
        # Options at their defaults are omitted, so that results keep their names when an option is added.
        fields = {
            name: value
            for name, value in self.fields.items()
            if options[name].role.decides_result and value != defaults[name]
        }
        if self.start is not None:  # the content of the files, not their path
            fields |= {"pretrained_model_name_or_path": self.start.sha256}
        if self.model is not None:
            fields["model_config_name_or_path"] = self.model
        stage = [] if self.stage == "compare" else [self.stage]
        text = json.dumps([_FORMAT, fields, sorted(self.metrics), _PRECISION, *stage], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    @property
    def id(self) -> str:
        return f"{self.arm}--{self.dataset}--{self.seed}--{self.digest}"


# --- grids of learning rates, or of factors --------------------------------------------------------------------------

_REL_TOL = 1e-9


def next_beyond(grid: Sequence[float], higher: bool) -> float | None:
    """
    The next number above or below a grid; `None` beyond the range of floats.

    A grid whose last two numbers are neighbours in 1, 3, 10, 30 continues that series, and so does a single number. Any
    other grid continues by the ratio of its last two.
    """
    *inner, edge = sorted(grid, reverse=not higher)
    # Numbers that agree to nearly all digits have no ratio to go on by.
    if not inner or _are_neighbours(inner[-1], edge, higher) or math.isclose(inner[-1], edge, rel_tol=1e-11):
        number = _next_in_series(edge, higher)
    else:
        number = float(f"{edge * (edge / inner[-1]):.12g}")
    is_beyond = edge < number < math.inf if higher else 0 < number < edge
    return number if is_beyond else None


def extended(grid: Sequence[float], extensions: int) -> tuple[float, ...]:
    """A grid with this many numbers added on both sides, within the range of floats."""
    numbers = list(grid)
    for higher in (False, True):
        for _ in range(extensions):
            if (number := next_beyond(numbers, higher)) is None:
                break
            numbers.append(number)
    return tuple(numbers)


def _are_neighbours(inner: float, edge: float, higher: bool) -> bool:
    there, back = _next_in_series(inner, higher), _next_in_series(edge, not higher)
    return math.isclose(there, edge, rel_tol=_REL_TOL) and math.isclose(back, inner, rel_tol=_REL_TOL)


def _next_in_series(number: float, higher: bool) -> float:
    """The nearest of 1, 3, 10, 30, ..., 0.3, 0.1, ... above or below a number, as a float literal."""
    exponent = math.floor(math.log10(number))
    series = [float(f"{digit}e{exponent + shift}") for shift in (-1, 0, 1) for digit in (1, 3)]
    if higher:
        return min(other for other in series if other > number * (1 + _REL_TOL))
    return max(other for other in series if other < number * (1 - _REL_TOL))
