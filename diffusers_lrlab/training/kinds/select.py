"""Which kind of data a configuration means."""

from typing import Any

from ..config import TrainingConfig
from . import images, latents, points
from .base import KINDS, DataKind

__all__ = ["KINDS", "components", "images", "kind_of", "latents", "points"]


def components() -> tuple[str, ...]:
    """The folders of weights that runs on any kind of data write."""
    return tuple(dict.fromkeys(entry.factory.component for entry in KINDS.values()))


def kind_of(config: TrainingConfig | dict[str, Any]) -> DataKind:
    """The kind of data of a configuration, or of a recorded one; points are known by their column, which is found before."""
    known = config if isinstance(config, dict) else config.__dict__
    return KINDS[known.get("data_kind") or ("images" if known.get("point_column") is None else "points")]()
