"""From a YAML file, or the name of a preset, to the specification of a study."""

from __future__ import annotations

import dataclasses
import importlib.resources
from pathlib import Path
from typing import Any

from ...core.errors import LabError, did_you_mean
from ...core.plugins import load_plugins
from ...evaluation.metrics import METRICS
from ...training.arguments import read_yaml
from .expansion import located
from .parts import check_keys, list_of, read_arms, read_datasets, read_fields, read_seeds, read_tuning, resolve_controls
from .spec import PRESETS, StudySpec


def preset_names() -> list[str]:
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
    if {*options} == {"command", "spec"}:  # what a study saves of itself
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
    check_keys(options, _KEYS, f"the study {name!r}")
    for key, value in options.items():
        if value is None:
            raise LabError(f"{key} has no value in the study {name!r}. Give one, or leave it out.")
    for needed in ("arms", "datasets"):
        if not options.get(needed):
            raise LabError(f"The study {name!r} has no {needed}. Add them; README, Studies, shows the form.")
    base = read_fields(options.get("base", {}), "base")
    load_plugins(located(base, str(folder)).get("plugins"))  # the names of what follows may be theirs
    arms, endings = read_arms(options["arms"], options.get("learning_rates"))
    datasets = read_datasets(options["datasets"])
    seeds = read_seeds(options.get("seeds", 5), "seeds")
    baseline = str(options.get("baseline", next(iter(arms))))
    if baseline not in arms:
        raise LabError(
            f"The baseline {baseline!r} is none of the arms.{did_you_mean(baseline, arms)} They are {', '.join(arms)}."
        )
    resolve_controls(arms, endings, baseline)
    metrics = tuple(str(name) for name in list_of(options.get("metrics", []), "metrics"))
    tune = read_tuning(options.get("tune"), seeds)
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


# What a study saves for keys that were not given.
_SAVED_AS: dict[str, Any] = {"metrics": [], "primary_metric": "", "tune": None, "speedup_metric": None, "paper": None}


def spec_from_dict(saved: dict[str, Any], where: Path) -> StudySpec:
    """
    What [`StudyFolder.write_spec`] saved of a study in the folder `where`; read like any other, since people may edit it.

    Raises:
        LabError: as [`read_spec`].
    """
    if not isinstance(saved, dict) or not {"name", "folder", "precision"} <= {*saved}:
        raise LabError(f"{str(where / 'spec.yaml')!r} is not a specification saved by a study. Run the original one again.")
    options = {key: value for key, value in saved.items() if key not in _SAVED_AS or value != _SAVED_AS[key]}
    name, folder, precision = (options.pop(key) for key in ("name", "folder", "precision"))
    if isinstance(options.get("base"), dict):  # it may be somebody else's, whose code is only run where --import says so
        options["base"] = {key: value for key, value in options["base"].items() if key != "plugins"}
    if isinstance(options.get("tune"), dict):
        options["tune"] = {key: value for key, value in options["tune"].items() if value != []}
    spec = dataclasses.replace(read_spec(options, str(name), where / str(folder)), precision=str(precision))
    return dataclasses.replace(spec, folder=PRESETS) if folder == PRESETS else spec


def _speedup_metric(value: Any) -> str | None:
    logged = [name for name, metric in METRICS.items() if metric.of == "log"]
    if value not in (None, *logged):
        raise LabError(f"speedup_metric: {value!r} has no course over a run. Use {' or '.join(logged)}.")
    return value
