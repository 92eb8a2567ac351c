"""The specification of a study as data: read, checked as a whole, and spread out into runs."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..data.sources import settle_point_column
from ..errors import LabError, did_you_mean
from ..training.arguments import parse_options, read_yaml
from ..training.checks import check_source, resolve_config
from ..training.choices import check_schedule
from ..training.config import EMBEDDED_DEFAULTS, OutputConfig, TrainingConfig
from ..training.kinds import kind_of
from ..training.timestep_choices import check_timesteps
from .metrics import check_metrics, default_metrics
from .statistics import LARGER_IS_BETTER

# What a study sees to by itself, and what has no place in it.
_NOT_IN_SPECS = frozenset(
    {field.name for field in dataclasses.fields(OutputConfig)}
    - {"logging_steps", "validation_steps", "distance_samples", "frechet_samples", "checkpointing_steps"}
) | {"seed", "local_rank", "cpu_threads", "log_timestep_bins", "timestep_grad_every"}
# Fields that say how a run is done, not what comes out of it.
_NOT_IN_RESULT = _NOT_IN_SPECS - {"seed", "eval_batch_size"} | {"checkpointing_steps", "in_memory_limit_mb"}
# The same of fields that a specification may have; they count as these values.
_WITHOUT_EFFECT = {"cache_dir": None, "dataloader_num_workers": 0}
_FORMAT = 1  # of result files; part of the identity of a run
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@+-]*")


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

    def rates_for(self, config: TrainingConfig) -> list[float]:
        """To choose from, for an arm."""
        return list(self.learning_rates) or [config.learning_rate * factor for factor in self.factors]


@dataclass(frozen=True)
class StudySpec:
    """
    A study.

    Args:
        name (`str`): Of the file or preset.
        title (`str`): For people.
        base (`dict`): Fields of the training configuration that all runs share.
        arms (`dict`): From the name of an arm to its fields, and its `description`.
        datasets (`dict`): From the name of a data set to its fields.
        seeds (`tuple` of `int`): Of each arm on each data set.
        baseline (`str`): The arm that the others are compared with.
        metrics (`tuple` of `str`): What is compared.
        primary_metric (`str`): What the findings are about first.
        tune ([`Tuning`], *optional*): How learning rates are chosen.
        evaluation_points (`int`): Validations over a run.
        speedup_metric (`str`, *optional*): The validation loss by whose course arms are said to be faster.
        precision (`str`): A name in `PRECISIONS`.
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

    def to_dict(self) -> dict[str, Any]:
        """As data."""
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
        config ([`TrainingConfig`]): Resolved.
        metrics (`tuple` of `str`): What is measured at its end.
        precision (`str`): Of products of matrices.
        model (`dict`, *optional*): The configuration of the model, if one was asked for.
    """

    arm: str
    dataset: str
    seed: int
    stage: str
    config: TrainingConfig = field(repr=False)
    metrics: tuple[str, ...] = field(repr=False)
    precision: str = field(default="fp32", repr=False)
    model: dict[str, Any] | None = field(default=None, repr=False)

    @cached_property
    def digest(self) -> str:
        """Changes with everything that decides the result."""
        fields = {key: value for key, value in self.config.to_dict().items() if key not in _NOT_IN_RESULT} | _WITHOUT_EFFECT
        if self.model is not None:  # what is in the file counts, not where it is
            fields["model_config_name_or_path"] = self.model
        text = json.dumps([_FORMAT, fields, sorted(self.metrics), self.precision], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    @property
    def id(self) -> str:
        """The name of its file."""
        return f"{self.arm}--{self.dataset}--{self.seed}--{self.digest}"


def preset_names() -> list[str]:
    """Studies that come with the package."""
    folder = importlib.resources.files(__package__) / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_spec(source: str) -> StudySpec:
    """
    A study from a YAML file or the name of a preset.

    Raises:
        LabError: for names that are not known, fields that do not exist, and what cannot be done as asked.
    """
    if source in preset_names():
        with importlib.resources.as_file(importlib.resources.files(__package__) / "presets" / f"{source}.yaml") as path:
            return read_spec(read_yaml(str(path), "the preset"), source, path.parent)
    path = Path(source).expanduser()
    if not path.suffix and not path.exists():
        hint = did_you_mean(source, preset_names())
        raise LabError(f"There is no study {source!r}.{hint} Give a YAML file or a preset: {', '.join(preset_names())}.")
    return read_spec(read_yaml(str(path), "the study"), path.stem, path.parent)


_KEYS = (
    *("title", "base", "arms", "datasets", "seeds", "learning_rates", "baseline", "metrics", "primary_metric"),
    *("tune", "evaluation_points", "speedup_metric"),
)


def read_spec(options: dict[str, Any], name: str, folder: Path = Path()) -> StudySpec:
    """
    A study from data.

    Args:
        options (`dict`): As README, Studies, describes them.
        name (`str`): Of the study.
        folder (`Path`): What paths in it start from.
    """
    _known(options, _KEYS, f"the study {name!r}")
    for needed in ("arms", "datasets"):
        if not options.get(needed):
            raise LabError(f"The study {name!r} has no {needed}. Add them; README, Studies, shows the form.")
    base = _fields(options.get("base") or {}, "base", folder)
    arms = _arms(options["arms"], options.get("learning_rates"), folder)
    datasets = _datasets(options["datasets"], folder)
    seeds = _seeds(options.get("seeds", 5), "seeds")
    baseline = str(options.get("baseline", next(iter(arms))))
    if baseline not in arms:
        raise LabError(
            f"The baseline {baseline!r} is none of the arms.{did_you_mean(baseline, arms)} They are {', '.join(arms)}."
        )
    metrics = tuple(str(name) for name in _list(options.get("metrics") or [], "metrics"))
    tune = _tuning(options.get("tune"), seeds, options.get("learning_rates"))
    points = options.get("evaluation_points", 20)
    if not isinstance(points, int) or isinstance(points, bool) or points < 1:
        raise LabError(f"evaluation_points: {points!r} is not allowed; use a whole number, 1 or more.")
    primary = str(options.get("primary_metric", metrics[0] if metrics else ""))
    return StudySpec(
        name, str(options.get("title", name)), base, arms, datasets, seeds, baseline, metrics, primary, tune, points,
        _speedup_metric(options.get("speedup_metric")),
    )  # fmt: skip


def spec_from_dict(kept: dict[str, Any]) -> StudySpec:
    """What [`StudySpec.to_dict`] was made of."""
    tune = kept["tune"]
    if tune is not None:
        lists = (tuple(tune[name]) for name in ("learning_rates", "factors", "seeds"))
        tune = Tuning(*lists, tune["metric"])  # type: ignore[call-arg, arg-type]  # mypy does not count them
    return StudySpec(**{**kept, "seeds": tuple(kept["seeds"]), "metrics": tuple(kept["metrics"]), "tune": tune})


def _speedup_metric(value: Any) -> str | None:
    if value not in (None, "validation_loss", "validation_loss_ema"):
        raise LabError(f"speedup_metric: {value!r} has no course over a run. Use validation_loss_ema or validation_loss.")
    return value


def _known(options: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in options:
        if key not in keys:
            raise LabError(f"There is no {key!r} in {where}.{did_you_mean(str(key), keys)} Known: {', '.join(keys)}.")


def _list(value: Any, what: str) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    for one in values:
        if values.count(one) > 1:
            raise LabError(f"{what}: {one!r} is there twice. Name each once.")
    return values


def _seeds(value: Any, what: str) -> tuple[int, ...]:
    seeds = list(range(value)) if isinstance(value, int) and not isinstance(value, bool) else _list(value, what)
    if not seeds or not all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in seeds):
        raise LabError(f"{what}: {value!r} is not allowed; give a number of seeds, or a list such as [0, 1, 2].")
    return tuple(seeds)


def _numbers(value: Any, what: str) -> tuple[float, ...]:
    values = _list(value, what)
    try:
        rates = tuple(float(rate) for rate in values)
    except (TypeError, ValueError, OverflowError):
        rates = ()
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise LabError(f"{what}: {value!r} is not allowed; give numbers above 0, such as [1e-4, 3e-4].")
    _list(list(rates), what)  # once more as numbers: YAML takes 3e-4 for text, and 0.0003 not
    return rates


def _fields(fields: Any, where: str, folder: Path, also: tuple[str, ...] = ()) -> dict[str, Any]:
    """Fields of the training configuration, with paths that start from the file of the study."""
    if not isinstance(fields, dict):
        raise LabError(f"{where} must be a mapping of options to values, such as 'lr_scheduler: cosine'.")
    known = [*(field.name for field in dataclasses.fields(TrainingConfig)), *also]
    for name in fields:
        if name in _NOT_IN_SPECS:
            raise LabError(f"{where} has {name}, which a study sees to by itself. Leave it out.")
        if name not in known:
            raise LabError(
                f"There is no {name!r} in {where}.{did_you_mean(str(name), known)} Use options of "
                "training_scripts/train_ddpm.py; its --help explains them."
            )
    fields = dict(fields)
    for name in ("model_config_name_or_path", "train_data_dir", "dataset_name"):
        path = fields.get(name)
        if path is not None and str(path) not in EMBEDDED_DEFAULTS and (folder / str(path)).exists():
            fields[name] = str((folder / str(path)).resolve())
    return fields


def _named(value: Any, what: str) -> dict[str, Any]:
    for name in value:
        if not isinstance(name, str):
            raise LabError(f"The name {name!r} of {what} is not text. Put it into quotes: '{name}'.")
        if not _NAME.fullmatch(name) or "--" in name:
            raise LabError(
                f"The name {name!r} of {what} is not allowed: files are named after it. Use letters, digits and . _ @ + -."
            )
    return value


def _arms(value: Any, rates: Any, folder: Path) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict):
        raise LabError("arms must be a mapping of names to fields, such as 'cosine: {lr_scheduler: cosine}'.")
    arms: dict[str, dict[str, Any]] = {}
    for name, fields in _named(value, "an arm").items():
        fields = _fields(fields or {}, f"the arm {name!r}", folder, ("description", "learning_rates"))
        own = fields.pop("learning_rates", rates)
        if own is None:
            arms[name] = fields
            continue
        if "learning_rate" in fields:
            raise LabError(f"The arm {name!r} has learning_rate and learning_rates. Give one of them.")
        for rate in _numbers(own, f"learning_rates of {name!r}"):
            if f"{name}@{rate:g}" in arms:
                raise LabError(
                    f"Two arms would be called '{name}@{rate:g}'. Give rates that differ in their first 6 digits."
                )
            arms[f"{name}@{rate:g}"] = {**fields, "learning_rate": rate}
    return arms


def _datasets(value: Any, folder: Path) -> dict[str, dict[str, Any]]:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        value = {str(name): {"dataset_name": name} for name in _list(value, "datasets")}
    if not isinstance(value, dict):
        raise LabError("datasets must be a list of names, or a mapping of names to fields.")
    return {
        name: _fields(fields if fields else {"dataset_name": name}, f"the data set {name!r}", folder)
        for name, fields in _named(value, "a data set").items()
    }


def _tuning(value: Any, seeds: tuple[int, ...], compared_rates: Any) -> Tuning | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise LabError("tune must be a mapping with learning_rates, seeds and metric.")
    _known(value, ("learning_rates", "factors", "seeds", "metric"), "tune")
    if compared_rates is not None:
        raise LabError("learning_rates and tune exclude each other: either all rates are compared, or one is chosen.")
    if ("learning_rates" in value) == ("factors" in value):
        raise LabError("tune takes learning_rates, or factors of the arm's own learning rate: one of them.")
    own = _seeds(value.get("seeds", [1000, 1001]), "tune: seeds")
    if shared := sorted(set(own) & set(seeds)):
        raise LabError(
            f"tune: seeds {shared} are those of the comparison, and would favour the arms that were lucky there. Use others."
        )
    rates, factors = (
        _numbers(value[name], f"tune: {name}") if name in value else () for name in ("learning_rates", "factors")
    )
    metric = str(value.get("metric", "kl"))
    if metric in LARGER_IS_BETTER:
        raise LabError(
            f"tune: metric {metric!r} is better the larger it is. Choose by one that is better the smaller it is."
        )
    return Tuning(rates, factors, own, metric)


def expand(spec: StudySpec, chosen: dict[tuple[str, str], float] | None = None) -> list[RunSpec]:
    """
    All runs of a comparison, checked, as far as that can be done without data.

    Args:
        spec ([`StudySpec`]): The study.
        chosen (`dict`, *optional*): The learning rate of each (arm, data set), once they are tuned.

    Raises:
        LabError: for the first run that cannot be done as asked, and for two arms that are the same.
    """
    runs = []
    for (arm, dataset), (config, model) in _configs(spec).items():
        if chosen:
            config = dataclasses.replace(config, learning_rate=chosen[arm, dataset])
        metrics = spec.metrics or default_metrics(config)
        runs += [
            RunSpec(arm, dataset, seed, "compare", dataclasses.replace(config, seed=seed), metrics, spec.precision, model)
            for seed in spec.seeds
        ]
    _check_distinct(runs)
    measured = {name: None for run in runs for name in run.metrics}
    if spec.primary_metric and spec.primary_metric not in measured:
        raise LabError(
            f"primary_metric: {spec.primary_metric!r} is none of the metrics of the study."
            f"{did_you_mean(spec.primary_metric, measured)} They are {', '.join(measured)}."
        )
    return runs


def expand_tuning(spec: StudySpec) -> list[RunSpec]:
    """All runs that learning rates are chosen by."""
    if spec.tune is None:
        return []
    runs = []
    for (arm, dataset), (config, model) in _configs(spec).items():
        check_metrics((spec.tune.metric,), config, "tune: metric")
        for rate in spec.tune.rates_for(config):
            for seed in spec.tune.seeds:
                own = dataclasses.replace(config, learning_rate=rate, seed=seed)
                runs.append(RunSpec(arm, dataset, seed, "tune", own, (spec.tune.metric,), spec.precision, model))
    _check_distinct(runs)
    return runs


def _configs(spec: StudySpec) -> dict[tuple[str, str], tuple[TrainingConfig, dict[str, Any] | None]]:
    """The resolved configuration of each arm on each data set, and that of its model if one was asked for."""
    configs = {}
    models: dict[Any, dict[str, Any] | None] = {}  # read once each, as they may be on the Hub
    for arm, arm_fields in spec.arms.items():
        own = {key: value for key, value in arm_fields.items() if key != "description"}
        for dataset, dataset_fields in spec.datasets.items():
            where = f"the arm {arm!r} on {dataset!r}"
            options = {**spec.base, **dataset_fields, **own}
            try:
                config = _settle(options, where, spec.evaluation_points)
                check_metrics(spec.metrics, config, "metrics")
                check_metrics((spec.speedup_metric,) if spec.speedup_metric else (), config, "speedup_metric")
                key = tuple(
                    getattr(config, name)
                    for name in ("model_config_name_or_path", "cache_dir", "point_column", "resolution", "image_channels")
                )
                if key not in models:
                    models[key] = kind_of(config).load_model_config(config)
            except LabError as error:
                raise LabError(f"In {where}: {error}") from None
            configs[arm, dataset] = config, models[key]
    return configs


def _settle(options: dict[str, Any], where: str, evaluation_points: int) -> TrainingConfig:
    config = parse_options({**options, "log_timestep_bins": 0, "output_dir": "run"}, where)
    check_source(config)
    config = resolve_config(dataclasses.replace(config, point_column=settle_point_column(config)))
    config.mixed_precision = config.mixed_precision or "no"  # of the study, not of a launcher
    if config.validation_steps is None and config.num_validation_images:
        if config.max_train_steps is None:
            raise LabError("evaluation points of a run need its length in updates: give max_train_steps, not num_epochs.")
        config.validation_steps = max(1, config.max_train_steps // evaluation_points)
    check_schedule(config)
    check_timesteps(config)
    return config


def _check_distinct(runs: list[RunSpec]) -> None:
    seen: dict[str, RunSpec] = {}
    for run in runs:
        other = seen.setdefault(run.digest, run)
        if other is run:
            continue
        if other.dataset != run.dataset:
            raise LabError(
                f"{other.arm!r} on {other.dataset!r} is the same as {run.arm!r} on {run.dataset!r}: every field agrees. "
                "Let the data sets differ, and leave their options out of the arms."
            )
        at = f" at learning rate {run.config.learning_rate:g} of tune" if run.stage == "tune" else ""
        raise LabError(
            f"The arms {other.arm!r} and {run.arm!r} are the same on {run.dataset!r}{at}: every field agrees. Leave one out."
        )
