"""Reads the specification of a study from a YAML file, a preset or a dict, and replaces its data sets by others."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.errors import LabError, did_you_mean, must_be, warn
from ...core.files import expanded
from ...core.plugins import load_plugins
from ...core.values import COUNT
from ...core.words import counted, markdown_table
from ...data.sources import local_folder
from ...evaluation.metrics import METRICS
from ...training.arguments import parse_options, read_yaml
from ...training.config import ResolvedConfig
from ...training.resolve import resolve_config
from ..kind_settings import data_lacking
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
            json.dumps(options, default=lambda value: value.item() if hasattr(value, "item") else os.fspath(value))
        )
    except (TypeError, ValueError, RecursionError) as error:
        wanted = "text, numbers, booleans, lists and mappings, as in YAML"
        raise LabError(f"The dict of a study may only hold {wanted}. {error}.") from None


_KEYS = (
    *("title", "base", "arms", "datasets", "seeds", "learning_rates", "baseline", "metrics", "primary_metric"),
    *("tune", "evaluation_points"),
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
    where = str(folder.resolve())
    return StudySpec(name, str(title), base, arms, datasets, seeds, baseline, metrics, primary, tune, points, folder=where)


# Saved values of keys that were not given.
_SAVED_AS: dict[str, Any] = {"metrics": [], "primary_metric": "", "tune": None}
_SAVED_AS |= {"horizons": [], "precision": "fp32"}  # by version 0.1.0
_OF_REPORTS = ("claims", "paper", "speedup_metric")  # keys of version 0.1.0 that change no run


def spec_from_dict(saved: dict[str, Any], where: Path) -> StudySpec:
    """The study that [`StudyFolder.write_spec`] saved in the folder `where`; checked like any other, as it may be edited."""
    if not isinstance(saved, dict) or not {"name", "folder"} <= {*saved}:
        raise LabError(f"{str(where / 'spec.yaml')!r} is not a specification saved by a study. Run the original one again.")
    options = {key: value for key, value in saved.items() if key not in _SAVED_AS or value != _SAVED_AS[key]}
    options = {key: value for key, value in options.items() if key not in _OF_REPORTS}
    name, folder = options.pop("name"), options.pop("folder")
    if isinstance(options.get("base"), dict):  # untrusted code: only --import runs plug-ins
        options["base"] = {key: value for key, value in options["base"].items() if key != "plugins"}
    if isinstance(options.get("tune"), dict):
        options["tune"] = {key: value for key, value in options["tune"].items() if value != []}
    spec = read_spec(options, str(name), where / str(folder))
    return dataclasses.replace(spec, folder=PRESETS) if folder == PRESETS else spec


# --- other data sets: --dataset_name ----------------------------------------------------------------------------------

_FLAG = "--dataset_name"


def with_datasets(spec: StudySpec, names: Sequence[str]) -> StudySpec:
    """
    A study with these data sets, embedded ones, local folders or Hub ids, in place of its own; the same study for none.

    A local folder starts from the current folder, and is stored relative to the study file, if there is one. Raises a
    `LabError` for a data set that is unknown or listed twice. Metrics that cannot be measured with these data are left out,
    with a warning.
    """
    if not names:
        return spec
    datasets = {
        short: {"dataset_name": _as_in_file(name, spec.folder)} for short, name in parts.by_short_names(names, _FLAG).items()
    }
    configs = [resolve_config(parse_options({"dataset_name": name, "output_dir": "run"}, _FLAG)) for name in names]
    return dataclasses.replace(_measured(spec, configs), datasets=parts.read_datasets(datasets))


def _as_in_file(name: str, folder: str) -> str:
    """The data set as a study file in `folder` would name it; for a preset, a folder starts from the current one."""
    if local_folder(name) is None:
        return name
    path = expanded(name)
    if not path.exists():
        raise must_be(_FLAG, name, "a data set, or a folder that exists", "relative paths start from the current folder")
    if folder != PRESETS:
        return os.path.relpath(path, folder)
    if (PRESETS_FOLDER / path).exists():  # which a relative path would mean
        return str(path.absolute())
    return str(path) if path.is_absolute() else f".{os.sep}{path}"  # never taken for a Hub id


def _measured(spec: StudySpec, configs: Sequence[ResolvedConfig]) -> StudySpec:
    """
    The study without the metrics that cannot be measured with these data, such as a Fréchet distance without features that
    suit the images. Raises a `LabError` if none is left, or if the learning rates are chosen by one.
    """
    asked = [name for name in (*spec.metrics, *((spec.tune.metric,) if spec.tune else ())) if name in METRICS]
    found = ((name, data_lacking(name, config)) for name in asked for config in configs)
    reasons = {name: reason for name, reason in found if reason}
    if not reasons:
        return spec
    left = tuple(name for name in spec.metrics if name not in reasons)
    why = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
    if not left or spec.tune and spec.tune.metric in reasons:
        file = (PRESETS_FOLDER if spec.folder == PRESETS else Path(spec.folder)) / f"{spec.name}.yaml"
        what = "chooses learning rates by it" if left else "has no other metric"
        raise LabError(f"{why}. {spec.name!r} {what}. Hint: change it in a copy of {str(file)!r}, and run the copy.")
    warn(f"Left out: {why}. Hint: the study is compared by {', '.join(left)}.")
    primary = spec.primary_metric if spec.primary_metric in left else left[0]
    return dataclasses.replace(spec, metrics=left, primary_metric=primary)


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
