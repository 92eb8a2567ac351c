"""Expands the specification of a study to its runs, all checked before the first one starts."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import LabError, arguments_named, did_you_mean
from ...core.options import names_where, options_of
from ...data.latents import image_set_of, latents_folder
from ...data.options import EMBEDDED_DATASETS
from ...data.toy2d import TOY_DATASETS
from ...evaluation.metrics import METRICS
from ...models.loading import StartWeights
from ...training.arguments import parse_options
from ...training.config import ResolvedConfig, TrainingConfig
from ...training.kinds import kind_of
from ...training.model import find_start, given_model_config
from ...training.resolve import check_schedule, check_timesteps, resolve_config
from ..kind_settings import check_metrics, default_metrics, settings_of
from ..shown_command import PRESETS_FOLDER
from .spec import ARM_NOTES, PRESETS, Cell, RunSpec, StudySpec, Tuning, extended


def expand(spec: StudySpec, chosen: dict[Cell, float] | None = None) -> list[RunSpec]:
    """
    All runs of a comparison, checked as far as possible without data.

    `chosen` is the tuned learning rate of each arm and data set. Raises a `LabError` for the first run that is impossible,
    and for two equal arms.
    """
    runs = []
    for cell, run in _prototypes(spec).items():
        rate = chosen[cell] if chosen else run.config.learning_rate
        runs += [_variant(run, seed, rate) for seed in spec.seeds]
    _check_distinct(runs)
    measured = dict.fromkeys(name for run in runs for name in run.metrics)
    if spec.primary_metric and spec.primary_metric not in measured:
        raise LabError(
            f"primary_metric: {spec.primary_metric!r} is not a metric of the study."
            f"{did_you_mean(spec.primary_metric, measured)} They are {', '.join(measured)}."
        )
    return runs


def expand_tuning(spec: StudySpec, numbers: Mapping[Cell, Sequence[float]] | None = None) -> list[RunSpec]:
    """
    The runs that choose learning rates: from the grid of the specification, or from `numbers` for each arm and data set.

    Raises a `LabError` as `expand` does, also for arms that extensions of the grid would make equal.
    """
    if spec.tune is None:
        return []
    if numbers is None:
        most = extended(spec.tune.grid, spec.tune.extensions)
        _check_distinct(_tuning_runs(spec, spec.tune, dict.fromkeys(_prototypes(spec), most)))
        numbers = dict.fromkeys(_prototypes(spec), spec.tune.grid)
    return _tuning_runs(spec, spec.tune, numbers)


def _tuning_runs(spec: StudySpec, tune: Tuning, numbers: Mapping[Cell, Sequence[float]]) -> list[RunSpec]:
    runs = []
    for cell, run in _prototypes(spec).items():
        check_metrics((tune.metric,), run.config, "tune: metric")
        rates = [tune.rate(number, run.config) for number in numbers[cell]]
        own = dataclasses.replace(run, stage="tune", metrics=(tune.metric,))
        runs += [_variant(own, seed, rate) for rate in rates for seed in tune.seeds]
    return runs


def _variant(run: RunSpec, seed: int, rate: float) -> RunSpec:
    return dataclasses.replace(run, seed=seed, config=dataclasses.replace(run.config, seed=seed, learning_rate=rate))


# Options that decide which model is read.
_OF_MODEL = (
    *("model_config_name_or_path", "pretrained_model_name_or_path", "cache_dir", "denoiser", "data_kind"),
    *("resolution", "image_channels", "label_column", "num_classes", "label_dropout"),
)


def _prototypes(spec: StudySpec) -> dict[Cell, RunSpec]:
    """A run of each arm on each data set, whose options are resolved and whose model is read."""
    if spec.resolved:
        return spec.resolved
    found = {}
    models: dict[Any, tuple[dict[str, Any] | None, StartWeights | None]] = {}  # each is read once, as it may be on the Hub
    for arm, arm_fields in spec.arms.items():
        own = {key: value for key, value in arm_fields.items() if key not in ARM_NOTES}
        for dataset, dataset_fields in spec.datasets.items():
            where = f"the arm {arm!r} on {dataset!r}"
            options = {**spec.base, **dataset_fields, **own}
            try:
                config = _resolve(located(options, spec.folder), where, spec)
                check_metrics(spec.metrics, config, "metrics")
                key = (latents_folder(config), *(getattr(config, name) for name in _OF_MODEL))
                if key not in models:
                    start = find_start(config)
                    models[key] = given_model_config(config, start), start
            except LabError as error:
                raise LabError(f"In {where}: {error}") from None
            given = {name: options[name] for name in _PATHS if options.get(name) is not None}
            metrics, (model, start) = spec.metrics or default_metrics(config), models[key]
            found[arm, dataset] = RunSpec(arm, dataset, config.seed, "compare", config, metrics, model, given, start)
    _check_comparable(spec, found)
    spec.resolved.update(found)
    return found


def _check_comparable(spec: StudySpec, runs: dict[Cell, RunSpec]) -> None:
    """Raises a `LabError` if a loss or a distance is not comparable between arms."""
    losses = sorted(name for name, metric in METRICS.items() if name in spec.metrics and metric.is_loss)
    holds_out = any("held_out" in METRICS[loss].needs for loss in losses)
    for dataset in spec.datasets:
        of_arms = [runs[arm, dataset].config for arm in spec.arms]
        if of_arms[0].dataset_name not in TOY_DATASETS and (numbers := _differing(of_arms, "num_validation_images")):
            raise LabError(
                f"Arms that differ in num_validation_images ({numbers} on {dataset!r}) train on different data, because "
                "held-out data are not trained on. Give all arms the same number."
            )
        # Distances depend on the number of samples, by default that of the held-out data.
        of_samples = sorted(name for name in spec.metrics or default_metrics(of_arms[0]) if METRICS[name].of == "samples")
        given = ((config.distance_samples, config.num_validation_images) for config in of_arms)
        counts = sorted({str(held_out if num is None else num) for num, held_out in given})
        if of_samples and len(counts) > 1:
            raise LabError(
                f"{', '.join(of_samples)} cannot be compared between arms with different numbers of samples "
                f"({', '.join(counts)} on {dataset!r}). Give all arms the same distance_samples."
            )
        for name in names_where(TrainingConfig, defines_loss=True) if losses else ():
            if (name != "num_validation_images" or holds_out) and (values := _differing(of_arms, name)):
                raise LabError(
                    f"{', '.join(losses)} cannot be compared between arms that differ in {name.removesuffix('_kwargs')} "
                    f"({values} on {dataset!r}), because it measures a different quantity for each. Compare samples, such "
                    "as by kl, or give all arms the same."
                )


def _differing(configs: list[ResolvedConfig], name: str) -> str:
    """The values of an option as text, if they differ: of parameters, only those that do."""
    given = [getattr(config, name) for config in configs]
    if all(isinstance(value, dict) for value in given):
        same = [key for key in given[0] if all(key in other and other[key] == given[0][key] for other in given)]
        given = [", ".join(f"{key}={part}" for key, part in value.items() if key not in same) for value in given]
    values = sorted(set(given), key=lambda value: (value is not None, value))
    return ", ".join(map(str, values)) if len(values) > 1 else ""


# Options that may name a file next to that of the study.
_PATHS = [name for name, known in options_of(TrainingConfig).items() if known.is_path]


def located(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Options with absolute paths where they name files next to that of the study."""
    where = PRESETS_FOLDER if folder == PRESETS else Path(folder)
    located = dict(options)
    for name in _PATHS:
        path = options.get(name)
        if path is not None and str(path) not in EMBEDDED_DATASETS and (where / str(path)).exists():
            located[name] = str((where / str(path)).resolve())
    return located


