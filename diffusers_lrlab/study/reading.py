"""From a YAML file, or the name of a preset, to the specification of a study."""

from __future__ import annotations

import dataclasses
import importlib.resources
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import LabError, did_you_mean
from ..training.arguments import read_yaml
from ..training.config import TrainingConfig
from .spec import NOT_IN_SPECS, PRESETS, StudySpec, Tuning
from .statistics import LARGER_IS_BETTER, NEITHER_IS_BETTER

# What data a run is about, which the data sets of a study decide.
_SOURCES = (
    *("dataset_name", "dataset_config_name", "dataset_split", "train_data_dir", "streaming", "image_column"),
    *("point_column", "resolution", "image_channels"),
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@+-]{0,63}")


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
            return dataclasses.replace(read_spec(read_yaml(str(path), "the preset"), source), folder=PRESETS)
    path = Path(source).expanduser()
    if not path.suffix and not path.exists():
        hint = did_you_mean(source, preset_names())
        raise LabError(f"There is no study {source!r}.{hint} Give a YAML file or a preset: {', '.join(preset_names())}.")
    options = read_yaml(str(path), "the study")
    if {*options} == {"command", "spec"}:  # what a study keeps of itself
        return spec_from_dict(options["spec"], path.parent)
    return read_spec(options, path.stem, path.parent)


