"""The model of a run: a denoiser chosen by name, a given configuration of the default model, or its default; its start."""

from __future__ import annotations

import dataclasses
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import LabError, must_be
from ..data.latents import known_shape
from ..models.loading import OPTION, StartWeights, complete_config, find_start_weights, load_model_config
from ..models.registry import DENOISERS, Architecture, architecture_of, denoiser_arguments, denoiser_class
from ..models.width import start_for_width, width_of
from .config import ResolvedConfig
from .kinds import component_of, kind_of
from .kinds.images import EMBEDDINGS_HINT
from .resume import read_state

if TYPE_CHECKING:
    from ..data.labels import Classes
    from ..data.loading import TrainingData


def model_class_of(config: ResolvedConfig) -> Any:
    return pkgutil.resolve_name(kind_of(config).model) if config.denoiser is None else denoiser_class(config.denoiser)


def build_model(config: ResolvedConfig, arguments: dict[str, Any]) -> Any:
    """A new model with these arguments."""
    model = (model_class_of(config) if config.denoiser is None else DENOISERS[config.denoiser])(**arguments)
    return architecture_of(config.denoiser).prepared(model)


def make_model(config: ResolvedConfig, arguments: dict[str, Any], start: StartWeights | None = None) -> Any:
    """The model with these arguments, and the weights that it begins with."""
    model = build_model(config, arguments)
    if start is not None:
        start.load_into(model)
    if config.width_base is not None:
        start_for_width(model, width_of(model, config.width_base))
    return model


def find_start(config: ResolvedConfig, checkpoint: Path | None = None) -> StartWeights | None:
    """
    The weights that a run starts from, `None` for random ones. A run that resumes from a checkpoint does not read them
    again: the checkpoint has the weights.
    """
    if config.pretrained_model_name_or_path is None:
        return None
    if checkpoint is None:
        where = config.pretrained_model_name_or_path, config.cache_dir
        return find_start_weights(*where, model_class_of(config).__name__, component_of(config))
    state = read_state(checkpoint)
    return StartWeights(**state["started_from"], config=state["model"], folder=None)


def given_model_config(config: ResolvedConfig, start: StartWeights | None = None) -> dict[str, Any] | None:
    """The configuration given for the model, or of the weights that it starts from, checked without data, or `None`."""
    architecture = architecture_of(config.denoiser)
    if config.num_classes is not None:
        _check_num_classes(architecture, config.num_classes, config, "--num_classes")
    if start is not None:
        return _config_of_start(config, start, architecture)
    if config.denoiser is not None:
        architecture.sizes(config.denoiser_kwargs or {}, _known_arguments(config), None)  # which checks them
        return None
    name = config.model_config_name_or_path
    given = None if name is None else load_model_config(model_class_of(config), name, config.cache_dir)
    kind = kind_of(config)
    complete = kind.check_model_config(config, given)
    if given is not None:
        _check_shape(config, given, _known_arguments(config), f"as the {kind.name} have")
    return complete


def _config_of_start(config: ResolvedConfig, start: StartWeights, architecture: Architecture) -> dict[str, Any]:
    model_class, kind = model_class_of(config), kind_of(config)
    given = complete_config(model_class, start.config, OPTION, start.name_or_path)
    complete = given
    if config.denoiser is None:
        complete = kind.check_model_config(config, given) or given
    else:
        architecture.check_start(given, start.name_or_path)
    _check_shape(config, given, _known_arguments(config), f"as the {kind.name} have")
    if start.folder is not None:
        start.read(model_class)  # so that errors of weights come before data are read
    return complete


def _known_arguments(config: ResolvedConfig) -> dict[str, Any]:
    """Arguments of any model of images or latents that are known before data are read."""
    if (shape := known_shape(config)) is None:
        return {}
    channels, size = shape
    return {"sample_size": size, "in_channels": channels, "out_channels": channels}


def _check_num_classes(architecture: Architecture, num: int, config: ResolvedConfig, name: str) -> None:
    """Raises a `LabError` for more classes than the model has."""
    most = architecture.null_label
    if most is not None and num > most:
        hint = f"the denoiser {config.denoiser!r} has no more; merge classes, or use another model"
        raise must_be(name, num, f"at most {most}", hint)


def classes_of(config: ResolvedConfig, data: TrainingData) -> Classes | None:
    """The classes of the data, with the label by which the model knows "no label"; a `LabError` for too many."""
    if (classes := data.classes) is None:
        return None
    architecture = architecture_of(config.denoiser)
    _check_num_classes(architecture, len(classes.names), config, f"the classes of {config.label_column!r}")
    if architecture.null_label is None:
        return classes
    return dataclasses.replace(classes, null_of_model=architecture.null_label)


def model_arguments(config: ResolvedConfig, given: dict[str, Any] | None, data: TrainingData) -> dict[str, Any]:
    """Arguments of the model, from what [`given_model_config`] gives; a `LabError` if they do not fit the data."""
    from ..data.labels import KEYWORD  # needs torch

    kind = kind_of(config)
    of_data = architecture_of(config.denoiser).of_data(kind.data_arguments(config, data))
    if config.denoiser is not None:
        if config.gradient_checkpointing and not model_class_of(config)._supports_gradient_checkpointing:
            raise LabError(f"--gradient_checkpointing: the denoiser {config.denoiser!r} does not support it. Leave it out.")
    if config.denoiser is not None and given is None:
        return denoiser_arguments(config.denoiser, config.denoiser_kwargs or {}, of_data, kind.name, data.num_images)
    if given is None:
        return kind.default_model_config(config, data)
    is_told_labels = KEYWORD in data.held_out.conditions
    labels = {"num_class_embeds": None} if "num_class_embeds" in given and not is_told_labels else {}
    _check_shape(config, given, labels | of_data, f"as in the data {data.name!r}")
    return given


def _check_shape(config: ResolvedConfig, given: dict[str, Any], of_data: dict[str, Any], why: str) -> None:
    """Raises a `LabError` if a given model is for data of another shape."""
    for name, value in of_data.items():
        # A model without a size takes any; one without embeddings would ignore labels.
        if given.get(name) in ((value,) if name == "num_class_embeds" else (None, value, [value] * 2)):
            continue
        hint = "change it in its config.json, or use other data"
        if name == "num_class_embeds":
            hint = EMBEDDINGS_HINT
        elif (option := kind_of(config).shape_options.get(name)) is not None:
            hint = f"give {option} {given[name]}, or another model"
        elif config.pretrained_model_name_or_path is not None:
            hint = "start from weights for such data, or use other data"
        raise must_be(name, given.get(name), f"{value}, {why}", hint, of=f"the model {config.given_model!r}")


def describe_model(config: ResolvedConfig, arguments: dict[str, Any]) -> str:
    """The class with its arguments; of a large default model, the channels of its levels."""
    name = model_class_of(config).__name__
    if config.denoiser is None and "block_out_channels" in arguments:
        return f"{name} {tuple(arguments['block_out_channels'])}"
    return f"{name}({', '.join(f'{key}={value}' for key, value in arguments.items())})"
