"""Other data sets than those of a study file or preset: `lrlab study run PRESET --dataset_name THEIRS`."""

import dataclasses
import os
import pkgutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import LabError, must_be, warn
from ...core.files import expanded
from ...core.options import options_of
from ...data.sources import local_folder
from ...evaluation.metrics import METRICS
from ...models.loading import complete_config, read_model_config
from ...training.arguments import parse_options
from ...training.config import ResolvedConfig, TrainingConfig
from ...training.kinds.base import DataKind
from ...training.kinds.select import kind_of
from ...training.resolve import resolve_config
from ..kind_settings import data_lacking
from ..same_command import PRESETS_FOLDER
from .expansion import located
from .parts import by_short_names, read_datasets
from .spec import ARM_NOTES, PRESETS, StudySpec

_FLAG = "--dataset_name"


def with_datasets(spec: StudySpec, names: Sequence[str]) -> StudySpec:
    """
    A study with these data sets, embedded ones, local folders or Hub ids, in place of its own; the same study for none.

    A local folder starts from the current folder, and is stored relative to the study file, if there is one. Raises a
    `LabError` for a data set that is unknown or listed twice, and for data of a kind that does not suit the study's
    settings. Metrics that cannot be measured with these data are left out, with a warning.
    """
    if not names:
        return spec
    datasets = {
        short: {"dataset_name": _as_in_file(name, spec.folder)} for short, name in by_short_names(names, _FLAG).items()
    }
    configs = [
        resolve_config(parse_options({"dataset_name": name, "output_dir": "run"}, _FLAG), find_columns=True)
        for name in names
    ]
    for config in configs:
        if unsuited := dict.fromkeys(_unsuited(spec, config)):
            raise must_be(
                _FLAG, config.dataset_name, f"data that the settings of {spec.name!r} are for",
                f"change {', '.join(unsuited)} in a copy of {str(_file_of(spec))!r}, and run the copy",
                got=kind_of(config).form,
            )  # fmt: skip
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


def _unsuited(spec: StudySpec, config: ResolvedConfig) -> Iterator[str]:
    """The settings of a study that are for another kind of data, as the study's file has them."""
    known, kind = options_of(TrainingConfig), kind_of(config)
    for where, fields in (("base", spec.base), *spec.arms.items()):
        for name in (name for name in fields if name not in ARM_NOTES):
            if known[name].kinds and kind.name not in known[name].kinds:
                yield f"{name} of {where}"
            elif name == "model_config_name_or_path" and "denoiser" not in fields and not _suits(fields, spec, kind):
                yield f"{name} of {where}"
    yield from (f"the metric {name}" for name in _metrics_of(spec) if METRICS[name].form not in (None, kind.form))


def _metrics_of(spec: StudySpec) -> list[str]:
    """The metrics that compare arms or choose learning rates; unknown ones are reported elsewhere."""
    return [name for name in (*spec.metrics, *((spec.tune.metric,) if spec.tune else ())) if name in METRICS]


def _suits(fields: dict[str, Any], spec: StudySpec, kind: DataKind) -> bool:
    """Whether the configuration of a model, which can be read, is one of the default model for these data."""
    path, model = str(located(fields, spec.folder)["model_config_name_or_path"]), pkgutil.resolve_name(kind.model)
    config = read_model_config(model, path, fields.get("cache_dir"))
    try:
        complete_config(model, config, "--model_config_name_or_path", path)
    except LabError:
        return False
    return True


def _measured(spec: StudySpec, configs: Sequence[ResolvedConfig]) -> StudySpec:
    """
    The study without the metrics that cannot be measured with these data, such as a Fréchet distance without features that
    suit the images. Raises a `LabError` if none is left, or if the learning rates are chosen by one.
    """
    found = ((name, data_lacking(name, config)) for name in _metrics_of(spec) for config in configs)
    reasons = {name: reason for name, reason in found if reason}
    if not reasons:
        return spec
    left = tuple(name for name in spec.metrics if name not in reasons)
    why = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
    if not left or spec.tune and spec.tune.metric in reasons:
        what = "chooses learning rates by it" if left else "has no other metric"
        raise LabError(
            f"{why}. {spec.name!r} {what}. Hint: change it in a copy of {str(_file_of(spec))!r}, and run the copy."
        )
    warn(f"Left out: {why}. Hint: the study is compared by {', '.join(left)}.")
    primary = spec.primary_metric if spec.primary_metric in left else left[0]
    return dataclasses.replace(spec, metrics=left, primary_metric=primary)


def _file_of(spec: StudySpec) -> Path:
    return (PRESETS_FOLDER if spec.folder == PRESETS else Path(spec.folder)) / f"{spec.name}.yaml"