_KEYS = (
    *("title", "base", "arms", "datasets", "seeds", "learning_rates", "baseline", "metrics", "primary_metric"),
    *("tune", "evaluation_points", "speedup_metric", "paper"),
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
    for key, value in options.items():
        if value is None:
            raise LabError(f"{key} has no value in the study {name!r}. Give one, or leave it out.")
    for needed in ("arms", "datasets"):
        if not options.get(needed):
            raise LabError(f"The study {name!r} has no {needed}. Add them; README, Studies, shows the form.")
    base = _fields(options.get("base", {}), "base")
    arms = _arms(options["arms"], options.get("learning_rates"))
    datasets = _datasets(options["datasets"])
    seeds = _seeds(options.get("seeds", 5), "seeds")
    baseline = str(options.get("baseline", next(iter(arms))))
    if baseline not in arms:
        raise LabError(
            f"The baseline {baseline!r} is none of the arms.{did_you_mean(baseline, arms)} They are {', '.join(arms)}."
        )
    metrics = tuple(str(name) for name in _list(options.get("metrics", []), "metrics"))
    tune = _tuning(options.get("tune"), seeds)
    if tune and any("learning_rates" in (fields or {}) for fields in (options, *options["arms"].values())):
        raise LabError("learning_rates and tune exclude each other: either all rates are compared, or one is chosen.")
    points = options.get("evaluation_points", 20)
    if not isinstance(points, int) or isinstance(points, bool) or points < 1:
        raise LabError(f"evaluation_points: {points!r} is not allowed; use a whole number, 1 or more.")
    primary = str(options.get("primary_metric", metrics[0] if metrics else ""))
    paper = options.get("paper")
    if paper not in (None, "table", "nearest"):
        raise LabError(f"paper: {paper!r} is not allowed; use table, nearest, or nothing.")
    if paper == "nearest" and metrics and not {"kl", "training_set_loss"} <= {*metrics}:
        raise LabError("paper: nearest compares kl and training_set_loss with the paper's. Add both to metrics.")
    return StudySpec(
        name, str(options.get("title", name)), base, arms, datasets, seeds, baseline, metrics, primary, tune, points,
        _speedup_metric(options.get("speedup_metric")), folder=str(folder.resolve()), paper=paper,
    )  # fmt: skip


# What a study keeps in the place of what it was not given.
_KEPT_AS: dict[str, Any] = {"metrics": [], "primary_metric": "", "tune": None, "speedup_metric": None, "paper": None}


def spec_from_dict(kept: dict[str, Any], where: Path) -> StudySpec:
    """
    What [`StudyFolder.write_spec`] kept of a study in the folder `where`; read like any other, since people may edit it.

    Raises:
        LabError: as [`read_spec`].
    """
    if not isinstance(kept, dict) or not {"name", "folder", "precision"} <= {*kept}:
        raise LabError(f"{str(where / 'spec.yaml')!r} is no specification that a study kept. Run the original one again.")
    options = {key: value for key, value in kept.items() if key not in _KEPT_AS or value != _KEPT_AS[key]}
    name, folder, precision = (options.pop(key) for key in ("name", "folder", "precision"))
    if isinstance(options.get("tune"), dict):
        options["tune"] = {key: value for key, value in options["tune"].items() if value != []}
    spec = dataclasses.replace(read_spec(options, str(name), where / str(folder)), precision=str(precision))
    return dataclasses.replace(spec, folder=PRESETS) if folder == PRESETS else spec


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


def _fields(fields: Any, where: str, also: tuple[str, ...] = ()) -> dict[str, Any]:
    """Fields of the training configuration, as they are written."""
    if not isinstance(fields, dict):
        raise LabError(f"{where} must be a mapping of options to values, such as 'lr_scheduler: cosine'.")
    known = [*(field.name for field in dataclasses.fields(TrainingConfig)), *also]
    for name in fields:
        if name in NOT_IN_SPECS:
            raise LabError(f"{where} has {name}, which a study sees to by itself. Leave it out.")
        if name not in known:
            raise LabError(
                f"There is no {name!r} in {where}.{did_you_mean(str(name), known)} Use options of "
                "training_scripts/train_ddpm.py; its --help explains them."
            )
    if fields.get("learning_rate") == "auto":
        raise LabError(f"{where} has learning_rate: auto, which would be another for each seed. Give a number, or use tune.")
    return dict(fields)


def _named(value: Any, what: str) -> dict[str, Any]:
    for name in value:
        if not isinstance(name, str):
            raise LabError(f"The name {name!r} of {what} is not text. Put it into quotes: '{name}'.")
        if not _NAME.fullmatch(name) or "--" in name:
            raise LabError(
                f"The name {name!r} of {what} is not allowed: files are named after it. Use letters, digits and "
                ". _ @ + -, 64 at most."
            )
    return value


def _arms(value: Any, rates: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict):
        raise LabError("arms must be a mapping of names to fields, such as 'cosine: {lr_scheduler: cosine}'.")
    arms: dict[str, dict[str, Any]] = {}
    for name, fields in _named(value, "an arm").items():
        fields = _fields({} if fields is None else fields, f"the arm {name!r}", ("description", "learning_rates"))
        for source in _SOURCES:
            if source in fields:
                raise LabError(
                    f"The arm {name!r} has {source}, but arms are compared on the same data. Add a data set instead."
                )
        own = fields.pop("learning_rates", rates)
        if own is not None and "learning_rate" in fields:
            raise LabError(f"The arm {name!r} has learning_rate and learning_rates. Give one of them.")
        if own is None:
            expanded = [(name, fields)]
        else:
            several = _numbers(own, f"learning_rates of {name!r}")
            expanded = [(f"{name}@{rate:g}", {**fields, "learning_rate": rate}) for rate in several]
        for arm, its_fields in expanded:
            if arm in arms:
                raise LabError(
                    f"Two arms would be called {arm!r}. Give other names, and rates that differ in their first 6 digits."
                )
            arms[arm] = its_fields
    return arms


def _datasets(value: Any) -> dict[str, dict[str, Any]]:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        value = {str(name): {"dataset_name": name} for name in _list(value, "datasets")}
    if not isinstance(value, dict):
        raise LabError("datasets must be a list of names, or a mapping of names to fields.")
    return {
        name: _with_source(name, _fields({} if fields is None else fields, f"the data set {name!r}"))
        for name, fields in _named(value, "a data set").items()
    }


def _with_source(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a data set; it is the one of this name unless they say otherwise."""
    return fields if {"dataset_name", "train_data_dir"} & {*fields} else {"dataset_name": name, **fields}


def _tuning(value: Any, seeds: tuple[int, ...]) -> Tuning | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise LabError("tune must be a mapping with learning_rates, seeds and metric.")
    _known(value, ("learning_rates", "factors", "seeds", "metric"), "tune")
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
    if metric in (*LARGER_IS_BETTER, *NEITHER_IS_BETTER):
        raise LabError(f"tune: metric {metric!r} is not better the smaller it is. Choose by one that is.")
    return Tuning(rates, factors, own, metric)
