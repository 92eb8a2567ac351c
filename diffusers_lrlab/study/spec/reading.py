"""Reads the specification of a study from a YAML file, a preset or a dict."""

import dataclasses
import json
from os import fspath
from pathlib import Path
from typing import Any

from ...core.errors import LabError, did_you_mean, must_be
from ...core.files import expanded
from ...core.plugins import load_plugins
from ...core.values import COUNT
from ...core.words import counted, markdown_table
from ...evaluation.metrics import METRICS
from ...training.arguments import read_yaml
from ..shown_command import PRESETS_FOLDER, preset_names
from . import parts
from .expansion import located
from .spec import PRESETS, StudySpec


def load_spec(source: str | Path | dict[str, Any] | StudySpec) -> StudySpec:
    """
    A study from a YAML file, the name of a preset, or the keys of such a file.

    Raises a `LabError` for unknown keys and values that are not allowed.
    """
    if isinstance(source, StudySpec):
        return source
    if isinstance(source, dict):
        return read_spec(_plain(source), "study")
    source = str(source)
    if source in preset_names():
        options = read_yaml(str(PRESETS_FOLDER / f"{source}.yaml"), "the preset")
        return dataclasses.replace(read_spec(options, source), folder=PRESETS)
    path = expanded(source)
    if not path.exists():
        hint = did_you_mean(source, [*preset_names(), *map(str, path.parent.glob("*.y*ml"))])
        raise LabError(f"There is no study {source!r}.{hint} Give a YAML file or a preset: {', '.join(preset_names())}.")
    options = read_yaml(str(path), "the study")
    if {*options} - {"source", "preset"} == {"command", "spec"}:  # the `spec.yaml` of a study
        return spec_from_dict(options["spec"], path.parent)
    return read_spec(options, path.stem, path.parent)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """The keys of a study as a file would have them: numpy numbers, paths and tuples are converted."""
    try:
        return json.loads(
            json.dumps(options, default=lambda value: value.item() if hasattr(value, "item") else fspath(value))
        )
    except (TypeError, ValueError, RecursionError) as error:
        wanted = "text, numbers, booleans, lists and mappings, as in YAML"
        raise LabError(f"The dict of a study may only hold {wanted}. {error}.") from None


_KEYS = (
    *("title", "base", "arms", "datasets", "seeds", "learning_rates", "baseline", "metrics", "primary_metric"),
    *("tune", "evaluation_points", "speedup_metric"),
)


def read_spec(options: dict[str, Any], name: str, folder: Path = Path()) -> StudySpec:
    """A study from the keys in docs/reference/studies.md; relative paths in it start from `folder`."""
    parts.check_keys(options, _KEYS, f"the study {name!r}")
    for key, value in options.items():
        if value is None:
            raise LabError(f"{key} has no value in the study {name!r}. Give one, or leave it out.")
    for needed in ("arms", "datasets"):
        if not options.get(needed):
            raise LabError(f"The study {name!r} has no {needed}. Add them; docs/tutorials/first-study.md shows how.")
    base = parts.read_fields(options.get("base", {}), "base")
    load_plugins(located(base, str(folder)).get("plugins"))  # which may register names that are used below
    arms, endings = parts.read_arms(options["arms"], options.get("learning_rates"))
    datasets = parts.read_datasets(options["datasets"])
    seeds = parts.read_seeds(options.get("seeds", 5), "seeds")
    baseline = str(options.get("baseline", next(iter(arms))))
    if baseline not in arms:
        raise LabError(f"The baseline {baseline!r} is not an arm.{did_you_mean(baseline, arms)} They are {', '.join(arms)}.")
    parts.resolve_controls(arms, endings, baseline)
    if options.get("metrics") == []:
        raise must_be("metrics", [], "a list of one or more names", "leave it out for the default metrics")
    metrics = tuple(str(name) for name in parts.list_of(options.get("metrics", []), "metrics"))
    tune = parts.read_tuning(options.get("tune"), seeds)
    if tune and any("learning_rates" in (fields or {}) for fields in (options, *options["arms"].values())):
        raise LabError("learning_rates and tune exclude each other: either all rates are compared, or one is chosen.")
    points = options.get("evaluation_points", 20)
    if points not in COUNT:
        raise must_be("evaluation_points", points, str(COUNT), "it is the number of validations over a run")
    primary = str(options.get("primary_metric", metrics[0] if metrics else ""))
    title = options.get("title", name)
    if isinstance(title, (bool, list, dict)):
        raise must_be("title", title, "text", "such as title: 'My study'")
    logged = [name for name, metric in METRICS.items() if metric.of == "log"]
    speedup = options.get("speedup_metric")
    if speedup not in (None, *logged):
        raise must_be("speedup_metric", speedup, " or ".join(logged), "others are not measured during a run")
    return StudySpec(
        name, str(title), base, arms, datasets, seeds, baseline, metrics, primary, tune, points, speedup,
        folder=str(folder.resolve()),
    )  # fmt: skip


# Saved values of keys that were not given.
_SAVED_AS: dict[str, Any] = {"metrics": [], "primary_metric": "", "tune": None, "speedup_metric": None, "horizons": []}
_OF_REPORTS = ("claims", "paper")  # keys of version 0.1.0 that change no run


def spec_from_dict(saved: dict[str, Any], where: Path) -> StudySpec:
    """The study that [`StudyFolder.write_spec`] saved in the folder `where`; checked like any other, as it may be edited."""
    if not isinstance(saved, dict) or not {"name", "folder", "precision"} <= {*saved}:
        raise LabError(f"{str(where / 'spec.yaml')!r} is not a specification saved by a study. Run the original one again.")
    options = {key: value for key, value in saved.items() if key not in _SAVED_AS or value != _SAVED_AS[key]}
    options = {key: value for key, value in options.items() if key not in _OF_REPORTS}
    name, folder, precision = (options.pop(key) for key in ("name", "folder", "precision"))
    if isinstance(options.get("base"), dict):  # untrusted code: only --import runs plug-ins
        options["base"] = {key: value for key, value in options["base"].items() if key != "plugins"}
    if isinstance(options.get("tune"), dict):
        options["tune"] = {key: value for key, value in options["tune"].items() if value != []}
    spec = dataclasses.replace(read_spec(options, str(name), where / str(folder)), precision=str(precision))
    return dataclasses.replace(spec, folder=PRESETS) if folder == PRESETS else spec


# --- presets ---------------------------------------------------------------------------------------------------------


def num_runs(spec: StudySpec) -> int:
    """The runs that compare and those that tune, without extensions; counted, as to resolve them all takes seconds."""
    of_cell = len(spec.seeds) + (len(spec.tune.grid) * len(spec.tune.seeds) if spec.tune else 0)
    return len(spec.arms) * len(spec.datasets) * of_cell


def presets_table() -> str:
    specs = map(load_spec, preset_names())
    rows = [(f"`{spec.name}`", spec.title, str(num_runs(spec))) for spec in specs]
    return markdown_table(("preset", "what it is about", "runs"), rows)


def presets_text() -> str:
    specs = [load_spec(name) for name in preset_names()]
    width = max(len(spec.name) for spec in specs)
    return "\n".join(f"  {spec.name:<{width}}  {counted(num_runs(spec), 'run', '>4')}  {spec.title}" for spec in specs)
