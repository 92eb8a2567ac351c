"""Other data sets than those of a study file or preset: `lrlab study run PRESET --dataset_name THEIRS`."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import LabError, must_be, warn
from ...core.files import expanded
from ...data.sources import local_folder
from ...evaluation.metrics import METRICS
from ...training.arguments import parse_options
from ...training.config import ResolvedConfig
from ...training.resolve import resolve_config
from ..kind_settings import data_lacking
from ..shown_command import PRESETS_FOLDER
from .parts import by_short_names, read_datasets
from .spec import PRESETS, StudySpec

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
        short: {"dataset_name": _as_in_file(name, spec.folder)} for short, name in by_short_names(names, _FLAG).items()
    }
    configs = [resolve_config(parse_options({"dataset_name": name, "output_dir": "run"}, _FLAG)) for name in names]
    return dataclasses.replace(_measured(spec, configs), datasets=read_datasets(datasets))


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
