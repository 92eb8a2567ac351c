"""Curves of the validation loss, with the rates behind them, from folders of runs and of studies."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import LabError, did_you_mean, must_be, warn
from ..core.options import names_where
from ..core.progress import resolve_warmup_updates
from ..core.words import counted
from ..diagnostics.timestep_log import read_timesteps
from ..forecast.law_fits import LossCurve
from ..forecast.loss_forecast import SeedCurves
from ..hub.recorded_options import recorded_options
from ..hub.records import read_log, read_record
from ..optimizers.scaling import scaled_learning_rate
from ..schedules.continued import RunCurve
from ..schedules.resolve import describe_schedule, resolve_schedule
from ..schedules.schedule import Schedule
from ..training.config import TrainingConfig
from ..training.run_folder import RunFolder

METRICS = ("validation_loss", "validation_loss_ema")
_MOST_PARTS = 5  # of the noise levels
# Options that decide how a model learns, and are the same in all runs that a law is fitted to. Schedules, rates and lengths
# are what it is fitted to, and seeds are averaged over.
_SHARED = tuple(
    name
    for role in ("compares", "uses")
    for name in names_where(TrainingConfig, decides_result=True, finder=role)
    if name != "seed"
)


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """A run with validation losses."""

    name: str
    record: dict[str, Any]
    options: dict[str, Any]  # all of the record
    cache_folder: Path  # for what is computed of it: that of the run's files, or that of its study
    rates: RunCurve
    updates: np.ndarray  # done before each validation, `(points,)`
    losses: np.ndarray
    by_bin: np.ndarray | None = None  # `(points, bins)` of noise levels
    timesteps_file: Path | None = None  # with losses by noise level, if it is there

    @property
    def seed(self) -> int:
        return self.options["seed"]

    @cached_property
    def curve(self) -> LossCurve:
        """
        The losses after warm-up, and the rates up to the last of these losses: a run may have been stopped before its end.
        """
        warmup, lrs = self.rates.warmup_updates, self.rates.lrs[: int(self.updates.max())]
        label = f"{self.rates.text}, {counted(len(lrs), 'update')}, peak {self.rates.lr:g}"
        parts = None if self.by_bin is None else merged_parts(self.by_bin)
        return LossCurve(label, lrs, warmup, self.updates, self.losses, parts).where(self.updates > warmup)


def read_runs(
    folders: Sequence[Path], metric: str = METRICS[0], arms: Sequence[str] = (), dataset: str | None = None
) -> list[MeasuredRun]:
    """
    The runs in folders of runs and studies that a law of the loss can be fitted to; `arms` and `dataset` choose runs of
    studies. Warns of those that are left out.

    Raises a `LabError` if none is left, and if they differ in more than schedule, learning rate, length and seed.
    """
    if metric not in METRICS:
        raise must_be("--metric", metric, " or ".join(METRICS), "a law describes a loss on held-out data")
    found: list[MeasuredRun] = []
    left_out: list[str] = []
    for flag, given in (("--arm", arms), ("--dataset", dataset)):
        if given and not any((folder / "spec.yaml").is_file() for folder in folders):
            raise LabError(f"{flag} has no effect without a study in --from. Hint: leave it out.")
    for folder in folders:
        if (folder / "lrlab" / "run.json").is_file():
            records = [_read_run(folder)]
        elif (folder / "spec.yaml").is_file():
            records = _read_study(folder, arms, dataset)
        else:
            raise must_be(
                "--from", str(folder), "the folder of a run or of a study", "such as the --output_dir of lrlab train"
            )
        for record in records:
            try:
                found.append(_measured(record, metric))
            except _Unusable as error:
                left_out.append(str(error))
    if not found:
        raise LabError(
            f"{'; '.join(dict.fromkeys(left_out))}. No run is left for --from. Hint: train with held-out data and a "
            "schedule of the clock, such as cosine."
        )
    for reason in dict.fromkeys(left_out):
        warn(f"{reason}; it is left out.")
    _check_same(found)
    if len({None if run.by_bin is None else run.by_bin.shape[1] for run in found}) > 1:  # parts that are not comparable
        found = [dataclasses.replace(run, by_bin=None) for run in found]
    return found


def by_schedule(runs: Sequence[MeasuredRun]) -> list[SeedCurves]:
    """
    The curves of each schedule by seed; of equal runs, the last one. Warns of schedules that are the beginning of another
    one, as those of stopped runs and of the parents of extended runs are, and leaves them out: their losses would tell a law
    what it is asked to predict.
    """
    found: dict[bytes, list[MeasuredRun]] = {}
    for run in runs:
        found.setdefault(run.curve.lrs.tobytes(), []).append(run)
    kept: list[SeedCurves] = []
    for rates, same in found.items():
        if any(len(other) > len(rates) and other.startswith(rates) for other in found):
            warn(f"{', '.join(run.name for run in same)}: the beginning of a longer run; it is left out.")
        else:
            kept.append({run.seed: run.curve for run in same})
    return kept


class _Unusable(LabError):
    """A run that no law can be fitted to."""


class _Record(NamedTuple):
    """The record of a run, and its losses."""

    name: str
    record: dict[str, Any]
    cache_folder: Path
    validations: Mapping[str, Sequence[float]]  # columns: "update", and losses
    timesteps_file: Path | None = None  # with losses by noise level, if it is there


def _read_run(folder: Path) -> _Record:
    record = read_record(folder)
    rows = [row for row in read_log(folder) if METRICS[0] in row]
    columns = {name: [row.get(name, np.nan) for row in rows] for name in ("update", *METRICS)}
    return _Record(str(folder), record, RunFolder(folder).lab, columns, RunFolder(folder).timesteps_file)


def _read_study(folder: Path, arms: Sequence[str], dataset: str | None) -> list[_Record]:
    from ..study.runs.results import StudyFolder  # needs the extra for studies

    study = StudyFolder(folder)
    files = sorted((folder / "runs").glob("[!.]*.json"))
    results = [result for file in files if (result := study.read(file.stem)) is not None]
    if study.damaged:
        raise LabError(f"{str(folder)!r}: damaged results ({', '.join(sorted(study.damaged))}). Give its command again.")
    results = [result for result in results if (result.stage, result.status) == ("compare", "finished")]
    if not results:
        raise must_be("--from", str(folder), "a study with finished runs", "run it with `lrlab study run`", got="none")
    datasets, known = ([*dict.fromkeys(getattr(one, name) for one in results)] for name in ("dataset", "arm"))
    if dataset is None and len(datasets) > 1:
        raise LabError(f"{str(folder)!r} has runs on {', '.join(datasets)}, which need separate laws. Give --dataset.")
    for flag, asked, among in (("--dataset", [dataset] if dataset else [], datasets), ("--arm", arms, known)):
        if unknown := [one for one in asked if one not in among]:
            raise must_be(
                flag, unknown[0], f"one of {', '.join(among)}", f"see its report.{did_you_mean(unknown[0], among)}"
            )
    chosen = [one for one in results if one.dataset == (dataset or datasets[0]) and (not arms or one.arm in arms)]
    return [_Record(one.id, one.record, folder, one.curves["quality"]) for one in chosen]


def _measured(record: _Record, metric: str) -> MeasuredRun:
    options, train, name = recorded_options(record.record, record.name), record.record["train"], record.name
    num_updates, batch = train["num_updates"], train["global_batch"]
    schedule = _schedule(options, batch)
    if why := schedule.more_than_a_curve:
        raise _Unusable(
            f"{name}: its schedule {describe_schedule(schedule)} {why}, and a law needs rates that depend on the clock only"
        )
    updates, losses = (np.array(record.validations.get(key, []), float) for key in ("update", metric))
    if not np.isfinite(losses).any():
        raise _Unusable(f"{name} has no {metric} of its held-out data")
    known = np.isfinite(losses)
    updates, kept = np.unique(updates[known].astype(int), return_index=True)
    peak = train.get("peak_learning_rate") or scaled_learning_rate(
        options["learning_rate"], options["scale_lr"], batch, options["base_batch_size"]
    )
    warmup = resolve_warmup_updates(options["lr_warmup_steps"] or 0, num_updates)
    momentum = options["optimizer_kwargs"] or {}
    rates = RunCurve(schedule, peak, momentum.get("momentum", momentum.get("beta1")), warmup, num_updates)
    parts = None if record.timesteps_file is None else _losses_by_bin(record.timesteps_file, metric, updates)
    measured = updates, losses[known][kept], parts
    return MeasuredRun(name, record.record, options, record.cache_folder, rates, *measured, record.timesteps_file)


def _schedule(options: dict[str, Any], global_batch: int) -> Schedule:
    """The schedule of a record."""
    kwargs, momentum = (
        {key: value for key, value in (options[name] or {}).items() if value is not None}
        for name in ("lr_scheduler_kwargs", "momentum_scheduler_kwargs")
    )
    schedule = resolve_schedule(options["lr_scheduler"], kwargs, options["momentum_scheduler"], momentum or None)
    if "images_per_update" in schedule.kwargs and schedule.kwargs["images_per_update"] is None:
        schedule.kwargs["images_per_update"] = global_batch
    return schedule


def _losses_by_bin(file: Path, metric: str, updates: np.ndarray) -> np.ndarray | None:
    """Validation losses of `lrlab/timesteps.parquet`, `(points, bins)`; `None` if any is missing."""
    frame = read_timesteps(file).to_pandas().dropna(subset=metric)
    if not len(frame):
        return None
    table = frame.pivot_table(index="update", columns="bin", values=metric).reindex(updates).to_numpy()
    return None if np.isnan(table).any() else table


def merged_parts(parts: np.ndarray) -> np.ndarray:
    """Values by bin of noise levels, in the last axis, as means of at most five parts of equal size."""
    bins = parts.shape[-1]
    count = max(number for number in range(1, _MOST_PARTS + 1) if bins % number == 0)
    return parts.reshape(*parts.shape[:-1], count, bins // count).mean(axis=-1)


def _check_same(runs: Sequence[MeasuredRun]) -> None:
    """Raises a `LabError` for runs that differ in an option that all must share."""
    for name in _SHARED:
        values = Counter(str(run.options[name]) for run in runs)
        if len(values) > 1:
            raise LabError(
                f"--from: the runs must differ only in schedule, learning rate, length and seed, got {name} "
                f"{' and '.join(list(values)[:3])}. Hint: choose runs, or arms of a study by --arm."
            )
