"""Which kind of data a configuration means."""

from typing import Any

from ...models.registry import architecture_of, architectures
from ..config import TrainingConfig
from . import images, latents, points
from .base import KINDS, DataKind

__all__ = ["KINDS", "component_of", "components", "images", "kind_of", "latents", "points"]


def components() -> tuple[str, ...]:
    """The folders of weights that runs on any kind of data write."""
    of_kinds = [entry.factory.component for entry in KINDS.values()]
    return tuple(dict.fromkeys([*of_kinds, *(each.component for each in architectures() if each.component)]))


def component_of(config: TrainingConfig | dict[str, Any]) -> str:
    """The model's name in the pipeline of a run, and so the folder of its weights."""
    known = config if isinstance(config, dict) else config.__dict__
    return architecture_of(known.get("denoiser")).component or kind_of(config).component


def kind_of(config: TrainingConfig | dict[str, Any]) -> DataKind:
    """The kind of data of a resolved configuration, or of a recorded one."""
    known = config if isinstance(config, dict) else config.__dict__
    return KINDS[known.get("data_kind") or "images"]()
