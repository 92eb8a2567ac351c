"""The model of a run: a denoiser chosen by name, a given configuration of the default model, or its default."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

from ..core.errors import LabError, must_be
from ..models.loading import load_model_config
from ..models.registry import DENOISERS, denoiser_arguments, denoiser_class
from .config import ResolvedConfig
from .kinds.images import EMBEDDINGS_HINT
from .kinds.select import kind_of

if TYPE_CHECKING:
    from ..data.loading import TrainingData


def model_class_of(config: ResolvedConfig) -> Any:
    return pkgutil.resolve_name(kind_of(config).model) if config.denoiser is None else denoiser_class(config.denoiser)


def make_model(config: ResolvedConfig, arguments: dict[str, Any]) -> Any:
    """The model with these arguments, and the weights that it begins with."""
    return (model_class_of(config) if config.denoiser is None else DENOISERS[config.denoiser])(**arguments)


def given_model_config(config: ResolvedConfig) -> dict[str, Any] | None:
    """The configuration given for the default model, checked without data; `None` if there is none."""
    if config.denoiser is not None:
        return None
    name = config.model_config_name_or_path
    given = None if name is None else load_model_config(model_class_of(config), name, config.cache_dir)
    return kind_of(config).check_model_config(config, given)


def model_arguments(config: ResolvedConfig, given: dict[str, Any] | None, data: TrainingData) -> dict[str, Any]:
    """Arguments of the model, from what [`given_model_config`] gives; a `LabError` if they do not fit the data."""
    kind = kind_of(config)
    of_data = kind.data_arguments(config, data)
    if config.denoiser is not None:
        if config.gradient_checkpointing and not model_class_of(config)._supports_gradient_checkpointing:
            raise LabError(f"--gradient_checkpointing: the denoiser {config.denoiser!r} does not support it. Leave it out.")
        return denoiser_arguments(config.denoiser, config.denoiser_kwargs or {}, of_data, kind.name)
    if given is None:
        return kind.default_model_config(config, data)
    for name, value in of_data.items():
        if given.get(name, value) != value:
            hint = EMBEDDINGS_HINT if name == "num_class_embeds" else "change it in its config.json, or use other data"
            model = config.model_config_name_or_path
            raise must_be(name, given[name], f"{value}, as in the data {data.name!r}", hint, of=f"the model {model!r}")
    return given


def describe_model(config: ResolvedConfig, arguments: dict[str, Any]) -> str:
    """The class with its arguments; of a large default model, the channels of its levels."""
    name = model_class_of(config).__name__
    if config.denoiser is None and "block_out_channels" in arguments:
        return f"{name} {tuple(arguments['block_out_channels'])}"
    return f"{name}({', '.join(f'{key}={value}' for key, value in arguments.items())})"
