"""The axis `horizons` of a study: several lengths of each run, of which those with a common beginning share it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import LabError, must_be
from ...core.options import options_of
from ...core.progress import resolve_warmup_updates
from ...core.ranges import COUNT
from ...schedules.continued import RunCurve, agreeing_updates
from ...training.config import ResolvedConfig, TrainingConfig
from ...training.resolve_timesteps import objective_spec
from .spec import RunSpec

_LENGTHS = ("max_train_steps", "num_epochs")
_MOST = 100
_NUM_COMPARED = 33  # densities of timesteps, over the shared part of two runs


def read_horizons(value: Any) -> tuple[int, ...]:
    """The lengths of the runs in updates, in order; none if the key is left out."""
    if value is None:
        return ()
    wanted = f"a list of 2 to {_MOST} different numbers of updates"
    hint = "such as [1000, 2000, 4000]; one length is max_train_steps"
    if not isinstance(value, list) or not 2 <= len(value) <= _MOST or not all(number in COUNT for number in value):
        raise must_be("horizons", value, wanted, hint)
    if len(set(value)) < len(value):
        raise must_be("horizons", value, wanted, hint)
    return tuple(sorted(value))


def check_no_length(fields: dict[str, Any], where: str) -> None:
    """Raises a `LabError` for options that give a run of a study with horizons another length."""
    for name in _LENGTHS:
        if name in fields:
            raise LabError(f"{where} has {name}, and horizons set the length of every run. Leave one of them out.")


def at_horizons(datasets: dict[str, dict[str, Any]], horizons: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Each data set once for each horizon, as `NAME@UPDATES`, so that arms are compared at equal lengths."""
    if not horizons:
        return datasets
    return {f"{name}@{num}": {**fields, "max_train_steps": num} for name, fields in datasets.items() for num in horizons}


def without_horizons(datasets: dict[str, dict[str, Any]], horizons: Iterable[int]) -> dict[str, dict[str, Any]]:
    """The data sets of which [`at_horizons`] made these."""
    found = {}
    for name, fields in datasets.items():
        if any(name.endswith(f"@{num}") and fields.get("max_train_steps") == num for num in horizons):
            name = name.rpartition("@")[0]
            fields = {key: value for key, value in fields.items() if key != "max_train_steps"}
        found[name] = fields
    return found


def source_of(dataset: str) -> str:
    """The data set that `NAME@UPDATES` is a horizon of."""
    return dataset.rpartition("@")[0]


def shared_updates(short: ResolvedConfig, long: ResolvedConfig) -> int:
    """
    Updates from the start in which a run and a longer one are equal to the bit, at most all but the last of the shorter one.

    0 if they differ in more than their length, or agree in no more than the warm-up and its last rate, as two cosines do.
    """
    if _differ(short, long):
        return 0
    one, other = curve_of(short), curve_of(long)
    if one.schedule.follows_metric or one.warmup_updates != other.warmup_updates:
        return 0
    shared = min(agreeing_updates(one, other), one.num_updates - 1)
    return shared if shared > one.warmup_updates + 1 and _same_timesteps(short, long, shared) else 0


def why_separate(short: ResolvedConfig, long: ResolvedConfig) -> str:
    """The reason why two runs share nothing, for [`shared_updates`] of 0."""
    one, other = curve_of(short), curve_of(long)
    if one.schedule.follows_metric:
        return "its learning rate follows the validation loss"
    if one.warmup_updates != other.warmup_updates:
        return "its warm-up depends on the length; lr_warmup_steps in updates would be the same at all horizons"
    if agreeing_updates(one, other) <= one.warmup_updates + 1:
        return "its learning rate depends on the length from the start"
    return "its timesteps depend on the length"


def curve_of(config: ResolvedConfig) -> RunCurve:
    """The learning rates of a run whose length is given."""
    batch = config.layout(1, 0).global_batch
    warmup = resolve_warmup_updates(config.lr_warmup_steps, _length(config))
    peak = config.peak_learning_rate(batch)
    return RunCurve(config.schedule_for(batch), peak, config.start_momentum, warmup, _length(config))


def _length(config: ResolvedConfig) -> int:
    assert config.max_train_steps is not None  # `horizons` gives it
    return config.max_train_steps


def _differ(one: ResolvedConfig, other: ResolvedConfig) -> bool:
    """Whether two runs differ in more than their length."""
    names = (name for name, known in options_of(TrainingConfig).items() if known.role.decides_result)
    return any(getattr(one, name) != getattr(other, name) for name in names if name != "max_train_steps")


def _same_timesteps(short: ResolvedConfig, long: ResolvedConfig, shared: int) -> bool:
    spec = objective_spec(short)
    process = spec.make_process()
    samplers = [spec.make_sampler(process, _length(config)) for config in (short, long)]
    if not samplers[0].moves:
        return True
    updates = np.unique(np.linspace(0, shared - 1, _NUM_COMPARED).astype(int))
    return all(samplers[0].probabilities(int(n)).equal(samplers[1].probabilities(int(n))) for n in updates)


@dataclass(frozen=True)
class Family:
    """Runs that share their beginning: the longest one, the trunk, and shorter ones that leave it."""

    trunk: RunSpec
    branches: dict[int, list[RunSpec]]  # by the update at which they leave

    @property
    def runs(self) -> list[RunSpec]:
        """All runs, the trunk first."""
        return [self.trunk, *(run for runs in self.branches.values() for run in runs)]

    @property
    def own_updates(self) -> dict[str, int]:
        """The updates that each run costs, by its id: a branch costs those after the trunk."""
        own = {self.trunk.id: _length(self.trunk.config)}
        return own | {run.id: _length(run.config) - at for at, runs in self.branches.items() for run in runs}


def families(specs: Iterable[RunSpec]) -> list[Family]:
    """
    The runs, grouped by the beginning that they share; most are a family of their own.

    Only the horizons of one arm, data set and seed share anything, each with the longest of those that are given.
    """
    alike: dict[tuple[Any, ...], list[RunSpec]] = {}
    for spec in specs:
        own = (spec.arm, spec.horizon_of, spec.seed, spec.stage, spec.config.learning_rate)
        alike.setdefault(own if spec.horizon_of else (spec.id,), []).append(spec)
    found = []
    for group in alike.values():
        *shorter, trunk = sorted(group, key=lambda spec: spec.config.max_train_steps or 0) if len(group) > 1 else group
        branches: dict[int, list[RunSpec]] = {}
        alone = []
        for spec in shorter:
            if at := shared_updates(spec.config, trunk.config):
                branches.setdefault(at, []).append(spec)
            else:
                alone.append(Family(spec, {}))
        found += [*alone, Family(trunk, dict(sorted(branches.items())))]
    return found
