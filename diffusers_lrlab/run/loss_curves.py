"""Curves of the validation loss, with the rates behind them, from folders of runs and of studies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import LabError, did_you_mean, must_be, warn
from ..core.options import names_where
from ..core.progress import resolve_warmup_updates
from ..diagnostics.timestep_log import read_timesteps
from ..forecast.law_fits import LossCurve
from ..forecast.loss_forecast import SeedCurves
from ..hub.records import read_log, read_record
from ..optimizers.scaling import scaled_learning_rate
from ..schedules.continued import RunCurve
from ..schedules.resolve import describe_schedule, resolve_schedule
from ..schedules.schedule import Schedule
from ..training.config import TrainingConfig, complete_options
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
    dataset: str
    options: dict[str, Any]  # of its record
    global_batch: int
    rates: RunCurve
    updates: np.ndarray  # done before each validation, `(points,)`
    losses: np.ndarray
    by_bin: np.ndarray | None = None  # `(points, bins)` of noise levels

    @property
    def seed(self) -> int:
        return self.options["seed"]

    @cached_property
    def curve(self) -> LossCurve:
        """Its losses after warm-up."""
        label = f"{self.rates.text}, {self.rates.num_updates} updates, peak {self.rates.lr:g}"
        kept = (self.updates > self.rates.warmup_updates) & (self.updates <= self.rates.num_updates)
        parts = None if self.by_bin is None else merged_parts(self.by_bin)
        return LossCurve(label, self.rates.lrs, self.rates.warmup_updates, self.updates, self.losses, parts).where(kept)


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
                found.append(_measured(*record, metric))
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
    return found


def by_schedule(runs: Sequence[MeasuredRun]) -> list[SeedCurves]:
    """The curves of each schedule by seed; of equal runs, the last one."""
    found: dict[bytes, dict[int, LossCurve]] = {}
    for run in runs:
        found.setdefault(run.curve.lrs.tobytes(), {})[run.seed] = run.curve
    return [*found.values()]


class _Unusable(LabError):
    """A run that no law can be fitted to."""


# Its name, data set, options, section `train`, and validation losses: by column, with "update"; perhaps by noise level.
_Record = tuple[str, str, dict[str, Any], dict[str, Any], Mapping[str, Sequence[float]], Path | None]


def _read_run(folder: Path) -> _Record:
    record = read_record(folder)
    rows = [row for row in read_log(folder) if METRICS[0] in row]
    # A resumed run may have two rows of one update, which are equal.
    columns = {name: [row.get(name, np.nan) for row in rows] for name in ("update", *METRICS)}
    config = record["config"]
    dataset = config.get("dataset_name") or config.get("train_data_dir") or "digits"
    return str(folder), dataset, config, record["train"], columns, RunFolder(folder).timesteps_file


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
        raise LabError(f"{str(folder)!r} has runs on {', '.join(datasets)}, which have laws of their own. Give --dataset.")
    for flag, asked, among in (("--dataset", [dataset] if dataset else [], datasets), ("--arm", arms, known)):
        if unknown := [one for one in asked if one not in among]:
            raise must_be(
                flag, unknown[0], f"one of {', '.join(among)}", f"see its report.{did_you_mean(unknown[0], among)}"
            )
    chosen = [one for one in results if one.dataset in (dataset, datasets[0]) and (not arms or one.arm in arms)]
    return [(one.id, one.dataset, one.config, one.record["train"], one.curves["quality"], None) for one in chosen]


def _measured(
    name: str,
    dataset: str,
    config: dict[str, Any],
    train: dict[str, Any],
    columns: Mapping[str, Sequence[float]],
    by_bin: Path | None,
    metric: str,
) -> MeasuredRun:
    options, num_updates, batch = complete_options(config), train["num_updates"], train["global_batch"]
    schedule = _schedule(options, batch)
    if why := schedule.more_than_a_curve:
        raise _Unusable(f"{name}: its schedule {describe_schedule(schedule)} {why}, and a law knows only rates of the clock")
    updates, losses = (np.array(columns.get(key, []), float) for key in ("update", metric))
    known = np.isfinite(losses) if len(losses) else np.zeros(0, bool)
    if not known.any():
        raise _Unusable(f"{name} has no {metric} of its held-out data")
    updates, kept = np.unique(updates[known].astype(int), return_index=True)
    rate = options["learning_rate"]
    scaled = train.get("peak_learning_rate") or scaled_learning_rate(
        rate, options["scale_lr"], batch, options["base_batch_size"]
    )
    warmup = resolve_warmup_updates(options["lr_warmup_steps"] or 0, num_updates)
    momentum = options["optimizer_kwargs"] or {}
    rates = RunCurve(schedule, scaled, momentum.get("momentum", momentum.get("beta1")), warmup, num_updates)
    parts = None if by_bin is None else _losses_by_bin(by_bin, metric, updates)
    return MeasuredRun(name, dataset, options, batch, rates, updates, losses[known][kept], parts)


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
                f"--from: the runs must differ in schedule, learning rate, length and seed alone, got {name} "
                f"{' and '.join(list(values)[:3])}. Hint: choose runs, or arms of a study by --arm."
            )
