"""The model of a run: a denoiser chosen by name, a given configuration of the default model, or its default; its start."""

from __future__ import annotations

import dataclasses
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import LabError, must_be
from ..core.words import counted
from ..data.latents import known_shape
from ..models.loading import OPTION, StartWeights, complete_config, find_start_weights, load_model_config
from ..models.registry import DENOISERS, Architecture, architecture_of, denoiser_arguments, denoiser_class
from ..models.width import ROLES, SCALED, Width, start_for_width, width_of, width_rule
from ..optimizers.build import LR_GROUP, split_group
from ..optimizers.entries import OPTIMIZERS
from .config import ResolvedConfig
from .kinds import component_of, kind_of
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
    architecture, kind, model_class = architecture_of(config.denoiser), kind_of(config), model_class_of(config)
    known, name = _known_arguments(config), config.model_config_name_or_path
    if config.num_classes is not None:
        _check_num_classes(architecture, config.num_classes, config, "--num_classes")
    if start is None and config.denoiser is not None:
        architecture.sizes(config.denoiser_kwargs or {}, known, None)  # which checks them
        return None
    given: dict[str, Any] | None = None
    if start is not None:
        given = complete_config(model_class, start.config, OPTION, start.name_or_path)
        if config.denoiser is not None:
            architecture.check_start(given, start.name_or_path)
    elif name is not None:
        given = load_model_config(model_class, name, config.cache_dir)
    complete = kind.check_model_config(config, given) if config.denoiser is None else given
    if given is not None:
        _check_shape(config, given, known, f"as the {kind.name} have")
    if start is not None and start.folder is not None:
        start.read(model_class)  # so that errors of weights come before data are read
    return complete


def _known_arguments(config: ResolvedConfig) -> dict[str, Any]:
    """Arguments of any model of images or latents that are known before data are read, and the classes of a UNet."""
    if (shape := known_shape(config)) is None:
        return {}
    channels, size = shape
    known: dict[str, Any] = {"sample_size": size, "in_channels": channels, "out_channels": channels}
    if config.denoiser is None and config.label_column is None:
        known["num_class_embeds"] = None
    elif config.denoiser is None and config.num_classes is not None:
        known["num_class_embeds"] = config.num_classes + (config.label_dropout > 0)
    return known


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
            hint = "it counts the classes of --label_column, and one more for dropped labels; change these, or the model"
        elif (option := getattr(kind_of(config), "shape_options", {}).get(name)) is not None:  # of images
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


# --- another width than the learning rate was found at (`--width_base`); `models/width.py` has the rules ----------------

TRAIT = "width_rule"  # of optimizers
GROUP = "hidden"  # the group of hidden and output matrices, in the log: `lr_hidden`


def check_width(config: ResolvedConfig) -> None:
    """Raises a `LabError` for a model, an optimizer or a schedule that `--width_base` has no rule for; reads no data."""
    if config.width_base is None:
        return
    if TRAIT not in OPTIMIZERS[config.optimizer].traits:
        reason = f"the steps of others follow the width in other ways; one of your own may declare the trait {TRAIT!r}"
        *names, last = (name for name, entry in OPTIMIZERS.items() if TRAIT in entry.traits)
        raise must_be("--optimizer", config.optimizer, f"{', '.join(names)} or {last} with --width_base", reason)
    traits, floor = config.schedule.traits, config.lr_scheduler_kwargs.get("min_lr", 0.0)
    if (floor and {"floor_of_all", "feedback"} & traits) or (floor is None and "feedback" in traits):
        raise LabError(
            f"--width_base gives groups of parameters their own rates, and --lr_scheduler {config.lr_scheduler} has one "
            "floor for all of them. Hint: give it min_lr=0, or use another schedule, such as cosine with min_lr_ratio."
        )
    width_rule(model_class_of(config))


def planned_width(config: ResolvedConfig, arguments: dict[str, Any]) -> Width | None:
    """The width of the model with these arguments, and the roles of its parameters; `None` without `--width_base`."""
    if config.width_base is None:
        return None
    import torch

    with torch.device("meta"):
        return width_of(model_class_of(config)(**arguments), config.width_base)


def width_groups(named: Mapping[str, Any], width: Width, learning_rate: float) -> list[dict[str, Any]]:
    """Parameter groups of a model by their factor on the learning rate; equal factors share a group."""
    names = {id(parameter): name for name, parameter in named.items()}
    factors = {width.factor(role) for role in ROLES}

    def factor_of(parameter: Any) -> float:
        return width.factor(width.roles[names[id(parameter)]])

    groups = split_group({"params": [*named.values()]}, learning_rate, factor_of, {each: each for each in factors})
    groups.sort(key=lambda group: group["lr"] != learning_rate)  # the log has the rate of the first group
    for group in groups[1:]:
        group[LR_GROUP] = GROUP
    return groups


def keep_weight_decay(optimizer: Any, width: Width) -> None:
    """
    Divides the weight decay of the groups whose learning rate has a factor by this factor.

    Decoupled weight decay shrinks a weight by the learning rate times `weight_decay` at each update. This product stays, as
    a part of muP.
    """
    for group in optimizer.param_groups:
        if group.get(LR_GROUP) == GROUP and "weight_decay" in group:
            group["weight_decay"] = group["weight_decay"] * width.width / width.base


def width_in_words(width: Width | None, weight_decay: float, indent: str) -> str:
    """The factors and the parameters that have them, with `*` for the index of a block."""
    if width is None:
        return ""
    lines = [f"{width.width}, of a base of {width.base} (muP)"]
    for role, title in ROLES.items():
        if names := width.names(role):
            shown = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name, count=1) for name in names)
            factor = f"learning rate x {width.factor(role):.4g}"
            if role in SCALED and weight_decay:
                factor += f", weight decay x {1 / width.factor(role):.4g}"
            some = ", ".join(shown) if role != "vector" else counted(len(names), "parameter")
            lines.append(f"{factor}: {title} ({some})")
    return f"\n{indent}".join(lines)