@arguments_named()
def _resolve(options: dict[str, Any], where: str, spec: StudySpec) -> ResolvedConfig:
    asked = parse_options({**options, "log_timestep_bins": 0, "output_dir": "run"}, where)
    config = resolve_config(asked)
    if config.use_ema:
        config.ema_form.without_snapshots("ema", asked.ema)
    points = config.validation_steps
    if points is None and config.num_validation_images:
        if config.max_train_steps is None:
            raise LabError("evaluation points of a run need its length in updates: give max_train_steps, not num_epochs.")
        points = max(1, config.max_train_steps // spec.evaluation_points)
    # The precision is not a launcher's, and the number of samples does not depend on the length of a run.
    samples = config.distance_samples
    if samples is None and not settings_of(config).compares_held_out:
        # Registering a metric without naming it changes nothing.
        named = (*spec.metrics, *((spec.tune.metric,) if spec.tune else ()))
        are_needed = any(name in METRICS and "samples" in METRICS[name].needs for name in named)
        in_full = kind_of(config).measured_samples(sys.maxsize, config.num_validation_images, None)
        samples = in_full if are_needed or image_set_of(config) is not None else 0
    own: dict[str, Any] = {
        "mixed_precision": config.mixed_precision or "no",
        "validation_steps": points,
        "distance_samples": samples,
    }
    config = dataclasses.replace(config, **own)
    check_schedule(config)
    check_timesteps(config)
    return config


def _check_distinct(runs: list[RunSpec]) -> None:
    seen: dict[str, RunSpec] = {}
    for run in runs:
        if (other := seen.setdefault(run.digest, run)) is run:
            continue
        at = f" at learning rate {run.config.learning_rate:g} of tune" if run.stage == "tune" else ""
        raise LabError(
            f"{other.arm!r} on {other.dataset!r} is the same as {run.arm!r} on {run.dataset!r}{at}: all options are equal. "
            "Leave one out."
        )
