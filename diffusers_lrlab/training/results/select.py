"""The results of a kind of data."""

from __future__ import annotations

from ..kinds.base import DataKind
from . import images, points
from .base import RESULTS, Results

__all__ = ["images", "points", "results_of"]


def results_of(kind: DataKind) -> Results:
    """What samples of this kind are shown by."""
    return RESULTS[kind.name].factory()
